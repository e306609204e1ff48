"""The options that speculation adds, and all of them on the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

from stage_a_naive.contract.params import as_integer, check_field
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.options import add_options as add_graph_options

KINDS = ("ngram", "model", "off")
MAX_DRAFT = 64  # tokens
MAX_SPECULATING = 64  # sequences that run when drafts are made; with more of them a step has no room to spare


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(GraphOptions):
    """Options of this package's `LLM`.

    Attributes:
        speculation: where drafts come from: "ngram" looks the last tokens up in the prompt and the answer; "model" asks
            a small model; "off" makes none, which is stage F.
        num_speculative_tokens: the longest draft.
        draft_model: the small model, of the same tokenizer; its vocabulary may have fewer padding tokens. The tutor has
            one of its own.
    """

    speculation: str = "ngram"
    num_speculative_tokens: int = 4
    draft_model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculation not in KINDS:
            raise ValueError(f"speculation={self.speculation!r} is unknown; choose one of {', '.join(KINDS)}")
        rule = f"an integer from 1 to {MAX_DRAFT}"
        check_field(self, "num_speculative_tokens", as_integer, lambda v: 1 <= v <= MAX_DRAFT, rule)
        if self.draft_model is not None and self.speculation != "model":
            raise ValueError(
                f"draft_model={self.draft_model!r} and speculation={self.speculation!r}: give speculation='model'"
            )
        if self.speculation == "model" and self.tensor_parallel_size > 1 and self.num_kvcache_blocks == -1:
            raise ValueError(
                f"speculation='model' with tensor_parallel_size={self.tensor_parallel_size} needs num_kvcache_blocks=: "
                "the first GPU also holds the small model and a pool of as many blocks for it"
            )

    @property
    def max_rows(self) -> int:
        """Decode rows of the largest step: one per running sequence, and the drafts of those that have one."""
        if self.speculation == "off":
            return self.max_num_seqs
        drafts = self.num_speculative_tokens * min(self.max_num_seqs, MAX_SPECULATING)
        return min(self.max_num_seqs + drafts, self.max_num_batched_tokens)

    def stage_f(self, **changes: Any) -> GraphOptions:
        """Stage F's options among these, some of them changed."""
        return GraphOptions(**{field.name: getattr(self, field.name) for field in fields(GraphOptions)} | changes)


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    add_graph_options(group)
    group.add_argument("--speculation", choices=KINDS, default="ngram", help="where drafts come from")
    group.add_argument("--draft-model", metavar="MODEL", help="a small model of the same tokenizer")
    group.add_argument(
        "--num-speculative-tokens", type=int, default=4, metavar="N", help="the longest draft (default: %(default)s)"
    )
