"""The studies for the figures of stages A to C: their counts, and figures that agree with their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.micro import no_cache, waterfall
from benchmarks.trace import Span, read_trace

ROOT = Path(__file__).resolve().parent.parent
LAYER = ["norm", "mm", "mm", "mm", "rope", "flash_fwd", "mm", "add", "norm", "mm", "mm", "silu", "mm", "add"]
FUSED_LAYER = ["norm", "mm", "mm", "mm", "rope", "flash_fwd", "mm", "add", "swiglu_mlp"]
WRITTEN_OUT = [
    part for name in LAYER for part in (["bmm", "triton_red_softmax", "bmm"] if name == "flash_fwd" else [name])
]
BY_COMPILER = ["triton_softmax" if name == "flash_fwd" else name for name in LAYER]


def spans(layer: list[str], steps: int, prefill: list[str] = LAYER, angles: str = "bmm") -> list[Span]:
    """A prefill and decode steps of a model of three layers."""
    names = ["embedding", "bmm", *prefill, *prefill, *prefill, "norm", "mm", "argmax"]
    names += ["embedding", angles, *layer, *layer, *layer, "norm", "mm", "argmax"] * steps
    return [Span(name, 10.0 * i, 1.0) for i, name in enumerate(names)]


@pytest.mark.parametrize("angles", ["bmm", "triton_cos_sin"])
@pytest.mark.parametrize(
    ("layer", "prefill", "attention", "mlp"),
    [
        (LAYER, LAYER, 6, 6),
        (FUSED_LAYER, FUSED_LAYER, 6, 2),
        (FUSED_LAYER, LAYER, 6, 2),
        (WRITTEN_OUT, LAYER, 8, 6),
        (BY_COMPILER, LAYER, 6, 6),
    ],
)
def test_a_step_is_cut_into_its_parts_by_the_order_of_its_products(layer, prefill, attention, mlp, angles):
    found = spans(layer, 3, prefill, angles)
    named = waterfall.parts_of_steps(found, num_layers=3, steps=3)
    parts = [[name for part, (name, *_) in named if part == wanted] for wanted in waterfall.PARTS]
    between = len(layer) - attention - mlp  # from one layer to the next: the end of one, the norm of the next
    assert len(parts[0]) == 3 * (3 * attention + 2 * between)
    assert len(parts[1]) == 3 * 3 * mlp  # from the residual to the last product
    assert parts[2] == ["mm"] * 3
    assert parts[3] == ["argmax", "embedding", angles, "norm", *layer[len(layer) - between + 1 :], "norm"] * 3
    assert [span for _, span in named] == found[found.index(named[0][1]) : -1], "all spans, up to the last LM head"


def test_names_that_a_compiler_made_from_other_names_are_not_taken_for_them():
    made = [Span("triton_poi_fused_addmm_flash_attention_0", 0.0, 1.0), *spans(LAYER, 1)]
    cut = [waterfall.parts_of_steps(given, num_layers=3, steps=1) for given in (made, made[1:])]
    assert cut[0] == cut[1]


def test_a_step_whose_products_cannot_be_told_apart_is_not_cut():
    named = waterfall.parts_of_steps(spans(["cpp_fused_mm_0", "cpp_fused_mm_1"], 2)[:-1], num_layers=3, steps=2)
    assert {part for part, _ in named} == {"other kernels"} and len(named) == 2 * (2 + 6 + 2) + 2


def test_spans_without_the_attention_of_a_prefill_are_refused():
    with pytest.raises(ValueError, match="1 attention kernels in 3 layers; the most frequent are: flash_fwd"):
        waterfall.parts_of_steps([Span("flash_fwd", 0, 1.0)], num_layers=3)


def test_the_answer_without_a_cache_is_measured_step_by_step():
    result = no_cache.measure("random:qwen2-tiny", prompt_tokens=4, tokens=3, repeats=1)
    [row] = result["rows"]
    assert len(row["cached"]) == len(row["recomputed"]) == 3


def test_the_strided_kernel_reads_every_nth_number():
    program = (
        "import torch; from benchmarks.micro._kernels import BLOCK, strided_sums\n"
        "source = torch.arange(2 * BLOCK * 4, dtype=torch.float32)\n"
        "for stride in (1, 4):\n"
        "    expected = source[: 2 * BLOCK * stride : stride].view(2, BLOCK).sum(1)\n"
        "    torch.testing.assert_close(strided_sums(source, stride, 2 * BLOCK), expected)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_a_product_with_a_bias_is_one_operator_and_not_the_copy_in_it(tmp_path: Path):
    called = [("linear", 0, 10), ("addmm", 1, 8), ("copy_", 2, 1), ("linear", 20, 10), ("mm", 21, 8), ("add", 40, 5)]
    events = [{"ph": "X", "cat": "cpu_op", "tid": 1, "name": f"aten::{n}", "ts": t, "dur": d} for n, t, d in called]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert [span.name for span in read_trace(tmp_path / "trace.json", is_cuda=False)] == ["addmm", "mm", "add"]
