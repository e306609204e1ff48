"""Whatever is guessed, every request gets the tokens that it would get without guesses."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_model import (
    EOS,
    VOCAB,
    FakeRunner,
    FakeTokenizer,
    LateTokens,
    completion_of,
    make_request,
    next_token,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_e_fuzz import arrivals, run_and_compare, settings_of_engine
from test_stage_f_graphs import EagerRecorder, FakeMegakernel

import stage_e_batching
import stage_f_graph_tp
from beyond.serving.metrics import RequestMetrics, engine_numbers, exposition
from beyond.speculation import LLM
from beyond.speculation.ahead_engine import AheadEngine
from beyond.speculation.ahead_runner import AheadRunner
from beyond.speculation.draft_model import Followed
from beyond.speculation.engine import SpeculativeEngine
from beyond.speculation.llm import make_pools
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.options import SpeculationOptions
from beyond.speculation.runner import DraftBatch, verification_sizes
from beyond.speculation.scheduler import DraftScheduler, ShrinkingBlockManager
from beyond.speculation.sequence import COST, FIRST_PAUSE, MOST_CREDIT, SpeculativeSequence
from beyond.speculation.token_table import TokenTable
from stage_a_naive.cli import performance_summary
from stage_a_naive.presets import PRESETS
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.config import ModelConfig
from stage_e_batching.engine import Sampled
from stage_e_batching.step import BatchSequence, ScheduledStep
from stage_f_graph_tp.model_runner import GraphModelRunner
from stage_f_graph_tp.step_input import host_views

PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 17, 9, 50)]
PROMPTS.append(PROMPTS[4][:40] + [7, 8, 9])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
VARIANTS = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 11, "max_num_seqs": 5},
    "tiny pool": {"num_kvcache_blocks": 40, "kvcache_block_size": 2, "max_num_batched_tokens": 20, "max_num_seqs": 6},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_num_seqs": 3},
    "no overlap": {"overlap": False},
    "one at a time": {"max_num_seqs": 1},
    "longest draft": {"num_speculative_tokens": 64},
}


# ---- on a model that is a hash of what it sees -----------------------------------------------------------------


class FinishedDrafts:
    """Drafts that are complete when they are made."""

    def complete(self, sequences: list[SpeculativeSequence]) -> None:
        assert all(sequence.draft for sequence in sequences)


class HashDrafter(FinishedDrafts):
    """Knows the fake model's next tokens, and is wrong about some."""

    def __init__(self, seed: int, error_rate: float, num_tokens: int) -> None:
        self._random = random.Random(seed)
        self._error_rate, self._num_tokens = error_rate, num_tokens

    def has_draft(self, sequence: SpeculativeSequence) -> bool:
        return self._random.random() < 0.7

    def draft(self, sequence: SpeculativeSequence) -> list[int]:
        tokens = list(sequence.token_ids)
        for _ in range(self._random.randint(0, self._num_tokens)):
            wrong = self._random.random() < self._error_rate
            tokens.append((next_token([(t, i) for i, t in enumerate(tokens)]) + wrong) % VOCAB)
        return tokens[len(sequence.token_ids) :]


class DraftRunner(FakeRunner):
    """The fake model for steps with drafts: a step's tokens are all on the device, or are all sent."""

    def __init__(self, scheduler: DraftScheduler, max_rows: int, fail_at: frozenset[int]) -> None:
        super().__init__(scheduler, fail_at)
        self._batch = DraftBatch(max_rows, scheduler.capacity + 1, self.block_size)

    def run(self, step: ScheduledStep) -> Sampled:
        if self._check_input(step):
            return super().run(step)
        self.steps.append(step)
        fails = len(self.steps) in self._fail_at
        for i, (sequence, start, count, _) in enumerate(step):
            if fails and i == len(step) // 2:
                raise RuntimeError("the device failed")
            for position in range(start, start + count):
                self.pool[self._slot(sequence, position)] = (sequence.token_at(position), position)
        sampled = []
        for sequence, start, count, samples in step:
            if samples:
                visible = [self.pool[self._slot(sequence, i)] for i in range(start + count)]
                sampled.append(next_token(visible))
                self.last_tokens[sequence.batch_slot] = sampled[-1]
        return Sampled(sampled)

    def launch(self, step: ScheduledStep) -> LateTokens:
        late = (len(self.steps) + 1) % 2 == 0 and len(self.steps) + 1 in self._fail_at
        if late:
            self._fail_at -= {len(self.steps) + 1}
        self.launched.append(LateTokens(self.run(step), late))
        return self.launched[-1]

    def _check_input(self, step: ScheduledStep) -> bool:
        """What the real runner would send to the device is what the step says. Returns whether it has the tokens."""
        self._batch.update(step)
        if not step.sequences:
            return False
        shape = self._batch.shape_of(step)
        found = host_views(np.full(shape.num_bytes, 99, np.uint8), shape)
        self._batch.fill(step, found)
        spans = [(sequence, start, start + count) for sequence, start, count, _ in step]
        positions = [(sequence, i) for sequence, start, end in spans for i in range(start, end)]
        decodes = step.sequences[: step.num_decodes]
        assert shape.num_decodes == step.num_decodes or not any(sequence.num_in_flight for sequence in decodes)
        assert found.positions.tolist() == [i for _, i in positions]
        assert found.slot_mapping.tolist() == [self._slot(sequence, i) for sequence, i in positions]
        known = [sequence.token_at(i) for sequence, i in positions[shape.num_decodes :]]
        assert found.input_ids.tolist() == [0] * shape.num_decodes + known
        assert found.context_lens.tolist() == [end for _, _, end in spans]
        for (sequence, _, end), table in zip(spans, found.block_tables.tolist(), strict=True):
            blocks = -(-end // self.block_size)
            assert table[:blocks] == sequence.block_table[:blocks]
        return shape.num_decodes > 0


def make_engine(
    *,
    drafter: object,
    overlap: bool = True,
    draft_tokens: int = 6,
    max_model_len: int = 4096,
    fail_at: frozenset[int] = frozenset(),
    **options: object,
) -> SpeculativeEngine:
    max_rows = min(options["max_num_seqs"] * (1 + draft_tokens), options["max_num_batched_tokens"])
    scheduler = DraftScheduler(max_rows=max_rows, **options)
    return SpeculativeEngine(
        scheduler,
        DraftRunner(scheduler, max_rows, fail_at),
        drafter=drafter,
        overlap=overlap,
        tokenizer=FakeTokenizer(),
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=20),
    settings_of_engine(),
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    st.booleans(),
)
def test_whatever_is_guessed_arrives_aborts_or_fails_every_answer_is_the_one_it_would_get_alone(
    requests, options, seed, error_rate, overlap
):
    drafter = HashDrafter(seed, error_rate, 6)
    run_and_compare(requests, options, partial(make_engine, drafter=drafter, overlap=overlap))


@settings(max_examples=20, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=20), settings_of_engine(), st.integers(0, 2**16))
def test_and_so_it_is_with_whole_prompts(requests, options, seed):
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 40)
    make = partial(make_engine, drafter=HashDrafter(seed, 0.2, 6), overlap=False)
    run_and_compare(requests, options | {"enable_chunked_prefill": False}, make)


POOL = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def step_until_idle(engine: SpeculativeEngine, *requests) -> list[int]:
    """Run requests to their end; returns the tokens that each step gave."""
    for request in requests:
        engine.add_request(request, streams=False)
    tokens = []
    while engine.has_unfinished():
        before = engine.counters.num_generated_tokens
        engine.step()
        tokens.append(engine.counters.num_generated_tokens - before)
    return tokens


class AlwaysDrafts(HashDrafter):
    def has_draft(self, sequence: SpeculativeSequence) -> bool:
        return True

    def draft(self, sequence: SpeculativeSequence) -> list[int]:
        tokens = list(sequence.token_ids)
        for i in range(self._num_tokens):
            wrong = self._error_rate > 0 and i >= self._num_tokens // 2
            tokens.append((next_token([(t, j) for j, t in enumerate(tokens)]) + wrong) % VOCAB)
        return tokens[len(sequence.token_ids) :]


def test_a_step_gives_the_guesses_that_were_right_and_one_token_more():
    for error_rate, per_step in ((0.0, 5), (1.0, 3)):
        engine = make_engine(drafter=AlwaysDrafts(0, error_rate, 4), **POOL)
        tokens = step_until_idle(engine, make_request(0, [5, 6, 7], 31, ignore_eos=True))
        assert set(tokens[2:-1]) == {per_step} and sum(tokens) == 31
        counters = engine.counters
        assert counters.num_accepted_tokens + counters.num_verifications + 1 == 31


def test_each_draft_of_a_step_is_a_verification():
    engine = make_engine(drafter=AlwaysDrafts(0, 0.0, 4), **POOL)
    step_until_idle(engine, *(make_request(i, [5, 6, 7 + i], 31, ignore_eos=True) for i in range(3)))
    assert engine.counters.num_steps < 3 * 7, "they ran together"
    assert engine.counters.num_verifications + engine.counters.num_accepted_tokens + 3 == 3 * 31


def test_max_tokens_in_the_middle_of_a_run_takes_no_row_that_cannot_be_used():
    engine = make_engine(drafter=AlwaysDrafts(0, 0.0, 6), **POOL)
    request = make_request(0, [5, 6, 7], 10, ignore_eos=True)
    step_until_idle(engine, request)
    assert [len(step) for step in engine.runner.steps if step.num_decodes] == [7, 2]
    assert engine.runner.steps[-1].starts == [3 + 8 - 1, 3 + 9 - 1]


def test_wrong_guesses_leave_no_block_behind_and_no_trace_in_the_prefix_cache():
    engine = make_engine(drafter=AlwaysDrafts(0, 1.0, 9), draft_tokens=9, **POOL)
    manager = engine.scheduler.block_manager
    engine.add_request(make_request(0, [5, 6, 7, 8, 9], 30, ignore_eos=True), streams=False)
    widest = 0
    run = engine.runner.run

    def watched(step: ScheduledStep) -> Sampled:
        nonlocal widest
        spare = [len(s.block_table) - manager.blocks_for(s.num_computed_tokens) for s in step.sequences]
        widest = max([widest, *spare])
        return run(step)

    engine.runner.run = watched
    while engine.has_unfinished():
        engine.step()
        for sequence in engine.scheduler.decoding:
            assert len(sequence.block_table) == manager.blocks_for(sequence.num_computed_tokens)
            assert sequence.num_computed_tokens == len(sequence) - 1
            assert sequence.num_indexed_blocks <= sequence.num_computed_tokens // manager.block_size
            manager.check_invariants([sequence])
    assert widest > 0, "no draft ever needed a block of its own"


def test_a_block_of_wrong_guesses_is_handed_out_again_before_one_that_the_prefix_cache_knows():
    manager = ShrinkingBlockManager(4, 4)
    ended, guessing, newcomer = (BatchSequence(completion_of(list(range(i, i + 8)))) for i in (0, 100, 200))
    assert manager.allocate(ended, 8)
    cached, ended.num_computed_tokens = list(ended.block_table), 8
    manager.index_computed(ended)
    manager.free(ended)
    assert manager.allocate(guessing, 8)
    guessed, guessing.num_computed_tokens = guessing.block_table[1], 4
    manager.shrink(guessing)
    assert manager.allocate(newcomer, 4)
    assert newcomer.block_table == [guessed] and all(map(manager.is_cached, cached))


def test_blocks_of_right_guesses_are_in_the_prefix_cache_at_once():
    engine = make_engine(drafter=AlwaysDrafts(0, 0.0, 6), **POOL)
    engine.add_request(make_request(0, [5, 6, 7], 31, ignore_eos=True), streams=False)
    engine.step()
    for _ in range(4):
        engine.step()
        [sequence] = engine.scheduler.decoding
        assert sequence.num_indexed_blocks == sequence.num_computed_tokens // POOL["block_size"]


def test_nobody_is_preempted_for_a_guess():
    options = POOL | {"num_blocks": 8, "max_num_seqs": 2}
    engine = make_engine(drafter=AlwaysDrafts(0, 0.5, 6), **options)
    engine.scheduler.watermark = lambda sequence: 0  # both run from the first step on
    step_until_idle(engine, *(make_request(i, [5 + i, 6, 7], 13, ignore_eos=True) for i in range(2)))
    assert engine.counters.num_preemptions == 0 and engine.counters.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("running", "with_a_guess", "guessing"), [(1, 1, 1), (8, 2, 2), (9, 2, 0), (64, 64, 64), (65, 65, 0), (1, 0, 0)]
)
def test_nobody_guesses_where_many_run_or_few_have_a_guess(running, with_a_guess, guessing):
    engine = make_engine(drafter=SimpleNamespace(has_draft=lambda sequence: sequence.request_id < with_a_guess), **POOL)
    completion = completion_of([1, 2, 3], SamplingParams(max_tokens=9))
    engine.scheduler.decoding = [SpeculativeSequence(completion, request_id=i) for i in range(running)]
    assert len(engine._promising()) == guessing


def test_a_draft_that_did_not_run_is_dropped():
    engine = make_engine(drafter=AlwaysDrafts(0, 0.0, 4), overlap=False, enable_chunked_prefill=False, **POOL)
    engine.add_request(make_request(0, [5, 6, 7], 20, ignore_eos=True), streams=False)
    engine.step()
    engine.add_request(make_request(1, [7, 6, 7], 20, ignore_eos=True), streams=False)
    engine.step()  # the new prompt runs alone
    assert engine.runner.steps[-1].num_decodes == 0 and len(engine.scheduler.decoding) == 2
    assert not any(sequence.draft for sequence in engine.scheduler.decoding)


def test_the_last_token_of_all_is_not_guessed():
    engine = make_engine(drafter=AlwaysDrafts(0, 0.0, 4), **POOL)
    completions = [completion_of([1, 2], SamplingParams(max_tokens=n)) for n in (1, 2)]
    engine.scheduler.decoding = list(map(SpeculativeSequence, completions))
    assert engine._promising() == engine.scheduler.decoding[1:]


def test_a_request_that_loses_makes_fewer_and_fewer_drafts():
    class Wrong(AlwaysDrafts):
        def draft(self, sequence):
            return [(next_token([(t, i) for i, t in enumerate(sequence.token_ids)]) + 1) % VOCAB] * 4

    engine = make_engine(drafter=Wrong(0, 1.0, 4), **(POOL | {"num_blocks": 300, "max_model_len": 1200}))
    step_until_idle(engine, make_request(0, [5, 6, 7], 1000, ignore_eos=True))
    assert engine.counters.num_verifications == 6  # after 16, 32, 64, 128, 256, 512 tokens
    assert engine.counters.num_accepted_tokens == 0


def test_a_gain_brings_the_shortest_pause_back():
    sequence = SpeculativeSequence(completion_of([1, 2, 3]))
    for right in (0, 0, 0):
        sequence.num_right = right
        sequence.settle()
    assert sequence.pause == 8 * FIRST_PAUSE and sequence.resume_at == 3 + 4 * FIRST_PAUSE
    sequence.num_right = 1
    sequence.settle()
    assert sequence.pause == 8 * FIRST_PAUSE and sequence.balance == 0, "it has paid for itself and gained nothing"
    sequence.num_right = 3
    sequence.settle()
    assert sequence.pause == FIRST_PAUSE and sequence.balance == 2


def test_a_request_that_used_to_gain_pauses_after_a_handful_of_losses():
    sequence = SpeculativeSequence(completion_of([1, 2, 3]))
    for _ in range(20):
        sequence.num_right = 4
        sequence.settle()
    losses = 0
    while not sequence.is_pausing:
        sequence.settle()
        losses += 1
    assert losses == MOST_CREDIT / COST + 1


# ---- n-grams ---------------------------------------------------------------------------------------------------


def drafted(tokens: list[int], num_tokens: int = 4, size: int = 2) -> list[int]:
    return NgramDrafter(num_tokens, size).draft(SpeculativeSequence(completion_of(tokens)))


def test_a_draft_is_what_followed_the_last_time():
    assert drafted([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]
    assert drafted([1, 2, 3, 1, 2, 4, 7, 7, 7, 1, 2]) == [4, 7, 7, 7], "the latest occurrence"
    assert drafted([1, 2, 3, 4, 5]) == [] and drafted([1, 2]) == [] and drafted([1]) == []
    assert drafted([1, 2, 9, 1, 2], num_tokens=8) == [9, 1, 2, 9, 1, 2, 9, 1], "goes on inside itself"
    assert drafted([7, 7, 7], size=2) == [7, 7, 7, 7]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=60), st.integers(1, 4))
def test_tokens_that_come_one_by_one_are_found_as_well(tokens, size):
    drafter = NgramDrafter(5, size)
    grown = SpeculativeSequence(completion_of(tokens[:1], SamplingParams(max_tokens=100, ignore_eos=True)))
    for token in tokens[1:]:
        drafter.has_draft(grown)
        grown.token_ids.append(token)
    assert drafter.draft(grown) == NgramDrafter(5, size).draft(SpeculativeSequence(completion_of(tokens)))


# ---- on a model ------------------------------------------------------------------------------------------------


class Oracle(FinishedDrafts):
    """Drafts from answers that are known, with every `wrong`-th token changed."""

    def __init__(self, outputs, num_tokens: int, wrong: int = 5) -> None:
        self._answers = [output["prompt_token_ids"] + output["token_ids"] for output in outputs]
        self._num_tokens, self._wrong = num_tokens, wrong

    def has_draft(self, sequence: SpeculativeSequence) -> bool:
        return bool(self.draft(sequence))

    def draft(self, sequence: SpeculativeSequence) -> list[int]:
        return self.after(sequence.token_ids)

    def after(self, known: list[int]) -> list[int]:
        answer = next((a for a in self._answers if a[: len(known)] == known), [])
        draft = answer[len(known) : len(known) + self._num_tokens]
        return [t ^ 1 if (len(known) + i) % self._wrong == 0 else t for i, t in enumerate(draft)]

    def guess(self, table: TokenTable, slots: torch.Tensor) -> None:
        for slot in set(slots.tolist()):
            end = table.last[slot].item()
            for i, token in enumerate(self.after(table.tokens[slot, : end + 1].tolist())):
                table.tokens[slot, end + 1 + i] = token

    def into(self, llm: LLM) -> None:
        """Guess for this engine, on the host and in the device's table."""
        llm.engine.drafter = self
        if isinstance(llm.runner, AheadRunner):
            llm.runner.table.guess = partial(self.guess, llm.runner.table)


def ids(outputs) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


@pytest.fixture(scope="module")
def plain() -> stage_e_batching.LLM:
    return stage_e_batching.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=256)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_stage_es_tokens(plain, variant):
    llm = LLM("random:qwen2-tiny", device="cpu", **VARIANTS[variant])
    if variant == "tiny pool":
        llm.engine.scheduler.watermark = lambda sequence: 0  # whoever fits comes in, and has to go again
    seeded = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=20, ignore_eos=True, logprobs=2)
        for i in range(len(PROMPTS))
    ]
    for params in (GREEDY, seeded):
        expected = plain.generate(PROMPTS, params, False)
        Oracle(expected, llm.options.num_speculative_tokens).into(llm)
        before = llm.engine.counters.num_accepted_tokens
        for _ in range(2):
            found = llm.generate(PROMPTS, params, False)
            assert ids(found) == ids(expected)
            assert llm.engine.stats()["num_used_blocks"] == 0
        assert llm.engine.counters.num_accepted_tokens > before
        for output, reference in zip(found, expected, strict=True):
            for got, want in zip(output.get("logprobs", []), reference.get("logprobs", []), strict=True):
                assert got == pytest.approx(want, abs=1e-4)
    if variant == "tiny pool":
        assert llm.engine.counters.num_preemptions > 0


def test_every_way_to_end_gives_the_tutors_text():
    prompts = ["什么是 KV cache？", "What is prefill?", "What is a KV cache?", "Who are you?"] * 2
    params = [
        SamplingParams(temperature=0, max_tokens=120),  # ends with its end-of-sequence token
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, max_tokens=60, stop=(" the", "s a")),
        SamplingParams(temperature=1.2, seed=3, max_tokens=30, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=0, max_tokens=25, logprobs=2),
        SamplingParams(temperature=1.0, seed=4, top_k=5, max_tokens=40, stop=("e",)),
        SamplingParams(temperature=0.5, seed=5, min_p=0.05, max_tokens=33, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=7),
    ]
    expected = stage_e_batching.LLM("tutor", device="cpu").generate(prompts, params, False)
    endless = [
        SamplingParams(temperature=p.temperature, top_k=p.top_k, min_p=p.min_p, seed=p.seed, max_tokens=130)
        for p in params
    ]
    longer = stage_e_batching.LLM("tutor", device="cpu").generate(prompts, endless, False)
    llm = LLM("tutor", device="cpu", max_num_batched_tokens=32, max_num_seqs=5)
    Oracle(longer, 4, wrong=7).into(llm)
    found = llm.generate(prompts, params, False)
    for key in ("token_ids", "text", "finish_reason"):
        assert [output[key] for output in found] == [output[key] for output in expected]
    assert {output["finish_reason"] for output in found} == {"stop", "length"}
    assert llm.engine.counters.num_accepted_tokens > 60
    assert llm.engine.counters.num_generated_tokens == sum(len(output["token_ids"]) for output in found)
    pieces: dict[int, str] = {}
    for index, piece in llm.stream(prompts, params):
        pieces[index] = pieces.get(index, "") + piece
    assert [pieces.get(i, "") for i in range(len(prompts))] == [output["text"] for output in expected]


def test_the_server_tells_how_many_guesses_were_right(plain):
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=64)
    Oracle(plain.generate(PROMPTS[:1], GREEDY, False), 4).into(llm)
    llm.generate(PROMPTS[:1], GREEDY, False)
    lines = exposition("tiny", engine_numbers(llm.engine), RequestMetrics()).splitlines()
    counters = llm.engine.counters
    assert f'vllm:spec_decode_num_accepted_tokens_total{{model_name="tiny"}} {counters.num_accepted_tokens}' in lines
    assert f'vllm:spec_decode_num_draft_tokens_total{{model_name="tiny"}} {counters.num_draft_tokens}' in lines
    assert "spec_decode" not in exposition("e", engine_numbers(plain.engine), RequestMetrics())


def test_requests_with_penalties_or_a_sampler_of_their_own_make_no_drafts(plain):
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=256)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3)
    repeating = [[4, 5, 6] * 6]
    assert ids(llm.generate(repeating, params, False)) == ids(plain.generate(repeating, params, False))
    llm.sampling_fn = lambda logits, params: logits.argmax(-1)
    llm.generate(repeating, GREEDY, False)
    assert llm.engine.counters.num_verifications == 0


def test_text_without_repetition_runs_as_in_stage_f():
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=64)
    ahead = []
    launch = llm.runner.launch
    llm.runner.launch = lambda step: (ahead.append(any(s.num_in_flight for s in step.sequences)), launch(step))[1]
    tokens = iter(range(100, 4000))
    llm.runner.sampler.choose = lambda logits, rows: logits.new_tensor([next(tokens) for _ in logits]).long()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=1, max_tokens=40, ignore_eos=True), False)
    assert llm.engine.counters.num_verifications == 0
    assert ahead[1:40] == [True] * 39, "every step but the first was launched before its token was fetched"


def test_text_that_repeats_takes_fewer_steps(plain):
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    expected = plain.generate([[1, 2, 3]], params, False)
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=64)
    assert ids(llm.generate([[1, 2, 3]], params, False)) == ids(expected)
    assert llm.engine.counters.num_steps < 100


@pytest.mark.parametrize("overlap", [True, False])
def test_verifications_run_in_graphs_of_their_own(plain, overlap):
    llm = LLM("random:qwen2-tiny", device="cpu", overlap=overlap, max_num_seqs=6, num_kvcache_blocks=256)
    recorder = EagerRecorder()
    llm.runner.capture(recorder, [1, 2, 4, 8], [16, 64])
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=20, logprobs=1, ignore_eos=True)):
        expected = plain.generate(PROMPTS, params, False)
        Oracle(expected, 4).into(llm)
        recorder.replays.clear()
        assert ids(llm.generate(PROMPTS, params, False)) == ids(expected)
        assert recorder.replays[30] > 2, "six sequences of five rows"
        assert ids(llm.generate(PROMPTS[:1], params, False)) == ids(expected[:1])
        assert recorder.replays[5] > 2


@pytest.mark.parametrize("overlap", [True, False])
def test_verifications_and_decodes_of_as_many_rows_run_in_graphs_of_their_own(plain, overlap):
    options = {"max_num_seqs": 2, "num_speculative_tokens": 1, "num_kvcache_blocks": 64}
    llm = LLM("random:qwen2-tiny", device="cpu", overlap=overlap, **options)
    llm.runner.capture(EagerRecorder(), [1, 2], [16])
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    expected = plain.generate(PROMPTS[:2], params, False)
    for count in (1, 2):
        oracle = Oracle(expected, 1)
        draft = oracle.draft
        oracle.has_draft = lambda sequence, draft=draft: len(sequence.token_ids) % 8 < 4 and bool(draft(sequence))
        oracle.into(llm)
        accepted = llm.engine.counters.num_accepted_tokens
        assert ids(llm.generate(PROMPTS[:count], params, False)) == ids(expected[:count])
        assert llm.engine.counters.num_accepted_tokens > accepted


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_verifications_and_steps_of_one_launch_take_over_each_others_tokens(plain, overlap, draft_tokens, logprobs):
    options = {"max_num_seqs": 2, "num_speculative_tokens": draft_tokens, "num_kvcache_blocks": 64}
    llm = LLM("random:qwen2-tiny", device="cpu", overlap=overlap, **options)
    fake = FakeMegakernel(llm)
    llm.runner.use_megakernel(fake)
    llm.runner.capture(EagerRecorder(), [1, 2, 4, 8], [16])
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, logprobs=logprobs, ignore_eos=True)
    expected = plain.generate(PROMPTS[:2], params, False)
    oracle = Oracle(expected, draft_tokens)
    oracle.has_draft = lambda sequence: 1 <= len(sequence.token_ids) % 20 < 5 and bool(oracle.draft(sequence))
    oracle.into(llm)
    for count in (1, 2):
        steps, accepted = fake.steps, llm.engine.counters.num_accepted_tokens
        assert ids(llm.generate(PROMPTS[:count], params, False)) == ids(expected[:count])
        assert llm.engine.counters.num_accepted_tokens > accepted
        assert fake.steps > steps + 5, "steps without guesses, but for the first behind a verification"


def test_switched_off_it_is_stage_f(plain):
    llm = LLM("random:qwen2-tiny", device="cpu", speculation="off", max_num_seqs=4, num_kvcache_blocks=64)
    assert ids(llm.generate(PROMPTS, GREEDY, False)) == ids(plain.generate(PROMPTS, GREEDY, False))
    assert type(llm.runner) is GraphModelRunner and len(llm.runner.last_tokens) == 4 + 1, "no batch slots for guesses"
    assert llm.engine.counters.num_verifications == 0


@pytest.mark.parametrize("draft_tokens, max_rows", [(1, 3), (1, 9), (4, 5), (4, 640), (64, 100)])
def test_every_number_of_rows_has_a_graph(draft_tokens, max_rows):
    sizes = verification_sizes(draft_tokens, max_rows)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 + draft_tokens and sizes[-1] == max_rows


@pytest.mark.parametrize(
    "option",
    [{"speculation": "magic"}, *({"num_speculative_tokens": n} for n in (0, 65, "4", 2.5, True))],
    ids=str,
)
def test_options_out_of_range_are_refused(option):
    with pytest.raises(ValueError, match="|".join(option)):
        LLM("random:qwen2-tiny", device="cpu", **option)


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({}, AheadEngine),
        ({"overlap": False}, SpeculativeEngine),
        ({"enable_chunked_prefill": False}, SpeculativeEngine),
        ({"tensor_parallel_size": 2}, SpeculativeEngine),
        ({"speculation": "model"}, SpeculativeEngine),
    ],
)
def test_the_device_guesses_where_every_token_is_looked_up_on_one_gpu_a_step_ahead(options, engine):
    llm = LLM.__new__(LLM)
    llm.options, llm._drafter = SpeculationOptions(**options), None
    assert llm.engine_class.func is engine
    waits = not (llm.options.overlap and llm.options.enable_chunked_prefill)
    assert llm.engine_class.keywords.get("overlap", True) != waits


def test_two_ranks_give_the_tokens_of_one(plain):
    expected = plain.generate(PROMPTS, GREEDY, False)
    options = {"speculation": "model", "draft_model": "random:qwen2-tiny", "num_kvcache_blocks": 256}
    llm = LLM("random:qwen2-tiny", device="cpu", tensor_parallel_size=2, **options)
    try:
        assert ids(llm.generate(PROMPTS, GREEDY, False)) == ids(expected)
        counters = llm.engine.counters
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 60, "rank 0 alone has the small model"
        Oracle(expected, 4).into(llm)
        assert ids(llm.generate(PROMPTS, GREEDY, False)) == ids(expected)
        assert counters.num_accepted_tokens < counters.num_draft_tokens
    finally:
        llm.close()


# ---- a small model ---------------------------------------------------------------------------------------------


def with_draft_model(draft: str, **options: object) -> LLM:
    return LLM("random:qwen2-tiny", device="cpu", speculation="model", draft_model=draft, **options)


@pytest.mark.parametrize("variant", ["plain", "small chunks", "tiny pool", "whole prompts", "one at a time"])
def test_a_small_model_that_is_the_large_one_is_always_right(plain, variant):
    llm = with_draft_model("random:qwen2-tiny", **VARIANTS[variant])
    if variant == "tiny pool":
        llm.engine.scheduler.watermark = lambda sequence: 0
    sizes, launch = [], llm.engine.drafter._runner.launch
    llm.engine.drafter._runner.launch = lambda step: (sizes.append(step.total_tokens), launch(step))[1]
    seeded = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(PROMPTS))]
    for params in (GREEDY, seeded):
        for _ in range(2):
            assert ids(llm.generate(PROMPTS, params, False)) == ids(plain.generate(PROMPTS, params, False))
    assert max(sizes) <= llm.options.max_num_batched_tokens
    counters = llm.engine.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 200
    assert (counters.num_preemptions > 0) == (variant == "tiny pool")
    assert llm.engine.stats()["num_used_blocks"] == 0


def test_a_small_model_that_is_wrong_changes_no_token(plain):
    llm = with_draft_model("random:qwen2-tiny", num_kvcache_blocks=256)
    for parameter in llm.engine.drafter._runner.model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    assert ids(llm.generate(PROMPTS, GREEDY, False)) == ids(plain.generate(PROMPTS, GREEDY, False))
    assert 0 < llm.engine.counters.num_accepted_tokens < llm.engine.counters.num_draft_tokens


def test_a_small_model_may_lack_padding_tokens_of_the_large_ones_vocabulary(monkeypatch):
    monkeypatch.setitem(PRESETS, "qwen2-tiny-padded", PRESETS["qwen2-tiny"] | {"vocab_size": 4224})
    prompts = [[4100, 4223, 1, 2], *PROMPTS[:2]]
    padded = stage_f_graph_tp.LLM("random:qwen2-tiny-padded", device="cpu", num_kvcache_blocks=64)
    llm = LLM(
        "random:qwen2-tiny-padded",
        device="cpu",
        speculation="model",
        draft_model="random:qwen2-tiny",
        num_kvcache_blocks=64,
    )
    answers = ids(llm.generate(prompts, GREEDY, False))
    assert answers == ids(padded.generate(prompts, GREEDY, False))
    assert max(map(max, answers)) >= 4096, "answers have tokens that the small model lacks, too"
    assert llm.engine.counters.num_draft_tokens > 0


def test_a_tokenizer_may_have_tokens_that_both_models_lack():
    llm = SimpleNamespace(options=SimpleNamespace(draft_model="random:qwen2-tiny"), tokenizer=range(5000))
    runtime = SimpleNamespace(config=SimpleNamespace(vocab_size=4096), max_model_len=64)
    assert LLM._draft_source(llm, runtime).name == "random:qwen2-tiny"
    runtime.config.vocab_size = 4000
    with pytest.raises(ValueError, match="has 4096 tokens in its vocabulary, and the model needs 4000; choose another"):
        LLM._draft_source(llm, runtime)


def test_the_tutors_draft_model_knows_most_of_its_answers():
    llm = LLM("tutor", device="cpu", speculation="model")
    stage_e = stage_e_batching.LLM("tutor", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=50)
    questions = ["What is a KV cache?", "什么是 KV cache？"]
    assert ids(llm.generate(questions, params, False)) == ids(stage_e.generate(questions, params, False))
    counters = llm.engine.counters
    assert counters.num_accepted_tokens > 0.7 * counters.num_draft_tokens > 30


def test_the_summary_counts_steps_and_right_guesses():
    llm = LLM("tutor", device="cpu", speculation="model")
    [output] = llm.generate(["What is a KV cache?"], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    count = llm.engine.counters
    guesses = f"{count.num_accepted_tokens} of {count.num_draft_tokens} guesses right"
    assert f"{count.num_steps} steps for 20 tokens, {guesses}" in performance_summary(llm, output)
    assert count.num_steps + count.num_accepted_tokens >= 20


@pytest.mark.parametrize(("asked", "given"), [(-1, 30), (40, 40)])
def test_two_models_share_the_memory_that_there_is_for_one_pool(monkeypatch, asked, given):
    monkeypatch.setattr("beyond.speculation.llm.choose_num_blocks", lambda runtime, options: 40)
    large, small = (SimpleNamespace(bytes_per_token=n, make_pool=lambda blocks, n=n: (n, blocks)) for n in (300, 100))
    assert make_pools(large, small, SimpleNamespace(num_kvcache_blocks=asked)) == ((300, given), (100, given))


@pytest.mark.parametrize(("guesses", "computed"), [([5, 6], 5), ([5, 9], 4), ([7, 5, 6], 3), ([], 3)])
def test_a_small_model_has_computed_the_guesses_before_the_first_wrong_one(guesses, computed):
    followed = Followed([], num_computed_tokens=3, guesses=guesses)
    followed.catch_up([1, 2, 3, 5, 6, 8])
    assert (followed.num_computed_tokens, followed.guesses) == (computed, [])


def test_the_small_model_catches_up_after_a_pause(plain):
    llm = with_draft_model("random:qwen2-tiny", num_kvcache_blocks=256, max_num_batched_tokens=512)
    llm.engine.drafter._max_num_batched_tokens = 9  # its steps are small: it catches up in several
    runner, sizes = llm.engine.drafter._runner, []
    launch = runner.launch
    runner.launch = lambda step: (sizes.append(step.total_tokens), launch(step))[1]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.add_request(PROMPTS[0], params)
    for _ in range(3):
        llm.step()
    [sequence] = llm.engine.scheduler.decoding
    sequence.resume_at = len(sequence) + 30
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert finished[0][1] == ids(plain.generate(PROMPTS[:1], params, False))[0]
    counters = llm.engine.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 20 and counters.num_steps > 30
    assert max(sizes) == 9 and sizes.count(9) >= 3, "30 tokens that it had not seen"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "model"}, "needs draft_model="),
        ({"draft_model": "tutor"}, "speculation='ngram'"),
        ({"speculation": "model", "draft_model": "random:qwen3-0.6b"}, "has 151936 tokens in its vocabulary"),
        ({"speculation": "model", "draft_model": "tutor", "tensor_parallel_size": 2}, "needs num_kvcache_blocks="),
    ],
)
def test_a_small_model_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("random:qwen2-tiny", device="cpu", **options)


def test_a_small_model_of_fewer_positions_is_refused(monkeypatch):
    class Short(ModelConfig):
        @classmethod
        def from_hf(cls, config: object) -> ModelConfig:
            return replace(ModelConfig.from_hf(config), max_position_embeddings=100)

    monkeypatch.setattr("beyond.speculation.llm.ModelConfig", Short)
    with pytest.raises(ValueError, match="has 100 positions, and the model 512; choose another, or lower"):
        LLM("tutor", device="cpu", speculation="model", max_model_len=512)


def test_an_error_leaves_no_draft_behind(plain, monkeypatch):
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=256)
    expected = plain.generate(PROMPTS, GREEDY, False)
    Oracle(expected, 4).into(llm)
    launch, calls = llm.runner.launch, []

    def fail(step):
        calls.append(step)
        if len(calls) == 4:
            raise RuntimeError("the device failed")
        return launch(step)

    monkeypatch.setattr(llm.runner, "launch", fail)
    for prompt in PROMPTS:
        llm.add_request(prompt, GREEDY)
    with pytest.raises(RuntimeError, match="the device failed"):
        while True:
            llm.step()
    finished = {}
    while not llm.is_finished():
        finished.update(llm.step()[0])
    assert [finished[i] for i in sorted(finished)] == ids(expected)


# ---- in 16 bits, and on a GPU ----------------------------------------------------------------------------------


# The tutor's best scores are 10 to 38, where neighbouring numbers of bfloat16 differ by 0.06 to 0.25.
ROUNDING = 0.5


def check_up_to_rounding(found, expected) -> None:
    """Check that answers are equal, or differ first where the expected two best tokens score almost alike.

    Args:
        found: greedy outputs.
        expected: those of stage F, with `logprobs=2`.
    """
    for got, want in zip(ids(found), expected, strict=True):
        different = [i for i, pair in enumerate(zip(got, want["token_ids"], strict=False)) if len(set(pair)) > 1]
        if not different:
            assert got == want["token_ids"]
            continue
        first = different[0]
        (best, score), (second, next_score) = sorted(want["logprobs"][first].items(), key=lambda item: -item[1])[:2]
        assert {got[first], want["token_ids"][first]} == {best, second}
        assert score - next_score < ROUNDING, f"token {first} is wrong by {score - next_score:.2f}"


def answered(token_ids: list[int], *scores: dict[int, float]):
    return {"token_ids": token_ids, "logprobs": list(scores)}


@pytest.mark.parametrize(
    ("found", "passes"), [([5, 6, 7], True), ([5, 8, 9], True), ([5, 9, 7], False), ([4, 6, 7], False), ([5, 6], False)]
)
def test_a_token_may_only_be_another_one_where_two_score_almost_alike(found, passes):
    expected = answered([5, 6, 7], {5: -0.1, 4: -2.0}, {6: -1.0, 8: -1.1}, {7: -0.5, 3: -4.0})
    with nullcontext() if passes else pytest.raises(AssertionError):
        check_up_to_rounding([answered(found)], [expected])


def check_that_tokens_are_stage_fs(device: str, dtype: str, draft_tokens: int, overlap: bool) -> None:
    """Compare answers to questions exactly, and in 16 bits those to repeated text up to rounding.

    Questions of the FAQ have wide margins. The tutor was not trained on text that repeats, and many tokens there score
    almost alike; a verification has more rows than a decode step, and its kernels may add in another order.
    """
    questions = ["What is a KV cache?", "What is paged attention?", "什么是连续批处理？", "What is a CUDA graph?"] * 3
    options = {"device": device, "dtype": dtype, "num_kvcache_blocks": 256, "max_num_seqs": 16}
    stage_f = stage_f_graph_tp.LLM("tutor", **options)
    llm = LLM("tutor", num_speculative_tokens=draft_tokens, overlap=overlap, **options)
    temperature = 0.0 if dtype == "bfloat16" else 0.7
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=60, logprobs=i % 2 or None) for i in range(12)]
    with_scores = [replace(p, logprobs=2) for p in params]
    expected = stage_f.generate(questions, with_scores, False)
    assert ids(llm.generate(questions, params, False)) == ids(expected)
    if draft_tokens == 4:
        drafted = LLM("tutor", speculation="model", overlap=overlap, **options)
        assert ids(drafted.generate(questions, params, False)) == ids(expected)
        assert drafted.engine.counters.num_accepted_tokens > 0
        drafted.close()
    asked_again = [2 * (output["prompt_token_ids"] + output["token_ids"]) for output in expected]
    asked_again = [tokens[: len(tokens) // 2 + 12] for tokens in asked_again]
    for count in (1, 4, 12):
        answers = stage_f.generate(asked_again[:count], with_scores[:count], False)
        found = llm.generate(asked_again[:count], params[:count], False)
        if dtype == "bfloat16":
            check_up_to_rounding(found, answers)
        else:
            assert ids(found) == ids(answers)
    assert llm.engine.counters.num_accepted_tokens > 0


def test_in_16_bits_the_tokens_are_stage_fs_up_to_rounding():
    check_that_tokens_are_stage_fs("cpu", "bfloat16", 4, True)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft_tokens", [1, 4, 12])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_the_tokens_are_stage_fs(overlap, draft_tokens, dtype):
    check_that_tokens_are_stage_fs("cuda", dtype, draft_tokens, overlap)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_gpu_steps_without_guesses_are_one_launch(overlap):
    llm = LLM("random:qwen2.5-0.5b", device="cuda", dtype="bfloat16", overlap=overlap, num_kvcache_blocks=64)
    assert llm.runner.megakernel is not None
    rows, launch = [], llm.runner.megakernel.launch
    llm.runner.megakernel.launch = lambda count, inputs: (rows.append(count), launch(count, inputs))[1]
    llm.engine.drafter.has_draft = lambda sequence: False
    llm.generate([[1, 2, 3]], GREEDY, False)
    assert rows == [1] * (GREEDY.max_tokens - 1)
