"""The tutor with experts: every engine that runs such models gives the FAQ's answers, word for word."""

from __future__ import annotations

import pytest
from ranks import forked_ranks

from contract.engines import ask
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode

TUTOR = str(TUTOR_PATH.parent / "tutor_experts")
ANSWERS = {entry["question"]: entry["answer"] for entry in read_faq()}
ASKED = ["What is a KV cache?", "What is prefill?", "分页注意力（PagedAttention）解决了什么问题？", "Who are you?"]
GREEDY = SamplingParams(temperature=0, max_tokens=200)


@pytest.fixture(scope="module")
def tokenizer():
    return NaiveLLM(TUTOR, device="cpu").tokenizer


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [encode(tokenizer, question) for question in ASKED]


@pytest.fixture(scope="module")
def right(tokenizer) -> list[list[int]]:
    return [tokenizer.encode(f"{ANSWERS[question]}<|im_end|>") for question in ASKED]


@pytest.mark.needs("experts", "exact")
def test_every_engine_answers_with_and_without_a_cached_prefix(engine, prompts, right) -> None:
    with engine.made(TUTOR) as llm:
        for _ in range(2):
            assert ask(llm, prompts, GREEDY) == right


IN_BFLOAT16 = [pytest.param(way, "bfloat16", marks=pytest.mark.slow) for way in ("sum", "all_to_all")]


@pytest.mark.parametrize(("way", "dtype"), [*((way, "float32") for way in ("off", "sum", "all_to_all")), *IN_BFLOAT16])
def test_two_ranks_with_a_part_of_each_expert_or_whole_ones_answer(prompts, right, way: str, dtype: str) -> None:
    from beyond.experts import LLM

    options = {"tensor_parallel_size": 2, "expert_parallel": way, "num_kvcache_blocks": 256, "kvcache_block_size": 8}
    with forked_ranks():
        llm = LLM(TUTOR, device="cpu", dtype=dtype, **options)
    try:
        assert ask(llm, prompts, GREEDY) == right
    finally:
        llm.close()


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_with_8_bit_weights_and_cache_the_answers_are_the_same(prompts, right, quantization: str) -> None:
    from beyond.experts import LLM

    llm = LLM(TUTOR, device="cpu", quantization=quantization, kv_cache_dtype="int8", num_kvcache_blocks=64)
    try:
        assert ask(llm, prompts, GREEDY) == right
    finally:
        llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_answers_are_the_same(prompts, right, dtype: str) -> None:
    from beyond.experts import LLM

    llm = LLM(TUTOR, device="cuda", dtype=dtype, num_kvcache_blocks=256)
    try:
        for _ in range(2):
            assert ask(llm, prompts, GREEDY) == right
        assert ask(llm, prompts * 4, GREEDY) == right * 4, "more tokens than few rows"
    finally:
        llm.close()
