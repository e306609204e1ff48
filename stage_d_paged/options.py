"""The engine's options: their names, defaults and limits, for this stage and all later ones.

Names, meanings and defaults are nano-vllm's (https://github.com/GeeeekExplorer/nano-vllm), so that a script written for
it runs here after changing its import line.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

from stage_a_naive.contract.params import as_boolean, as_integer, as_number, check_field

OTHER_NAMES = {"use_cuda_graph": "CUDA graphs are on where there are any, and enforce_eager=True switches them off"}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `LLM` from stage D on; an unknown option raises `TypeError`, one out of range `ValueError`.

    Attributes:
        max_num_batched_tokens: tokens in one step.
        max_num_seqs: requests that run together.
        max_model_len: tokens of prompt and answer together; lowered to the model's number of positions.
        gpu_memory_utilization: the share of the GPU's memory that this process may use.
        tensor_parallel_size: number of GPUs; only stage F supports more than one.
        enforce_eager: run without CUDA graphs. There are none before stage F, so both values have the same effect here.
        kvcache_block_size: tokens in a block; None means the attention backend's preferred size.
        num_kvcache_blocks: blocks in the pool; -1 means all that fit on a GPU, and 512 MiB on the CPU.
        enable_prefix_caching: share the blocks of equal prefixes.
        attention_backend: `auto`, `reference`, `triton` or `flash`.
        fused_mlp: stage C's operator for steps of a few tokens: `auto` (on a GPU, if it was built), `on` or `off`.
    """

    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int = -1
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    fused_mlp: str = "auto"

    def __post_init__(self) -> None:
        check = partial(check_field, self)
        for name, least in (
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("max_model_len", 2),  # one token of prompt, one of answer
            ("tensor_parallel_size", 1),
        ):
            check(name, as_integer, lambda v, least=least: v >= least, f"an integer, {least} or more")
        check("gpu_memory_utilization", as_number, lambda v: 0 < v <= 1, "above 0 and at most 1")
        if self.kvcache_block_size is not None:
            check("kvcache_block_size", as_integer, lambda v: v >= 1, "None or an integer, 1 or more")
        check("num_kvcache_blocks", as_integer, lambda v: v == -1 or v >= 1, "-1 (automatic) or an integer, 1 or more")
        for field in fields(self):
            if isinstance(field.default, bool):
                check(field.name, as_boolean, lambda v: True, "True or False")
        if self.fused_mlp not in ("auto", "on", "off"):
            raise ValueError(f"fused_mlp must be 'auto', 'on' or 'off', got {self.fused_mlp!r}")

    @classmethod
    def by_name(cls, options: Mapping[str, Any]) -> Self:
        """Make the options from a caller's arguments; a name from other engines raises an error with our name."""
        for name in OTHER_NAMES.keys() & options.keys():
            raise TypeError(f"unknown option {name!r}: {OTHER_NAMES[name]}")
        return cls(**options)

    def refuse_several_ranks(self) -> None:
        """Raise `ValueError` for more than one rank: only stage F supports that."""
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size}: this stage runs on one GPU; "
                "use stage_f_graph_tp for several"
            )


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line of this stage and later ones."""
    default = EngineOptions()
    for name, meaning in (
        ("max_num_batched_tokens", "tokens in one step"),
        ("max_num_seqs", "requests that are worked on together"),
        ("max_model_len", "tokens of prompt and answer together"),
        ("num_kvcache_blocks", "blocks in the pool; -1 takes what fits on a GPU, and 512 MiB on a CPU"),
    ):
        flag = "--" + name.replace("_", "-")
        help_text = f"{meaning} (default: %(default)s)"
        group.add_argument(flag, type=int, metavar="N", default=getattr(default, name), help=help_text)
    group.add_argument(
        "--kvcache-block-size", type=int, metavar="N", help="tokens in a block (default: what the backend prefers)"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        default=default.gpu_memory_utilization,
        help="share of the GPU's memory that this process may use (default: %(default)s)",
    )
    group.add_argument(
        "--attention-backend",
        metavar="NAME",
        default="auto",
        help="auto | reference | triton | flash (default: %(default)s)",
    )
    group.add_argument(
        "--fused-mlp", metavar="WHEN", default="auto", help="stage C's operator: auto | on | off (default: %(default)s)"
    )
    group.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="do not share the blocks of equal prefixes",
    )
