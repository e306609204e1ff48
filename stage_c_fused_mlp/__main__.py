"""`python -m stage_c_fused_mlp`: stage B's command line, plus the choice of the kernel for the MLP block."""

from __future__ import annotations

from argparse import _ArgumentGroup
from typing import TYPE_CHECKING

from stage_a_naive.entrypoints.cli import run
from stage_a_naive.entrypoints.language import tr
from stage_b_decode_step.__main__ import add_options as add_stage_b_options

if TYPE_CHECKING:
    from stage_a_naive.contract.outputs import Metrics
    from stage_c_fused_mlp.llm import LLM


def add_options(group: _ArgumentGroup) -> None:
    """Add stage B's options and the options of this stage."""
    add_stage_b_options(group)
    kernels = "auto | naive | warp | fused | library"
    group.add_argument("--mlp-kernel", default="auto", help=f"what computes the MLP block: {kernels} (default: auto)")


def idea(llm: LLM, metrics: Metrics) -> str:
    """Describe what was replaced, and also time a few steps with PyTorch's MLP blocks."""
    from stage_a_naive.contract.params import SamplingParams
    from stage_c_fused_mlp.patch import restore_mlp

    report = tr("{layers} MLP blocks run as one operator ({kernel}, built in {seconds:.1f} s)")
    report = report.format(layers=llm.patch_report.layers, kernel=llm.mlp_kernel, seconds=llm.extension_time)
    if llm.compile:  # with another MLP the step would compile again
        return report
    params = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)

    def step() -> float:
        answers = [llm.generate([[1, 2, 3]], params, use_tqdm=False)[0] for _ in range(4)]
        return 1e3 * min(answer["metrics"]["tpot"] for answer in answers)

    ours = step()
    restore_mlp(llm.model)
    compared = tr("{report}; a step: {ours:.2f} ms, with PyTorch's kernels {theirs:.2f} ms")
    return compared.format(report=report, ours=ours, theirs=step())


if __name__ == "__main__":
    text = "Stage C: stage B with the MLP block of every layer in one custom C++/CUDA operator."
    raise SystemExit(run("stage_c_fused_mlp", text, add_options, idea=idea))
