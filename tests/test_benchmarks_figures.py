"""The studies behind the figures of stages A to C: what they count, and that a figure says what its file says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from measured import ON_GPU, is_drawn

from benchmarks.micro import coalescing, no_cache, waterfall
from benchmarks.pictures.picture import pictures
from benchmarks.render import tables
from benchmarks.trace import Span

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


def test_idle_is_what_the_kernels_leave_of_the_step():
    row = {"samples": [0.001, 0.002, 0.0011], "parts": {"attention": 100.0, "MLP": 200.0}}
    assert waterfall.waterfall(row)["idle"] == pytest.approx(800.0)


def test_stages_are_timed_and_recorded_under_their_names_and_compiled_ones_with_the_attention_that_can_be_found(
    monkeypatch,
):
    options = []

    def answer(work: Callable, build: Callable, *given: object) -> dict:
        options.append(build.__self__.options)
        return work(object())

    measured = {"samples_of": lambda *_: {"samples": [1.0]}, "parts_per_step": lambda *_: {"kernels": 1, "parts": {}}}
    for name, stand_in in {"with_engine": answer, **measured}.items():
        monkeypatch.setattr(waterfall, name, stand_in)
    rows = waterfall.measure()["rows"]
    assert [row["engine"] for row in rows] == ["A", "B", "B compiled", "C", "C compiled"]
    assert all(row.keys() == {"engine", "samples", "kernels", "parts"} for row in rows)
    compiled = {"compile": True, "sdpa": True}
    assert options == 2 * [{}, {}, compiled, {}, compiled]


def waterfall_result() -> dict:
    parts = {"attention": 300.0, "MLP": 600.0, "LM head": 100.0, "other kernels": 50.0}
    rows = [
        {"engine": name, "samples": [seconds], "kernels": 700, "parts": parts}
        for name, seconds in (("A", 0.0145), ("B compiled", 0.0022))
    ]
    return {"kind": "waterfall", "environment": ON_GPU, "model": "m", "context": 128, "rows": rows}


def test_figures_are_drawn_and_tables_written_from_the_file_alone():
    strides = [{"stride_bytes": 4 * 2**i, "wanted_bytes": 4e9, "samples": [0.001 * 2**i]} for i in range(4)]
    scattered = {"kind": "coalescing", "environment": ON_GPU, "rows": strides}
    steps = {"prompt_tokens": 4, "cached": [0.001] * 3, "recomputed": [0.001, 0.002, 0.003]}
    cached = {"kind": "no_cache", "environment": ON_GPU, "model": "m", "repeats": 1, "rows": [steps]}
    for module, result, cell in (
        (waterfall, waterfall_result(), "| A | 700 | 300 | 600 | 100 | 50.0 | 13,450 |"),
        (coalescing, scattered, "256 MB of them wanted"),
        (no_cache, cached, "a step is the fastest of 1 runs"),
        (no_cache, cached, "3 tokens after a prompt of 4: 0.01 s without a cache, 0.00 s with it."),
    ):
        assert is_drawn(pictures(module, [result]) or module.draw([result]))
        assert any(cell in line for lines in tables(module, [result]).values() for line in lines)


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
