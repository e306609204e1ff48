"""Recording what a decode step runs: innermost operators only, the time that something runs, and the results file."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.kernel_spans import Recording, Span, from_json, record, record_engine, to_json
from benchmarks.pictures.spans import draw_gaps, draw_kinds, kind_of
from stage_f_graph_tp import LLM


def test_only_operators_that_compute_and_call_no_other_are_recorded():
    x, w = torch.randn(4, 8), torch.randn(16, 8)
    recording = record("two", lambda: torch.relu(torch.nn.functional.linear(x, w)), torch.device("cpu"), steps=1)
    names = [span.name for span in recording.spans]
    assert names[-1] in ("relu", "clamp_min")
    assert [kind_of(name) for name in names] == ["matrix products", "element by element"]


def test_busy_time_counts_overlapping_spans_once():
    recording = Recording("r", 1, [Span("a", 0, 4), Span("b", 2, 4), Span("c", 10, 2)])
    assert recording.busy == 8
    assert recording.whole == 12


def test_a_run_of_nothing_is_refused():
    with pytest.raises(RuntimeError, match="saw nothing run in 'idle'"):
        record("idle", lambda: None, torch.device("cpu"), steps=1)


def test_an_engine_is_idle_again_after_its_recording_and_the_file_holds_it():
    llm = LLM("random:qwen2-tiny", device="cpu", max_num_seqs=4, num_kvcache_blocks=64, kvcache_block_size=16)
    recording = record_engine("F", llm, num_requests=2, prompt_tokens=20, steps=2)
    assert llm.engine.stats()["num_used_pages"] == 0
    assert not llm.engine.has_unfinished()
    again = from_json(json.loads(json.dumps(to_json([recording], "random:qwen2-tiny"))))
    assert again == [recording]
    for picture in (draw_gaps(again, "a CPU"), draw_kinds(again)):
        assert picture.png.startswith(b"\x89PNG")
