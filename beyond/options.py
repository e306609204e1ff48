"""All options of `beyond`'s engine, combinations that are refused, and the command-line arguments.

The packages document their options: `quantization/options.py`, `speculation/options.py`, `windows/options.py`,
`experts/options.py` and `scale_out/options.py`. All options are one flat set of names. Nearly all of them combine,
because each chooses a different part of the engine; `REFUSED` lists the pairs that do not combine, with advice. (The
list is in this file because the command line needs it before slow imports.)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from beyond.experts.options import ExpertOptions
from beyond.experts.options import add_options as add_expert_options
from beyond.quantization.options import QuantizationOptions
from beyond.quantization.options import add_options as add_quantization_options
from beyond.scale_out.options import ScaleOutOptions
from beyond.scale_out.options import add_options as add_scale_out_options
from beyond.speculation.options import MAX_SPECULATING, SpeculationOptions
from beyond.speculation.options import add_options as add_speculation_options
from beyond.windows.options import WindowOptions
from beyond.windows.options import add_options as add_window_options
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.options import add_options as add_graph_options


@dataclass(frozen=True, kw_only=True)
class Options(QuantizationOptions, SpeculationOptions, WindowOptions, ExpertOptions, ScaleOutOptions, GraphOptions):
    """Options of `beyond`'s `LLM`: stage F's and those of the packages."""

    def __post_init__(self) -> None:
        for group in (GraphOptions, QuantizationOptions, SpeculationOptions, ExpertOptions, ScaleOutOptions):
            group.__post_init__(self)
        for refusal in REFUSED:
            refusal.check(self)

    @property
    def num_ranks(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def max_rows(self) -> int:
        """Decode rows of the largest step: one per running sequence, plus the drafts."""
        if self.speculation == "off":
            return self.max_num_seqs
        drafts = self.num_speculative_tokens * min(self.max_num_seqs, MAX_SPECULATING)
        return min(self.max_num_seqs + drafts, self.max_num_batched_tokens)

    @property
    def overlaps(self) -> bool:
        """Whether a step is launched before the tokens of the last one are known."""
        # Without chunked prefill, decodes pause during prompt steps, and a step may mix guesses in flight with known
        # tokens.
        return self.uses("overlap") and (self.speculation == "off" or self.enable_chunked_prefill)

    @property
    def guesses_ahead(self) -> bool:
        """Whether the device guesses, so that no step waits for the previous one."""
        return self.overlaps and self.speculation == "ngram" and self.num_ranks == 1

    def stage_f(self, **changes: Any) -> GraphOptions:
        """Return stage F's options, with the given changes."""
        return GraphOptions(**{field.name: getattr(self, field.name) for field in fields(GraphOptions)} | changes)


class Refusal(NamedTuple):
    """Two options that cannot be combined."""

    one: str
    other: str
    applies: Callable[[Options], bool]
    advice: str

    def check(self, options: Options) -> None:
        """Raise `ValueError` if the options are combined like this."""
        if self.applies(options):
            one, other = (f"{name}={getattr(options, name)!r}" for name in (self.one, self.other))
            raise ValueError(f"{one} cannot be combined with {other}: {self.advice}")


REFUSED = (
    Refusal(
        "fused_mlp",
        "quantization",
        lambda o: o.fused_mlp == "on" and o.quantization is not None,
        "stage C's operator reads no 8-bit weights; use fused_mlp='auto'",
    ),
    Refusal(
        "quantize_lm_head",
        "tensor_parallel_size",
        lambda o: o.quantize_lm_head and o.tensor_parallel_size > 1,
        "the ranks split the LM head in 16 bits; leave quantize_lm_head out",
    ),
    Refusal(
        "attention_backend",
        "kv_cache_dtype",
        lambda o: o.attention_backend == "flash" and o.kv_cache_dtype != "auto",
        "flash-attn cannot read an 8-bit cache; use attention_backend='triton' or 'reference'",
    ),
    Refusal(
        "speculation",
        "tensor_parallel_size",
        lambda o: o.speculation == "model" and o.tensor_parallel_size > 1 and o.num_kvcache_blocks == -1,
        "the first GPU also holds the small model and a pool of as many blocks for it; give num_kvcache_blocks too",
    ),
    Refusal(
        "expert_parallel",
        "tensor_parallel_size",
        lambda o: o.expert_parallel != "off" and o.tensor_parallel_size == 1,
        "one rank has all experts; give tensor_parallel_size, the ranks that divide them",
    ),
    Refusal(
        "without",
        "pipeline_parallel_size",
        lambda o: not o.uses("overlap") and o.pipeline_parallel_size > 1,
        "for one batch at a time use num_micro_batches=1",
    ),
    Refusal(
        "hybrid_kv_cache",
        "pipeline_parallel_size",
        lambda o: o.hybrid_kv_cache and o.pipeline_parallel_size > 1,
        "a stage's pool serves all of its layers; use tensor_parallel_size",
    ),
    Refusal(
        "hybrid_kv_cache",
        "speculation",
        lambda o: o.hybrid_kv_cache and o.speculation == "model",
        "the small model keeps its own keys in one pool of as many blocks; use speculation='ngram'",
    ),
)


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    packages = add_quantization_options, add_speculation_options, add_window_options, add_expert_options
    for add in (add_graph_options, *packages, add_scale_out_options):
        add(group)
