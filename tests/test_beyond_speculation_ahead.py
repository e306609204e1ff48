"""Guesses made on the device, one step ahead of the host: the same tokens, and no step waits."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from contract.engines import MODEL, PROMPTS, ask
from examples import examples
from fake_engines import DRAFT, make_ahead
from fake_model import answer_alone, completion_of, make_request, run_all
from hypothesis import given
from hypothesis import strategies as st
from ranks import admit_whoever_fits
from stand_ins import EagerRecorder

import beyond
import beyond.speculation
import stage_e_batching
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.sequence import MOST_CREDIT, WRONG, guessing_sequence
from beyond.speculation.token_table import TokenTable
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls import Calls
from stage_e_batching.step import BatchSequence, ScheduledStep
from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.step_input import StepShape, TokenSource

LLM = partial(beyond.LLM, speculation="ngram")
POOL = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}


# ---- the table -------------------------------------------------------------------------------------------------


@examples(20)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=40), min_size=1, max_size=3), st.integers(1, 6))
def test_the_device_guesses_what_the_host_would(texts, count):
    table = TokenTable(len(texts), 60, count, torch.device("cpu"))
    for slot, tokens in enumerate(texts):
        table.tokens[slot, : len(tokens)] = torch.tensor(tokens)
        table.last[slot] = len(tokens) - 1
    slots = torch.arange(len(texts)).repeat_interleave(2)  # two rows each
    table.guess(slots)
    for slot, tokens in enumerate(texts):
        found = table.tokens[slot, : len(tokens) + count].tolist()
        draft = NgramDrafter(count).draft(guessing_sequence(completion_of(tokens)))
        assert found == tokens + (draft or [tokens[-1]] * count)


def step_input(slots: list[int], positions: list[int], ran: list[int]) -> SimpleNamespace:
    rows = torch.arange(len(slots))
    columns = {"sample_slots": slots, "positions": positions, "input_ids": ran}
    return SimpleNamespace(sample_tokens=rows, **{name: torch.tensor(column) for name, column in columns.items()})


def test_what_is_sampled_behind_a_wrong_guess_is_wrong_and_a_second_sample_corrects_the_first():
    table, last_tokens = TokenTable(4, 30, 3, torch.device("cpu")), torch.zeros(5, dtype=torch.int64)
    inputs = step_input([2, 2, 2, 2, 0, 0, 1], [9, 10, 11, 12, 5, 6, 3], [50, 51, 52, 53, 60, 61, 70])
    for sampled, certain, last, last_known in (
        ([51, 52, 99, 53, 61, 62, 71], [1, 1, 1, 0, 1, 1, 1], [7, 4, 12], [62, 71, 99]),
        ([99, 52, 53, 54, 99, 62, 71], [1, 0, 0, 0, 1, 0, 1], [6, 4, 10], [99, 71, 99]),
        ([51, 52, 53, 54, 61, 62, 71], [1, 1, 1, 1, 1, 1, 1], [7, 4, 13], [62, 71, 54]),
    ):
        ids = torch.tensor(sampled)
        table.keep(ids, inputs, last_tokens)
        assert ids.tolist() == [t if c else WRONG for t, c in zip(sampled, certain, strict=True)]
        assert table.last[:4].tolist() == [*last, 0]
        assert last_tokens[:3].tolist() == last_known
        assert table.tokens[2, 10].item() == sampled[0]


# ---- the engine ------------------------------------------------------------------------------------------------


class Switched:
    """Says that there is a guess, or not."""

    def __init__(self) -> None:
        self.on = True

    def has_draft(self, sequence: BatchSequence) -> bool:
        return self.on


def make_calls(drafter: object | None = None, **options: object) -> Calls:
    return make_ahead(drafter=drafter or Switched(), **POOL | options)


def run_to_the_end(calls: Calls, *requests: Request) -> dict[int, list[int]]:
    """Add requests and step until all are answered; returns their tokens."""
    for request in requests:
        calls.add_request(request, streams=False)
    return {index: output["token_ids"] for index, output in run_all(calls).items()}


def test_a_step_gives_the_guesses_that_were_right_and_one_token_more_and_none_waits():
    calls = make_calls()
    calls.add_request(make_request(0, [5, 6, 7], 32, ignore_eos=True), streams=False)
    gained, in_flight = [], []
    while calls.has_unfinished():
        before = calls.engine.counters.num_generated_tokens
        calls.step()
        gained.append(calls.engine.counters.num_generated_tokens - before)
        in_flight.append(not calls.engine.runner.launched[-1].waited)
    assert gained[:8] == [0, 1, 5, 5, 5, 5, 5, 5]
    assert sum(gained) == 32 and all(in_flight[:8])
    assert [len(step) for step in calls.engine.runner.steps[:7]] == [1, 5, 5, 5, 5, 5, 5]
    assert calls.engine.counters.num_accepted_tokens == 24


def test_a_verification_of_a_request_that_has_ended_counts_for_nothing():
    calls = make_calls()
    run_to_the_end(calls, make_request(0, [5, 6, 7], 30, ignore_eos=True))
    calls.step()
    assert len(calls.engine.runner.steps[-2]) > 1, "launched before the end was known"
    counters = calls.engine.counters
    assert (counters.num_generated_tokens, counters.num_verifications, counters.num_accepted_tokens) == (30, 6, 23)


def test_each_sequences_guesses_of_a_step_are_a_verification():
    calls = make_calls()
    run_to_the_end(calls, *(make_request(i, [5, 6, 7 + i], 30, ignore_eos=True) for i in range(3)))
    counters = calls.engine.counters
    assert (counters.num_generated_tokens, counters.num_verifications, counters.num_accepted_tokens) == (90, 18, 69)
    assert counters.num_steps < 3 * 6, "they ran together"


def test_a_request_that_waits_for_the_blocks_of_wrong_guesses_comes_in_when_they_are_given_back():
    calls = make_calls(error_rate=1.0, num_blocks=14, block_size=1, enable_prefix_caching=False)
    admit_whoever_fits(calls)
    calls.add_request(make_request(0, [1], 13, ignore_eos=True), streams=False)
    for _ in range(3):
        calls.step()
    calls.add_request(make_request(1, [2] * 5, 2, ignore_eos=True), streams=False)
    assert list(run_all(calls)) == [1, 0], "the second waited for the end of the first"


@pytest.mark.parametrize("max_tokens", range(2, 13))
def test_a_request_may_end_anywhere_in_a_run_of_right_guesses(max_tokens):
    request = make_request(0, [5, 6, 7], max_tokens, ignore_eos=True)
    assert run_to_the_end(make_calls(block_size=1), request) == {0: answer_alone(request, 4096)[0]}


@pytest.mark.parametrize("number", [3, 4])
def test_a_request_may_lose_its_blocks_while_its_guesses_are_in_flight(number):
    calls = make_calls(block_size=1)
    request = make_request(0, [5, 6, 7], 11, ignore_eos=True)  # the third step is its last, if the guesses are right
    calls.add_request(request, streams=False)
    for _ in range(1, number):
        calls.step()
    manager = calls.engine.scheduler.block_manager
    manager.allocate = lambda *_, **__: False
    answers = [event.output["token_ids"] for event in calls.step() if event.output]
    del manager.allocate
    assert answers + list(run_to_the_end(calls).values()) == [answer_alone(request, 4096)[0]]
    assert calls.engine.counters.num_preemptions == 1


def test_blocks_for_guesses_are_given_back_when_none_is_in_flight_and_wrong_ones_are_never_indexed():
    calls = make_calls(error_rate=0.5)
    manager = calls.engine.scheduler.block_manager
    calls.add_request(make_request(0, [5, 6, 7, 8, 9], 60, ignore_eos=True), streams=False)
    widest = 0
    for number in range(40):
        calls.engine.drafts.drafter.on = number % 8 < 4
        calls.step()
        for sequence in calls.engine.scheduler.decoding:
            spare = len(sequence.block_table) - manager.blocks_for(sequence.num_computed_tokens)
            widest = max(widest, spare)
            assert spare == 0 or sequence.guesses.num_unsure
            assert sequence.num_indexed_blocks <= len(sequence.token_ids) // manager.block_size
            manager.check_invariants([sequence])
    assert widest > 0, "no guess ever needed another block"


class Stubborn:
    """Says that the first request has a guess, and lets no loss make it pause."""

    def has_draft(self, sequence: BatchSequence) -> bool:
        sequence.guesses.balance = MOST_CREDIT
        return sequence.request_id == 0


def test_nobody_is_preempted_for_a_guess():
    calls = make_calls(Stubborn(), error_rate=1.0, num_blocks=8, max_num_seqs=2)
    admit_whoever_fits(calls)
    ends = enumerate((30, 13))  # the second ends just before the two need a ninth block
    run_to_the_end(calls, *(make_request(i, [5 + i, 6, 7], end, ignore_eos=True) for i, end in ends))
    assert calls.engine.counters.num_preemptions == 0 and calls.engine.counters.num_draft_tokens > 0


def test_guesses_in_flight_reserve_no_block_past_the_longest_sequence():
    options = {"device": "cpu", "max_model_len": 64, "kvcache_block_size": 16, "num_kvcache_blocks": 8}
    prompt, params = [4, 5, 6] * 15, SamplingParams(temperature=0, max_tokens=99, ignore_eos=True)
    [expected] = stage_e_batching.LLM(MODEL, **options).generate([prompt], params, False)
    llm = LLM(MODEL, **options)
    llm.engine.drafts.drafter = Stubborn()
    [found] = llm.generate([prompt], params, False)
    assert found["token_ids"] == expected["token_ids"] and len(prompt + found["token_ids"]) == 64
    assert llm.engine.counters.num_draft_tokens > 2 * DRAFT


def test_no_graph_of_another_step_is_found_for_one_that_the_device_completes():
    graphs = {source: DecodeGraphs([10], 4, 64, 10, source) for source in TokenSource}
    for source in TokenSource:
        shape = StepShape(10, 10, 10, 4, 10, 1, 64, source)
        assert [other for other in TokenSource if graphs[other].takes(shape)] == [source]


def test_prompts_that_come_among_verifications_run_in_the_graphs_of_prefill():
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=40, ignore_eos=True)
    expected = ask(stage_e_batching.LLM(MODEL, device="cpu", num_kvcache_blocks=64), PROMPTS, params)
    llm = LLM(MODEL, device="cpu", num_kvcache_blocks=64, max_num_batched_tokens=16, max_num_seqs=4)
    recorder = EagerRecorder()
    llm.runner.capture(recorder, [1, 2, 4], [16])
    llm.engine.drafts.drafter = Switched()
    mixed = []

    def note(step: ScheduledStep, *_: object) -> None:
        mixed.append(len(set(step.sequences[: step.num_decodes])) < step.num_decodes < len(step))

    llm.engine.reports.append(note)
    assert ask(llm, PROMPTS, params) == expected
    assert any(mixed) and recorder.replays["16 tokens"] >= sum(mixed)
