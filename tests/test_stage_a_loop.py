"""The loop on one screen: with and without a cache the same tokens, which are those of the engine."""

from __future__ import annotations

import pytest

from stage_a_naive import LLM, SamplingParams, loop


def test_the_loops_choose_the_tokens_of_the_engine() -> None:
    llm = LLM("random:qwen2-tiny", device="cpu")
    prompt = [5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    ids = llm.generate([prompt], params, use_tqdm=False)[0]["token_ids"]
    for generate in (loop.generate_uncached, loop.generate):
        assert generate(llm.model, prompt, eos_id=-1, max_tokens=12) == ids
        end = ids.index(ids[5])
        assert generate(llm.model, prompt, eos_id=ids[5], max_tokens=12) == ids[: end + 1]


def test_the_program_prints_both_times_and_the_answer(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(loop, "QUESTION", "What is a KV cache?")
    loop.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("generate_uncached ") and lines[1].startswith("generate ")
    assert "key" in lines[2].lower()
