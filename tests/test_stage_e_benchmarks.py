"""The measurements of stage E's lesson: they run, they count what they say, and they notice what they watch for."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import batching_report, scheduling, step_cost
from benchmarks.soak import HOST_GROWTH, Sample, Tally, verdict
from stage_e_batching.scheduler import Scheduler

CALM = [Sample(float(i), i, 500 << 20, 1 << 20, 2 << 20, 0) for i in range(8)]


def test_the_cost_of_a_step_is_measured_and_split_up():
    row = step_cost.measure(3, steps=4, repeats=2)
    assert row["sequences"] == 3
    assert len(row["samples_us"]) == 2 and row["us_per_step"] > 0
    assert set(row["parts_us"]) == {"schedule", "run", "postprocess"}


def test_the_watermark_lowers_the_recomputation():
    without = scheduling.tight_pool("none", scheduling.NoWatermark)
    with_it = scheduling.tight_pool("doubling", Scheduler)
    assert with_it["recomputed"] < without["recomputed"] / 2
    assert with_it["preemptions"] < without["preemptions"]


def test_a_calm_soak_passes():
    assert verdict(Tally(compared=5, samples=CALM)) == []


def test_a_soak_fails_by_name():
    assert "differ" in verdict(Tally(compared=5, different=1, samples=CALM))[0]
    leaking = [*CALM[:-1], replace(CALM[-1], used_pages=1)]
    assert "pages were in use" in verdict(Tally(samples=leaking))[0]
    grown = [*CALM[:-1], replace(CALM[-1], resident_bytes=CALM[0].resident_bytes + HOST_GROWTH + 1)]
    assert "resident memory grew" in verdict(Tally(samples=grown))[0]
    on_device = [*CALM[:-1], replace(CALM[-1], device_allocated_bytes=4 << 20)]
    assert "device's allocated memory grew" in verdict(Tally(samples=on_device))[0]


def test_the_lessons_tables_are_those_of_the_results_files():
    text = batching_report.README.read_text(encoding="utf-8")
    [counted] = batching_report.results("scheduling")
    assert batching_report.seats_table(counted) in text
    assert batching_report.preemption_table(counted) in text
    assert batching_report.step_cost_table() in text
    assert batching_report.soak_table() in text
