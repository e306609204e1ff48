"""The study of speculative decoding: its script accepts what it says, and its tables say what its files say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from measured import CEILINGS, ON_GPU, is_drawn

from benchmarks.micro import _scripted, speculation
from benchmarks.micro._scripted import ScriptedLLM, ScriptedModelLLM
from benchmarks.pictures.picture import pictures
from benchmarks.pictures.speculation import draw_tokens, record_steps
from benchmarks.render import tables
from beyond.speculation import LLM
from stage_a_naive.sampling import SamplingParams

RATES = [(0.5, 4), (0.83, 8), (1.0, 5)]
SCRIPTS = [(ScriptedLLM, 0.0, 4), *((kind, *rate) for kind in (ScriptedLLM, ScriptedModelLLM) for rate in RATES)]


@pytest.mark.parametrize(("kind", "rate", "drafted"), SCRIPTS)
def test_a_script_calls_the_share_right_that_it_was_given(kind, rate, drafted, monkeypatch):
    monkeypatch.setattr("beyond.speculation.sequence.COST", -1.0)  # drafts go on, however often they are wrong
    options = {"draft_model": "random:qwen3-tiny"} if kind is ScriptedModelLLM else {}
    options |= {"num_kvcache_blocks": 64, "num_speculative_tokens": drafted}
    llm = kind("random:qwen2-tiny", device="cpu", **options)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    llm.script(rate)
    llm.generate([[1, 2, 3]], params, False)
    counters = replace(llm.engine.counters)
    assert counters.num_accepted_tokens == pytest.approx(rate * counters.num_draft_tokens, abs=drafted)
    assert counters.num_generated_tokens == 150
    llm.script(None)
    llm.generate([[1, 2, 3]], params, False)
    assert llm.engine.counters.num_draft_tokens == counters.num_draft_tokens, "switched off it guesses nothing"


def test_ways_take_turns_and_the_first_turn_is_not_counted(monkeypatch):
    order, seconds = [], iter(range(1, 7))
    monkeypatch.setattr(_scripted, "run", lambda llm, batch, params: (next(seconds), 1.0))
    ways = {way: (partial(order.append, way), None) for way in ("plain", "accepted")}
    plain, accepted = _scripted.take_turns(None, 8, 2, ways, draft=4, batch=8)
    assert order == ["plain", "accepted"] * 3
    assert plain == {"draft": 4, "batch": 8, "way": "plain", "samples": [3, 5], "tokens_per_step": 1.0}
    assert accepted["samples"] == [4, 6]


def result_of(step_seconds: dict[int, float], plain: float) -> dict:
    """A file in which a step with 4 drafted tokens, 3 of them right, takes so long by batch size."""
    rows = []
    for batch, seconds in step_seconds.items():
        more = 0.01 if batch > 1 else 0.0  # of the time per token
        for way, per_token, per_step in (
            ("plain", plain, 1.0),
            ("accepted", seconds / 4, 4.0),
            ("wrong", (1 + more) * plain, 1.0),
            ("plain, noisy", plain, 1.0),
            ("looking", (1 + 2 * more) * plain, 1.0),
        ):
            row = {"draft": 4, "batch": batch, "prompt": speculation.PROMPT, "way": way}
            rows.append(row | {"samples": [per_token] * 3, "tokens_per_step": per_step})
    counts = {"num_steps": 20, "num_generated_tokens": 90, "num_draft_tokens": 80, "num_accepted_tokens": 70}
    asked = {"asked": "again", "requests": 2, "same_answers": True, "seconds_per_token": 1e-4} | counts
    return {
        "kind": "speculation",
        "environment": ON_GPU,
        "model": "random:qwen2.5-0.5b",
        "rate": 0.75,
        "tokens": 128,
        "repeats": 3,
        "rows": rows,
        "text": [asked | {"speculation": kind} for kind in ("ngram", "model")],
        "tutor": {"off": [2e-4] * 3, "ngram": [2.1e-4] * 3},
        "ceilings": CEILINGS,
    }


def test_a_step_that_takes_three_times_as_long_must_find_two_guesses_right():
    result = result_of({1: 1.5e-3, 64: 3e-3}, plain=1e-3)
    assert speculation.break_even(result, 4) == pytest.approx({1: 0.5, 64: 2.0})
    found = tables(speculation, [result])
    assert set(found) == {"speculation", "speculation-text", "speculation-floor", "speculation-pair"}
    assert any(line.startswith("| 64 | 1.00 | 0.75 |") for line in found["speculation"])
    assert any("at most 2.0 %" in line and "at most 1.0 %" in line for line in found["speculation"])
    assert any("takes 0.21 ms per token with look-up and 0.2 without (+5.0 %)" in row for row in found["speculation"])
    assert "| look-up, asked again | 90 | 20 | 4.50 | 70 of 80 |" in found["speculation-text"]
    assert is_drawn(pictures(speculation, [result]), "beyond/speculation/break_even.svg")


def test_a_small_models_draft_must_gain_what_it_and_its_verification_take():
    result = result_of({1: 1e-3}, plain=1e-3)
    assert tables(speculation, [result])["speculation-pair"] == []
    rows = [
        {"rate": rate, "samples": [seconds] * 3, "tokens_per_step": tokens}
        for rate, seconds, tokens in ((None, 2e-3, 1.0), (speculation.RATE, 1e-3, 4.0), (speculation.HALF, 1.5e-3, 2.5))
    ]
    slower = [row | {"samples": [1.2 * seconds for seconds in row["samples"]]} if row["rate"] else row for row in rows]
    drafts = {"ngram": {"rows": rows}, "model": {"rows": slower}}
    result["pair"] = {"model": "random:large", "draft_model": "random:small", "drafts": drafts}
    lines = tables(speculation, [result])["speculation-pair"]
    assert "| look-up | 4.00 | 2.00 / 1.00 / 1.50 | 1.0 |" in lines
    assert "| small | 4.80 | 2.00 / 1.20 / 1.80 | 1.4 |" in lines


def test_recorded_steps_join_to_the_answer_and_count_the_guesses():
    llm = LLM("tutor", device="cpu", num_kvcache_blocks=64, speculation="ngram")
    question = {"role": "user", "content": "What is prefill?"}
    first = record_steps(llm, [question], max_tokens=60)
    answer = "".join(piece for step in first for piece in step.pieces)
    assert answer.startswith("Prefill is") and sum(step.num_right for step in first) == 0
    again = record_steps(llm, [question, {"role": "assistant", "content": answer}, question], max_tokens=60)
    assert "".join(piece for step in again for piece in step.pieces) == answer
    assert len(again) < len(first) / 2
    assert sum(step.num_right for step in again) == llm.engine.counters.num_accepted_tokens > 30
    assert is_drawn({"tokens": draw_tokens(again)})
