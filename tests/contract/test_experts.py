"""Models with a mixture of experts: every engine that runs them gives stage A's tokens, and others refuse by name."""

from __future__ import annotations

import pytest
from ranks import forked_ranks

from contract.engines import BATCHING, GREEDY, NOTHING, PROMPTS, ask, held, one_by_one, row
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_a_naive.contract.errors import ModelError

MODEL = "random:qwen3-moe-tiny"  # 4 of 16 experts per token
LONGER = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
OTHERS = ("random:qwen2-moe-tiny", "random:mixtral-tiny")


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    return one_by_one(NaiveLLM(MODEL, device="cpu"), LONGER)


@pytest.mark.needs("experts")
def test_every_engine_gives_stage_as_tokens_with_and_without_a_cached_prefix(engine, right) -> None:
    with engine.made(MODEL) as llm:
        expected = right if "exact" in engine.has else one_by_one(llm, LONGER)
        for _ in range(2):
            assert ask(llm, PROMPTS, LONGER) == expected
        assert ask(llm, [PROMPTS[4]] * 3, LONGER) == [expected[4]] * 3
        if "pool" in engine.has:
            assert held(llm) == NOTHING


@pytest.mark.needs("experts", "one process", "exact")
@pytest.mark.parametrize("model", OTHERS)
def test_the_other_families_give_stage_as_tokens_too(engine, model: str) -> None:
    with engine.made(model, seed=3) as llm:
        assert ask(llm, PROMPTS) == one_by_one(NaiveLLM(model, device="cpu", seed=3))


IN_PIECES = {"max_num_batched_tokens": 7, "max_num_seqs": 5, "num_kvcache_blocks": 20}
DIVIDED = [
    row(way, "beyond.experts", BATCHING, "exact", tensor_parallel_size=2, expert_parallel=way)
    for way in ("sum", "all_to_all")
]


@pytest.mark.parametrize("engine", DIVIDED, indirect=True, ids=lambda engine: engine.name)
@pytest.mark.parametrize("options", [{}, IN_PIECES], ids=["", "in pieces"])
@pytest.mark.parametrize("model", [MODEL, *OTHERS])
def test_two_ranks_with_whole_experts_give_stage_as_tokens(engine, model: str, options: dict) -> None:
    with forked_ranks(), engine.made(model, **options) as llm:
        expected = one_by_one(NaiveLLM(model, device="cpu"))
        for _ in range(2):
            assert ask(llm, PROMPTS) == expected
        assert held(llm) == NOTHING


def test_an_engine_without_experts_names_the_one_that_has_them(engine) -> None:
    if "experts" not in engine.has:
        with pytest.raises(ModelError, match="layers with experts .* beyond.experts"):
            engine.make(MODEL)


@pytest.mark.gpu
@pytest.mark.needs("experts", "pool", "one process", "exact")
@pytest.mark.parametrize("model", [MODEL, *OTHERS])
def test_on_a_gpu_every_engine_gives_stage_as_tokens(engine, model: str) -> None:
    gpu = {"device": "cuda", "dtype": "float32"}
    expected = one_by_one(NaiveLLM(model, **gpu))
    with engine.made(model, **gpu) as llm:
        for _ in range(2):
            assert ask(llm, PROMPTS) == expected
        assert ask(llm, PROMPTS * 4, GREEDY) == expected * 4, "more tokens than few rows"
