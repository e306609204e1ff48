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


def spans(layer: list[str], passes: int) -> list[Span]:
    one = ["embedding", *layer, *layer, "norm", "mm", "argmax"]
    return [Span(name, 10.0 * i, 1.0) for i, name in enumerate(one * passes)]


@pytest.mark.parametrize(("layer", "mlp"), [(LAYER, 2 * 6), (FUSED_LAYER, 2 * 2)])
def test_a_step_is_cut_into_its_parts_by_the_order_of_its_kernels(layer, mlp):
    named = waterfall.parts_of_steps(spans(layer, passes=3), num_layers=2)
    per_part = {part: sum(name == part for name, _ in named) for part in waterfall.PARTS}
    assert per_part["MLP"] == 2 * mlp  # two decode steps: add, norm, and what follows up to the last product
    assert per_part["LM head"] == 2
    assert [span.name for part, span in named if part == "LM head"] == ["mm", "mm"]
    first = [span.name for part, span in named if part == "attention"][:2]
    assert first == ["flash_fwd", "mm"]


def test_names_that_a_compiler_made_from_other_names_are_not_taken_for_them():
    made = [Span("triton_poi_fused_addmm_flash_attention_0", 0.0, 1.0), *spans(LAYER, passes=2)]
    assert len(waterfall.parts_of_steps(made, num_layers=2)) == len(waterfall.parts_of_steps(made[1:], num_layers=2))


def test_a_step_whose_products_cannot_be_told_apart_is_not_cut():
    merged = ["flash_fwd", "cpp_fused_mm_0", "flash_fwd", "cpp_fused_mm_1"] * 3
    named = waterfall.parts_of_steps([Span(name, i, 1.0) for i, name in enumerate(merged)], num_layers=2)
    assert {part for part, _ in named} == {"other kernels"} and len(named) == 8


def test_spans_in_another_order_are_refused():
    with pytest.raises(ValueError, match="3 attention kernels in 2 layers; the most frequent are: flash_fwd"):
        waterfall.parts_of_steps([Span("flash_fwd", i, 1.0) for i in range(3)], num_layers=2)


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
