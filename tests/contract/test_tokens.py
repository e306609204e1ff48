"""Every engine's greedy tokens are stage A's, whatever it does to be fast."""

from __future__ import annotations

from functools import cache

import pytest

from contract.engines import CHATS, GREEDY, NOTHING, PROMPTS, ask, finish, held, ids, one_by_one, right_of
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams

VARIANTS = {
    "small blocks": {"kvcache_block_size": 4},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "prompts in pieces": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "one at a time": {"max_num_seqs": 1},
    "several batches": {"num_kvcache_blocks": 9, "kvcache_block_size": 8},
    "eager": {"enforce_eager": True},
}


def test_greedy_tokens_are_stage_as_with_and_without_a_cached_prefix(engine, llm, expected) -> None:
    for _ in range(2):
        assert ask(llm, PROMPTS) == expected
    outputs = llm.generate([PROMPTS[4]] * 3, GREEDY, False)
    assert ids(outputs) == [expected[4]] * 3
    cached = [output["metrics"]["num_cached_tokens"] for output in outputs]
    assert cached == [40] * 3 if "pool" in engine.has else cached == [0] * 3, "48 tokens, and the last block runs again"


@pytest.mark.needs("one process")
@pytest.mark.parametrize("family", ["qwen3-tiny", "llama-tiny"])
def test_the_other_families_give_stage_as_tokens_too_whatever_the_seed_of_their_weights(engine, family: str) -> None:
    with engine.made(f"random:{family}", seed=3) as llm:
        right = right_of(f"random:{family}", seed=3) if "exact" in engine.has else one_by_one(llm)
        assert ask(llm, PROMPTS) == right


@pytest.mark.needs("pool", "one process")
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_no_option_of_memory_or_of_steps_changes_a_token(engine, expected, options: dict) -> None:
    with engine.made(**options) as llm:
        assert ask(llm, PROMPTS[4:] * 2) == expected[4:] * 2, "the second may share what the first has just computed"
        for _ in range(2):  # the second time with the prefix cache full
            assert ask(llm, PROMPTS) == expected
        assert held(llm) == NOTHING


@pytest.mark.needs("side by side", "one process")
def test_whole_prompts_in_a_step_of_their_own_change_no_token(engine, expected) -> None:
    with engine.made(enable_chunked_prefill=False, max_num_batched_tokens=64, max_num_seqs=3) as llm:
        assert ask(llm, PROMPTS) == expected


@cache
def tutors_answers(dtype: str, max_tokens: int) -> list[dict]:
    """Stage A's."""
    llm = NaiveLLM("tutor", device="cpu", dtype=dtype)
    return llm.chat(CHATS, SamplingParams(temperature=0, max_tokens=max_tokens), False)


def test_the_tutor_answers_in_stage_as_words(tutor) -> None:
    found = tutor.chat(CHATS, SamplingParams(temperature=0, max_tokens=40), False)
    for key in ("token_ids", "text", "finish_reason"):
        assert [output[key] for output in found] == [output[key] for output in tutors_answers("float32", 40)]


@pytest.mark.needs("one process")
def test_the_tutor_answers_alike_in_bfloat16(engine) -> None:
    with engine.made("tutor", dtype="bfloat16") as llm:
        answers = llm.chat(CHATS, SamplingParams(temperature=0, max_tokens=24), False)
        assert ids(answers) == ids(tutors_answers("bfloat16", 24))


@pytest.mark.needs("pool")
def test_requests_are_added_and_stepped_from_stage_d_on(llm, expected) -> None:
    added = [llm.add_request(prompt, GREEDY) for prompt in (*PROMPTS[:3], {"prompt_token_ids": PROMPTS[3]})]
    outputs, rates = {}, []
    while not llm.is_finished():
        finished, num_tokens = llm.step()
        outputs.update(finished)
        rates.append(num_tokens)
    assert [outputs[request] for request in added] == expected[:4]
    assert 0 < sum(n for n in rates if n > 0) <= sum(map(len, PROMPTS[:4])), "a cached prefix is not run"
    assert min(rates) < 0, "steps of decodes alone are counted below zero"
    assert llm.step() == ([], 0), "nothing to do"
    first = llm.add_request("hello", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert ask(llm, [PROMPTS[4]]) == [expected[4]], "beside a request that was added"
    assert [(key, len(tokens)) for key, tokens in finish(llm).items()] == [(first, 2)]


@pytest.mark.gpu
@pytest.mark.needs("one process")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tutor_gives_the_cpus_tokens_on_a_gpu(engine, dtype: str) -> None:
    questions = [*CHATS, [{"role": "user", "content": "What is prefill?"}]]
    params = SamplingParams(temperature=0, max_tokens=48)
    expected = ids(NaiveLLM("tutor", device="cpu").chat(questions, params, False))
    with engine.made("tutor", device="cuda", dtype=dtype) as llm:
        assert ids(llm.chat(questions, params, False)) == expected


@pytest.mark.gpu
@pytest.mark.needs("pool", "one process", "exact")
@pytest.mark.parametrize("backend", ["reference", "triton", "flash"])
def test_every_attention_backend_gives_the_same_tokens_on_a_gpu(engine, backend: str) -> None:
    if backend == "flash":
        pytest.importorskip("flash_attn")
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = ids(NaiveLLM("tutor", device="cpu").chat(CHATS, params, False))
    block_size = {"kvcache_block_size": None, "num_kvcache_blocks": 64}
    with engine.made("tutor", device="cuda", dtype="bfloat16", attention_backend=backend, **block_size) as llm:
        assert ids(llm.chat(CHATS, params, False)) == expected
