"""A pool for each kind of layer: what is given back and promised, what the prefix cache finds, and the same tokens."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from contract.engines import NOTHING, PROMPTS, ask, held, one_by_one, record
from examples import examples
from fake_engines import HashDrafter, make_guessing_windowed, make_windowed
from fake_model import check_books, completion_of, make_request
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import forked_ranks

import beyond
from beyond.windows.blocks import HybridBlockManager, WindowBlocks
from beyond.windows.pools import HybridKVCache, Limits
from beyond.windows.tables import windowed_slots
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.sequence import Sequence

MODEL = "random:gemma3-tiny"  # windows of 8 in two layers of three
LONGER = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
TIGHT = {  # 136 blocks of full layers, 22 of windowed ones, in the memory of 60
    "num_kvcache_blocks": 60,
    "kvcache_block_size": 2,
    "max_model_len": 90,
    "max_num_batched_tokens": 7,
    "max_num_seqs": 5,
}


# ---- the books -------------------------------------------------------------------------------------------------------


def manager_of(num_blocks: int, num_windowed: int, window: int, size: int = 4, tokens: int = 16) -> HybridBlockManager:
    limits = Limits(window, 4096, 4, tokens)
    pools = SimpleNamespace(num_blocks=num_blocks, num_window_blocks=num_windowed, block_size=size, limits=limits)
    return HybridBlockManager(WindowBlocks(pools), num_blocks, size, True)


def admit(manager: HybridBlockManager, tokens: list[int]) -> Sequence:
    """A sequence whose tokens have all run, in one step, and which has given back what it does not see."""
    sequence = Sequence(completion_of(tokens))
    assert manager.allocate(sequence, len(sequence))
    sequence.num_computed_tokens = len(sequence)
    manager.index_computed(sequence)
    manager.windows.slide()
    return sequence


def end(manager: HybridBlockManager, sequence: Sequence) -> None:
    manager.free(sequence)
    manager.free(sequence)


@pytest.mark.fast
def test_a_sequence_keeps_the_blocks_of_its_window_and_gives_all_others_back() -> None:
    manager = manager_of(16, 16, window=6)
    sequence = admit(manager, list(range(100, 131)))  # the next token, number 31, sees from token 26 on
    assert len(sequence.block_table) == 8 and manager.windows.num_used == 2
    end(manager, sequence)
    assert manager.windows.num_used == manager.num_used == 0
    manager.check_invariants([])


PREFIX = list(range(100, 124))  # six blocks


@pytest.mark.fast
@pytest.mark.parametrize(
    ("others", "hit"),
    [
        (2, 24),  # that of the last block, which is not full, goes first, and the one that was never used
        (6, 24),  # then those of the first four blocks, which token 24 does not see
        (7, 0),  # and then one that token 24 sees: the full layers' blocks alone are of no use
    ],
)
def test_a_hit_needs_all_blocks_of_full_layers_and_the_last_window_of_the_others(others: int, hit: int) -> None:
    manager = manager_of(40, 8, window=6, tokens=4)
    end(manager, admit(manager, [*PREFIX, 1]))
    for i in range(others):  # each takes a windowed block, and a block that was never used
        end(manager, admit(manager, [i + 1] * 4))
    sequence = Sequence(completion_of([*PREFIX, 2]))
    assert manager.count_cached_tokens(sequence) == hit
    assert manager.allocate(sequence, 25) and sequence.num_computed_tokens == hit
    manager.check_invariants([sequence])


@pytest.mark.fast
def test_a_prefix_is_as_long_as_the_windows_that_are_left_allow() -> None:
    manager = manager_of(40, 9, window=6, tokens=4)
    end(manager, admit(manager, PREFIX[:13]))
    running = admit(manager, PREFIX)
    for others, hit in ((4, 16), (2, 0)):  # token 16 sees block 2, whose windowed block is then handed out
        for i in range(others):
            end(manager, admit(manager, [hit + i + 1] * 4))
        assert manager.count_cached_tokens(Sequence(completion_of([*PREFIX, 2]))) == 24
        assert manager.count_cached_tokens(Sequence(completion_of([*PREFIX[:16], 2]))) == hit
        manager.check_invariants([running])


@pytest.mark.fast
def test_sequences_that_share_a_windowed_block_give_it_back_when_the_last_one_does() -> None:
    manager = manager_of(40, 40, window=6)
    first = admit(manager, [*PREFIX[:8], 1])
    second = admit(manager, [*PREFIX[:8], 2])
    assert second.num_cached_tokens == 8 and manager.windows.num_used == 3, "one is shared"
    manager.check_invariants([first, second])
    end(manager, first)
    assert manager.windows.num_used == 2
    manager.check_invariants([second])
    end(manager, second)
    assert manager.windows.num_used == 0


@pytest.mark.fast
def test_of_blocks_with_equal_content_the_one_is_found_that_has_its_windowed_block() -> None:
    manager = manager_of(40, 22, window=6, tokens=56)
    old = admit(manager, [*PREFIX, *range(300, 330)])  # has slid far past the prefix
    for i in range(14):
        end(manager, admit(manager, [i + 1] * 4))  # the prefix's windowed blocks are lost
    assert manager.count_cached_tokens(Sequence(completion_of([*PREFIX, 2]))) == 0
    end(manager, admit(manager, [*PREFIX, 3]))
    assert manager.count_cached_tokens(Sequence(completion_of([*PREFIX, 2]))) == 24
    manager.check_invariants([old])


@pytest.mark.fast
def test_a_request_waits_for_room_for_its_window_and_a_prompt_of_a_whole_step_always_fits() -> None:
    options = {"block_size": 1, "num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 20}
    calls = make_windowed(window=4, spare=12, **options)  # 6 for a window, 20 for a step, and two more windows
    for i in range(5):
        calls.add_request(make_request(i, [5 + i] * 20, 30, ignore_eos=True), streams=False)
    most = 0
    while calls.has_unfinished():
        calls.step()
        check_books(calls)
        most = max(most, calls.engine.scheduler.num_running)
    assert most == 3, "as many windows as there is room for"
    assert calls.engine.counters.num_preemptions == 0 and calls.engine.runner.most_used > 20


@pytest.mark.fast
@pytest.mark.parametrize(("window", "size", "most"), [(8, 4, 4), (6, 4, 3), (1, 4, 2), (7, 1, 7), (3, 16, 3)])
def test_in_decode_a_sequence_holds_its_window_and_at_most_two_blocks_more(window: int, size: int, most: int) -> None:
    calls = make_windowed(
        window=window, spare=0, block_size=size, num_blocks=100, max_num_seqs=1, max_num_batched_tokens=1
    )
    calls.add_request(make_request(0, [5], 60, ignore_eos=True), streams=False)
    while calls.has_unfinished():
        calls.step()
        check_books(calls)
    assert calls.engine.runner.most_used == most <= calls.engine.scheduler.block_manager.windows._most


@pytest.mark.fast
@pytest.mark.parametrize("errors", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_guesses_take_no_more_windowed_blocks_than_are_promised(size: int, errors: float) -> None:
    options = {"block_size": size, "num_blocks": 200, "max_num_seqs": 1, "max_num_batched_tokens": 7}
    for seed in range(5):
        drafter = HashDrafter(seed, errors, 6)
        calls = make_guessing_windowed(drafter=drafter, window=4, spare=0, **options)
        calls.add_request(make_request(0, [5], 120, ignore_eos=True), streams=False)
        while calls.has_unfinished():
            calls.step()
            check_books(calls)
        assert calls.engine.runner.most_used <= calls.engine.scheduler.block_manager.windows._most


@pytest.mark.fast
@examples(100)
@given(
    num_blocks=st.integers(2, 5000),
    size=st.sampled_from([1, 4, 16]),
    full=st.integers(0, 6),
    windowed=st.integers(1, 15),
    window=st.integers(1, 1000),
    longest=st.integers(2, 40000),
    seqs=st.integers(1, 512),
    tokens=st.integers(1, 20000),
)
def test_two_pools_take_the_memory_of_one_and_hold_no_less(
    num_blocks: int, size: int, full: int, windowed: int, window: int, longest: int, seqs: int, tokens: int
) -> None:
    limits = Limits(window, longest, seqs, tokens)
    blocks = limits.divide(num_blocks, size, full, windowed)
    memory = num_blocks * (full + windowed)
    assert blocks.full * full + blocks.windowed * windowed <= memory
    longest = seqs * -(-longest // size)
    assert blocks.full >= min(num_blocks, longest), "a request may be as long as before"
    least = limits.held(size) + limits.of_a_step(size)
    assert blocks.windowed >= min(blocks.full, least), "or a request with a step's prompt would never be admitted"
    if full:
        assert memory - blocks.full * full - blocks.windowed * windowed < full, "nothing is left over"


# ---- the device's side -----------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_slots_follow_from_tables_and_lengths_and_padding_has_none() -> None:
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 3, 4, 4], dtype=torch.int32),  # three tokens, a decode, an empty row
        context_lens=torch.tensor([5, 9, 0], dtype=torch.int32),
        slot_mapping=torch.tensor([1, 1, 1, 1, -1, -1]),
        block_tables=torch.empty(0),
        max_query_len=3,
        max_context_len=9,
    )
    tables = torch.tensor([[7, 2, 0], [0, 3, 5], [-1, -1, -1]], dtype=torch.int32)
    assert windowed_slots(metadata, tables, 4).tolist() == [30, 31, 8, 20, -1, -1]
    one = replace(  # a prompt of two tokens, in a graph of six: padding is past its end, and past its table's
        metadata,
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        context_lens=torch.tensor([8], dtype=torch.int32),
    )
    one = replace(one, slot_mapping=torch.tensor([1, 1, -1, -1, -1, -1]))
    table = torch.tensor([[7, 2]], dtype=torch.int32)
    assert windowed_slots(one, table, 4).tolist() == [10, 11, -1, -1, -1, -1]


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """What transformers' model says, one request at a time."""
    return one_by_one(NaiveLLM(MODEL, device="cpu"), LONGER)


WAYS = {
    "as it is": {},
    "no overlap": {"without": "overlap"},
    "guesses": {"speculation": "ngram"},
    "guesses of the host": {"speculation": "ngram", "without": "overlap"},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 50},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_kvcache_blocks": 46, "max_num_batched_tokens": 90},  # as many windowed blocks as others
    "two ranks": {"tensor_parallel_size": 2},
    "guesses, two ranks": {"tensor_parallel_size": 2, "speculation": "ngram"},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_two_pools_give_the_tokens_of_transformers(right, options: dict) -> None:
    with forked_ranks(), closing(beyond.LLM(MODEL, device="cpu", hybrid_kv_cache=True, **TIGHT | options)) as llm:
        assert isinstance(llm.kv_cache, HybridKVCache)
        assert llm.kv_cache.num_window_blocks <= llm.kv_cache.num_blocks
        assert (llm.kv_cache.limits.num_guesses > 0) == ("speculation" in options)
        for _ in range(2):  # the second time with a prefix cache
            assert ask(llm, PROMPTS, LONGER) == right
            assert held(llm) == NOTHING
        if options is WAYS["preempted"]:
            assert llm.calls.stats()["num_preemptions"] > 0, "or the pool is not tight"
        cached = llm.generate([PROMPTS[4]] * 2, LONGER, False)[1]["metrics"]["num_cached_tokens"]
        assert (cached > 30) == llm.options.enable_prefix_caching
        llm.engine.scheduler.block_manager.check_invariants([])


def test_recorded_steps_of_two_pools_give_the_same_tokens(right) -> None:
    for options in ({}, {"speculation": "ngram"}):
        with closing(beyond.LLM(MODEL, device="cpu", hybrid_kv_cache=True, **TIGHT | options)) as llm:
            record(llm)
            assert ask(llm, PROMPTS, LONGER) == ask(llm, PROMPTS, LONGER) == right


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8", "quantization": "int8"}])
def test_two_pools_in_eight_bits_give_the_tokens_of_one(options: dict) -> None:
    answers = []
    for hybrid in (False, True):
        with closing(beyond.LLM(MODEL, device="cpu", hybrid_kv_cache=hybrid, **TIGHT | options)) as llm:
            answers.append([ask(llm, PROMPTS, LONGER) for _ in range(2)])
    assert answers[0] == answers[1]


def test_a_model_that_has_windows_in_all_layers_needs_no_memory_for_what_it_forgets() -> None:
    model = "random:mistral-tiny"
    right = one_by_one(NaiveLLM(model, device="cpu"), LONGER)
    with closing(beyond.LLM(model, device="cpu", hybrid_kv_cache=True, **TIGHT)) as llm:
        assert llm.kv_cache.num_blocks * llm.kv_cache.block_size >= 5 * 90, "for the longest requests, all at once"
        assert ask(llm, PROMPTS, LONGER) == right


def test_a_step_has_no_more_prompt_tokens_than_a_request_may_have() -> None:
    options = TIGHT | {"max_num_batched_tokens": 16384, "num_kvcache_blocks": 200}
    with closing(beyond.LLM(MODEL, device="cpu", hybrid_kv_cache=True, **options)) as llm:
        assert llm.options.max_num_batched_tokens == llm.engine.scheduler.max_num_batched_tokens == 90
        assert llm.kv_cache.num_window_blocks < 90, "45 for such a step, and a few windows"


@pytest.mark.parametrize("model", ["random:qwen2-tiny", MODEL])
def test_without_windows_that_matter_there_is_one_pool(model: str) -> None:
    options = TIGHT | {"max_model_len": 8, "num_kvcache_blocks": 10}
    with closing(beyond.LLM(model, device="cpu", hybrid_kv_cache=True, **options)) as llm:
        assert not isinstance(llm.kv_cache, HybridKVCache) and not llm.options.hybrid_kv_cache


def test_pools_of_one_block_hold_a_block_of_tokens() -> None:
    with closing(beyond.LLM(MODEL, device="cpu", hybrid_kv_cache=True, **TIGHT | {"num_kvcache_blocks": 1})) as llm:
        assert len(ask(llm, [[5]], LONGER)[0]) == 2


def test_a_failed_step_costs_no_token(right) -> None:
    with closing(beyond.LLM(MODEL, device="cpu", hybrid_kv_cache=True, **TIGHT)) as llm:
        calls = 0

        def fail_once(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise RuntimeError("the device failed")

        llm.runtime.model.layers[1].register_forward_pre_hook(fail_once)
        with pytest.raises(RuntimeError, match="the device failed"):
            ask(llm, PROMPTS, LONGER)
        assert ask(llm, PROMPTS, LONGER) == right and held(llm) == NOTHING


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "hybrid_kv_cache=True cannot be .* pipeline_parallel_size=2: .* use tensor_"),
        ({"speculation": "model"}, "hybrid_kv_cache=True cannot be .* speculation='model': .* use speculation='ngram'"),
    ],
)
def test_what_two_pools_do_not_combine_with_is_refused_with_advice(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beyond.LLM(MODEL, device="cpu", hybrid_kv_cache=True, **options)


def test_prompts_cannot_be_scored_in_two_pools() -> None:
    message = "hybrid_kv_cache=True cannot score prompts; use hybrid_kv_cache=False"
    with (
        closing(beyond.LLM(MODEL, device="cpu", hybrid_kv_cache=True, **TIGHT)) as llm,
        pytest.raises(ValueError, match=message),
    ):
        ask(llm, [PROMPTS[0]], SamplingParams(prompt_logprobs=1))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("options", [{}, {"speculation": "ngram"}], ids=["plain", "guesses"])
def test_on_a_gpu_graphs_and_kernels_read_both_pools(backend: str, options: dict) -> None:
    gpu = {"device": "cuda", "dtype": "float32"}
    expected = one_by_one(NaiveLLM(MODEL, **gpu), LONGER)
    every = gpu | TIGHT | {"attention_backend": backend, "hybrid_kv_cache": True} | options
    with closing(beyond.LLM(MODEL, **every)) as llm:
        for _ in range(2):
            assert ask(llm, PROMPTS, LONGER) == expected


@pytest.mark.gpu
def test_on_a_gpu_fused_layers_read_both_pools() -> None:
    gpu = {"device": "cuda", "dtype": "float32"}
    model = "random:mistral-tiny"
    expected = one_by_one(NaiveLLM(model, **gpu), LONGER)
    with closing(beyond.LLM(model, hybrid_kv_cache=True, **gpu | TIGHT)) as llm:
        assert ask(llm, PROMPTS, LONGER) == ask(llm, PROMPTS, LONGER) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}], ids=["16 bits", "int8 cache"])
def test_on_a_gpu_the_real_shape_gives_one_pools_tokens_past_several_windows(options: dict) -> None:
    prompts = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (1500, 3, 700)]
    pool = {"max_model_len": 2000, "max_num_batched_tokens": 512, "max_num_seqs": 8, "num_kvcache_blocks": 400}
    answers = []
    for hybrid in (False, True):
        gpu = {"device": "cuda", "dtype": "float32", "hybrid_kv_cache": hybrid}
        with closing(beyond.LLM("random:gemma-3-270m", **gpu, **pool, **options)) as llm:
            answers.append([ask(llm, prompts, LONGER) for _ in range(2)])
    assert answers[0] == answers[1]
