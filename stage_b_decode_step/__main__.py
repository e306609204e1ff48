"""`python -m stage_b_decode_step`: stage A's command line with a switch for each of this stage's ideas."""

from __future__ import annotations

from argparse import BooleanOptionalAction, _ArgumentGroup
from typing import TYPE_CHECKING

from stage_a_naive.entrypoints.cli import run
from stage_a_naive.entrypoints.language import tr

if TYPE_CHECKING:
    from stage_a_naive.contract.outputs import Metrics
    from stage_b_decode_step.llm import LLM


def add_options(group: _ArgumentGroup) -> None:
    """Add the stage's options; `--no-<idea>` switches an idea off."""

    def switch(flag: str, default: bool | None, text: str) -> None:
        group.add_argument(flag, action=BooleanOptionalAction, default=default, help=text)

    switch("--compile", False, "torch.compile on the decode step (with CUDA graphs on a GPU)")
    switch("--static-cache", True, "a KV cache of fixed shape instead of one that grows; --compile needs it")
    switch("--last-logits-only", True, "compute the prompt's logits for its last position only")
    switch("--async-eos", True, "find the end of sequence a few steps late instead of waiting at every step")
    group.add_argument("--sync-every", type=int, help="send tokens to the host every N steps (default: 8 on a GPU)")
    switch("--buffers", True, "write tokens into buffers allocated once")
    switch("--pinned", True, "copies from and to pinned host memory (GPU)")
    switch("--sdpa", None, "fused attention kernels instead of attention written out (default: not in a compiled step)")
    precisions = ["highest", "high", "medium"]
    group.add_argument("--matmul-precision", default="high", choices=precisions, help="of float32 (default: high)")
    switch("--warmup", True, "run each cache size once before its first request is timed, as part of the build time")


def idea(llm: LLM, metrics: Metrics) -> str:
    """Describe what has the same shape in every step."""
    cache = tr("a cache allocated once") if llm.static_cache else tr("a cache that grows (--no-static-cache)")
    compiled = tr("compiled") if llm.compile else tr("--compile makes it one program")
    return tr("every step has the same shapes: {cache}; {compiled}").format(cache=cache, compiled=compiled)


if __name__ == "__main__":
    text = "Stage B: one decode step as a function of fixed shapes, which torch.compile makes fast."
    raise SystemExit(run("stage_b_decode_step", text, add_options, idea=idea))
