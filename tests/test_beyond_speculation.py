"""Whatever is guessed, every request gets the tokens that it would get without guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from contract.engines import MODEL, ask, finish, ids
from examples import examples
from fake_engines import FinishedDrafts, following, make_guessing
from fake_model import completion_of, make_request
from hypothesis import given
from hypothesis import strategies as st
from ranks import SHARING, admit_whoever_fits, forked_ranks
from stand_ins import EagerRecorder, forwards_of, with_megakernel

import beyond
import stage_e_batching
import stage_f_graph_tp
from beyond.serving.metrics import RequestMetrics, engine_numbers, exposition
from beyond.speculation.ahead_drafts import DeviceDrafts
from beyond.speculation.device_inputs import TableTokens
from beyond.speculation.draft_model import Followed
from beyond.speculation.draft_runtime import make_pools
from beyond.speculation.drafts import HostDrafts, without_rows
from beyond.speculation.host_inputs import verification_sizes
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.rows import ShrinkingBlockManager
from beyond.speculation.sequence import COST, FIRST_PAUSE, MOST_CREDIT, Guesses, guessing_sequence, is_pausing
from beyond.speculation.token_table import TokenTable
from stage_a_naive.checkpoints.presets import PRESETS
from stage_a_naive.entrypoints.cli import performance_summary
from stage_a_naive.sampling import SamplingParams
from stage_d_paged import attention
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import choose_num_blocks
from stage_e_batching.calls import Calls
from stage_e_batching.parts import Sampled
from stage_e_batching.step import BatchSequence, ScheduledStep
from stage_f_graph_tp.megakernel_steps import MegakernelSteps

LLM = partial(beyond.LLM, speculation="ngram")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = SHARING
VARIANTS = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 11, "max_num_seqs": 5},
    "tiny pool": {"num_kvcache_blocks": 40, "kvcache_block_size": 2, "max_num_batched_tokens": 20, "max_num_seqs": 6},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_num_seqs": 3},
    "no overlap": {"without": "overlap"},
    "longest draft": {"num_speculative_tokens": 64},
}


# ---- on the fake model: see also test_fake_engines.py ----------------------------------


POOL = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
NOBODY = SimpleNamespace(has_draft=lambda sequence: False)  # a drafter that has no guess


def step_until_idle(calls: Calls, *requests) -> list[int]:
    """Run requests to their end; returns the tokens that each step gave."""
    for request in requests:
        calls.add_request(request, streams=False)
    tokens = []
    while calls.has_unfinished():
        before = calls.engine.counters.num_generated_tokens
        calls.step()
        tokens.append(calls.engine.counters.num_generated_tokens - before)
    return tokens


class AlwaysDrafts(FinishedDrafts):
    """Drafts with a given number of tokens; on request the second half is wrong."""

    def __init__(self, num_tokens: int, num_right: int | None = None) -> None:
        self.num_tokens = num_tokens
        self.num_right = num_tokens if num_right is None else num_right

    def has_draft(self, sequence: BatchSequence) -> bool:
        return True

    def draft(self, sequence: BatchSequence) -> list[int]:
        return following(sequence.token_ids, [i >= self.num_right for i in range(self.num_tokens)])


def test_a_step_gives_the_guesses_that_were_right_and_one_token_more():
    for num_right, per_step in ((4, 5), (2, 3)):
        calls = make_guessing(drafter=AlwaysDrafts(4, num_right), **POOL)
        tokens = step_until_idle(calls, make_request(0, [5, 6, 7], 31, ignore_eos=True))
        assert set(tokens[2:-1]) == {per_step} and sum(tokens) == 31
        counters = calls.engine.counters
        assert counters.num_accepted_tokens + counters.num_verifications + 1 == 31


def test_max_tokens_in_the_middle_of_a_run_takes_no_row_that_cannot_be_used():
    calls = make_guessing(drafter=AlwaysDrafts(6), **POOL)
    request = make_request(0, [5, 6, 7], 10, ignore_eos=True)
    step_until_idle(calls, request)
    assert [len(step) for step in calls.engine.runner.steps if step.num_decodes] == [7, 2]
    assert calls.engine.runner.steps[-1].starts == [3 + 8 - 1, 3 + 9 - 1]


def test_wrong_guesses_leave_no_block_behind_and_no_trace_in_the_prefix_cache():
    calls = make_guessing(drafter=AlwaysDrafts(9, 4), draft_tokens=9, **POOL)
    manager = calls.engine.scheduler.block_manager
    calls.add_request(make_request(0, [5, 6, 7, 8, 9], 30, ignore_eos=True), streams=False)
    while calls.has_unfinished():
        calls.step()
        for sequence in calls.engine.scheduler.decoding:
            assert len(sequence.block_table) == manager.blocks_for(sequence.num_computed_tokens)
            assert sequence.num_computed_tokens == len(sequence) - 1
            assert sequence.num_indexed_blocks <= sequence.num_computed_tokens // manager.block_size
            manager.check_invariants([sequence])
    assert max(map(len, calls.engine.runner.steps)) == 10, "drafts had blocks of their own"


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
    calls = make_guessing(drafter=AlwaysDrafts(6), **POOL)
    calls.add_request(make_request(0, [5, 6, 7], 31, ignore_eos=True), streams=False)
    calls.step()
    for _ in range(4):
        calls.step()
        [sequence] = calls.engine.scheduler.decoding
        assert sequence.num_indexed_blocks == sequence.num_computed_tokens // POOL["block_size"]


def test_nobody_is_preempted_for_a_guess():
    options = POOL | {"num_blocks": 8, "max_num_seqs": 2}
    calls = make_guessing(drafter=AlwaysDrafts(6, 3), **options)
    admit_whoever_fits(calls)
    step_until_idle(calls, *(make_request(i, [5 + i, 6, 7], 13, ignore_eos=True) for i in range(2)))
    assert calls.engine.counters.num_preemptions == 0 and calls.engine.counters.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("running", "with_a_guess", "guessing"), [(1, 1, 1), (8, 2, 2), (9, 2, 0), (64, 64, 64), (65, 65, 0), (1, 0, 0)]
)
def test_nobody_guesses_where_many_run_or_few_have_a_guess(running, with_a_guess, guessing):
    class Some(AlwaysDrafts):
        def has_draft(self, sequence):
            return sequence.request_id < with_a_guess

        def draft(self, sequence):
            return super().draft(sequence) if self.has_draft(sequence) else []

    limits = {"max_num_seqs": 65, "num_blocks": 200, "max_num_batched_tokens": 256}
    calls = make_guessing(drafter=NOBODY, **POOL | limits)
    admit_whoever_fits(calls)
    for i in range(running):
        calls.add_request(make_request(i, [1, 2, 3], 9, ignore_eos=True), streams=False)
    while len(calls.engine.scheduler.decoding) < running:
        calls.step()
    calls.engine.drafts.drafter = Some(1)
    calls.step()
    assert calls.engine.counters.num_verifications == guessing


def test_a_request_that_loses_makes_fewer_and_fewer_drafts():
    calls = make_guessing(drafter=AlwaysDrafts(4, 0), **(POOL | {"num_blocks": 300, "max_model_len": 1200}))
    step_until_idle(calls, make_request(0, [5, 6, 7], 1000, ignore_eos=True))
    assert calls.engine.counters.num_verifications == 6  # after 16, 32, 64, 128, 256, 512 tokens
    assert calls.engine.counters.num_accepted_tokens == 0


@pytest.mark.parametrize("asked", [{"presence_penalty": 0.5}, {"logit_bias": {7: 1}}, {"min_tokens": 1}], ids=str)
def test_what_is_added_behind_a_step_makes_no_drafts(asked):
    assert is_pausing(guessing_sequence(completion_of([1, 2, 3], SamplingParams(**asked))))
    assert not is_pausing(guessing_sequence(completion_of([1, 2, 3])))


def test_a_gain_brings_the_shortest_pause_back():
    guesses = Guesses()
    for right in (0, 0, 0):
        guesses.settle(right, num_tokens=3)
    assert guesses.pause == 8 * FIRST_PAUSE and guesses.resume_at == 3 + 4 * FIRST_PAUSE
    guesses.settle(1, num_tokens=3)
    assert guesses.pause == 8 * FIRST_PAUSE and guesses.balance == 0, "it has paid for itself and gained nothing"
    guesses.settle(3, num_tokens=3)
    assert guesses.pause == FIRST_PAUSE and guesses.balance == 2


def test_a_request_that_used_to_gain_pauses_after_a_handful_of_losses():
    sequence = guessing_sequence(completion_of([1, 2, 3]))
    for _ in range(20):
        sequence.guesses.settle(4, len(sequence))
    losses = 0
    while not is_pausing(sequence):
        sequence.guesses.settle(0, len(sequence))
        losses += 1
    assert losses == MOST_CREDIT / COST + 1


# ---- n-grams ---------------------------------------------------------------------------------------------------


def drafted(tokens: list[int], num_tokens: int = 4, size: int = 2) -> list[int]:
    return NgramDrafter(num_tokens, size).draft(guessing_sequence(completion_of(tokens)))


def test_a_draft_is_what_followed_the_last_time():
    assert drafted([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]
    assert drafted([1, 2, 3, 1, 2, 4, 7, 7, 7, 1, 2]) == [4, 7, 7, 7], "the latest occurrence"
    assert drafted([1, 2, 3, 4, 5]) == [] and drafted([1, 2]) == [] and drafted([1]) == []
    assert drafted([1, 2, 9, 1, 2], num_tokens=8) == [9, 1, 2, 9, 1, 2, 9, 1], "goes on inside itself"
    assert drafted([7, 7, 7], size=2) == [7, 7, 7, 7]


@examples(33)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=60), st.integers(1, 4))
def test_tokens_that_come_one_by_one_are_found_as_well(tokens, size):
    drafter = NgramDrafter(5, size)
    grown = guessing_sequence(completion_of(tokens[:1], SamplingParams(max_tokens=100, ignore_eos=True)))
    for token in tokens[1:]:
        drafter.has_draft(grown)
        grown.token_ids.append(token)
    assert drafter.draft(grown) == NgramDrafter(5, size).draft(guessing_sequence(completion_of(tokens)))


# ---- on a model ------------------------------------------------------------------------------------------------


class Oracle(FinishedDrafts):
    """Drafts from answers that are known, with every `wrong`-th token changed."""

    def __init__(self, outputs, num_tokens: int, wrong: int = 5) -> None:
        self._answers = [output["prompt_token_ids"] + output["token_ids"] for output in outputs]
        self._num_tokens, self._wrong = num_tokens, wrong

    def has_draft(self, sequence: BatchSequence) -> bool:
        return bool(self.draft(sequence))

    def draft(self, sequence: BatchSequence) -> list[int]:
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
        llm.engine.drafts.drafter = self
        if isinstance(tokens := llm.runner.layers.tokens, TableTokens):
            tokens.table.guess = partial(self.guess, tokens.table)


@pytest.fixture(scope="module")
def plain() -> stage_e_batching.LLM:
    return stage_e_batching.LLM(MODEL, device="cpu", num_kvcache_blocks=256)


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[pytest.mark.slow] * (v not in ("tiny pool", "whole prompts"))) for v in VARIANTS]
)
def test_every_variant_gives_stage_es_tokens(plain, variant):
    llm = LLM(MODEL, device="cpu", **VARIANTS[variant])
    if variant == "tiny pool":
        admit_whoever_fits(llm)
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
            assert llm.calls.stats()["num_used_blocks"] == 0
        assert llm.engine.counters.num_accepted_tokens > before
        for output, reference in zip(found, expected, strict=True):
            for got, want in zip(output.get("logprobs", []), reference.get("logprobs", []), strict=True):
                assert got == pytest.approx(want, abs=1e-4)
    if variant == "tiny pool":
        assert llm.engine.counters.num_preemptions > 0


@pytest.mark.slow
def test_every_way_to_end_in_the_middle_of_right_guesses_gives_the_tutors_text():
    prompts = ["什么是 KV cache？", "What is a KV cache?", "Who are you?", "What is prefill?"] * 2
    asked = [
        {"max_tokens": 120},  # ends with its end-of-sequence token
        {"max_tokens": 60, "stop": (" the", "s a")},
        {"max_tokens": 30, "temperature": 1.2, "presence_penalty": 0.5},
        {"max_tokens": 25, "logprobs": 2},
        {"max_tokens": 40, "temperature": 1.0, "top_k": 5, "stop": ("e",)},
        {"max_tokens": 33, "temperature": 0.5, "min_p": 0.05, "ignore_eos": True},
        {"max_tokens": 1},
        {"max_tokens": 7},
    ]
    params = [SamplingParams(**{"temperature": 0, "seed": i} | own) for i, own in enumerate(asked)]
    stage_e = stage_e_batching.LLM("tutor", device="cpu")
    expected = stage_e.generate(prompts, params, False)
    llm = LLM("tutor", device="cpu", max_num_batched_tokens=32, max_num_seqs=5)
    endless = [replace(p, stop=(), max_tokens=130) for p in params]
    Oracle(stage_e.generate(prompts, endless, False), 4, wrong=7).into(llm)
    found = llm.generate(prompts, params, False)
    for key in ("token_ids", "text", "finish_reason"):
        assert [output[key] for output in found] == [output[key] for output in expected]
    assert {output["finish_reason"] for output in found} == {"stop", "length"}
    assert llm.engine.counters.num_accepted_tokens > 60
    assert llm.engine.counters.num_generated_tokens == sum(len(output["token_ids"]) for output in found)
    pieces = dict.fromkeys(range(len(prompts)), "")
    for index, piece in llm.stream(prompts, params):
        pieces[index] += piece
    assert list(pieces.values()) == [output["text"] for output in expected]


def test_the_server_tells_how_many_guesses_were_right(plain):
    llm = LLM(MODEL, device="cpu", num_kvcache_blocks=64)
    Oracle(plain.generate(PROMPTS[:1], GREEDY, False), 4).into(llm)
    llm.generate(PROMPTS[:1], GREEDY, False)
    lines = exposition("tiny", engine_numbers(llm.calls), RequestMetrics()).splitlines()
    counters = llm.engine.counters
    assert (
        f'vllm:spec_decode_num_accepted_tokens_total{{model_name="tiny"}} {counters.num_accepted_tokens:.1f}' in lines
    )
    assert f'vllm:spec_decode_num_draft_tokens_total{{model_name="tiny"}} {counters.num_draft_tokens:.1f}' in lines
    assert "spec_decode" not in exposition("e", engine_numbers(plain.calls), RequestMetrics())


def test_requests_with_penalties_or_a_sampler_of_their_own_make_no_drafts(plain):
    llm = LLM(MODEL, device="cpu", num_kvcache_blocks=256)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3)
    repeating = [[4, 5, 6] * 6]
    assert ask(llm, repeating, params) == ask(plain, repeating, params)
    llm.sampling_fn = lambda logits, params: logits.argmax(-1)
    llm.generate(repeating, GREEDY, False)
    assert llm.engine.counters.num_verifications == 0


def test_text_that_repeats_takes_fewer_steps(plain):
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    expected = plain.generate([[1, 2, 3]], params, False)
    llm = LLM(MODEL, device="cpu", num_kvcache_blocks=64)
    assert ask(llm, [[1, 2, 3]], params) == ids(expected)
    assert llm.engine.counters.num_steps < 100


@pytest.mark.parametrize("overlap", [True, False])
def test_verifications_run_in_graphs_of_their_own(plain, overlap):
    llm = LLM(MODEL, device="cpu", without="" if overlap else "overlap", max_num_seqs=6, num_kvcache_blocks=256)
    recorder = EagerRecorder()
    llm.runner.capture(recorder, [1, 2, 4, 8], [16, 64])
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=20, logprobs=1, ignore_eos=True)):
        expected = plain.generate(PROMPTS, params, False)
        Oracle(expected, 4).into(llm)
        recorder.replays.clear()
        assert ask(llm, PROMPTS, params) == ids(expected)
        assert recorder.replays[30] > 2, "six sequences of five rows"
        assert ask(llm, PROMPTS[:1], params) == ids(expected[:1])
        assert recorder.replays[5] > 2


@pytest.mark.parametrize(
    ("overlap", "draft_tokens", "logprobs"), [(True, 1, None), (True, 4, 1), (False, 1, 1), (False, 4, None)]
)
def test_verifications_and_steps_of_one_launch_take_over_each_others_tokens(plain, overlap, draft_tokens, logprobs):
    options = {"max_num_seqs": 2, "num_speculative_tokens": draft_tokens, "num_kvcache_blocks": 64}
    llm = LLM(MODEL, device="cpu", without="" if overlap else "overlap", **options)
    runner, fake = with_megakernel(llm)
    runner.capture(EagerRecorder(), [1, 2, 4, 8], [16])
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, logprobs=logprobs, ignore_eos=True)
    expected = plain.generate(PROMPTS[:2], params, False)
    oracle = Oracle(expected, draft_tokens)
    oracle.has_draft = lambda sequence: 1 <= len(sequence.token_ids) % 20 < 5 and bool(oracle.draft(sequence))
    oracle.into(llm)
    for count in (1, 2):
        steps, accepted = fake.steps, llm.engine.counters.num_accepted_tokens
        assert ask(llm, PROMPTS[:count], params) == ids(expected[:count])
        assert llm.engine.counters.num_accepted_tokens > accepted
        assert fake.steps > steps + 5, "steps without guesses, but for the first behind a verification"


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
        LLM(MODEL, device="cpu", **option)


@pytest.mark.parametrize(
    ("options", "drafts", "runs_ahead"),
    [
        ({}, DeviceDrafts, True),
        ({"without": "overlap"}, HostDrafts, False),
        ({"enable_chunked_prefill": False}, HostDrafts, False),
        ({"tensor_parallel_size": 2}, HostDrafts, True),
        ({"speculation": "model", "draft_model": MODEL}, HostDrafts, True),
    ],
    ids=str,
)
def test_the_device_guesses_where_every_token_is_looked_up_on_one_gpu_a_step_ahead(options, drafts, runs_ahead):
    with forked_ranks():
        llm = LLM(MODEL, device="cpu", num_kvcache_blocks=64, **options)
    assert type(llm.engine.drafts) is drafts
    llm.engine.drafts.drafter = NOBODY
    ahead = []
    llm.engine.reports.append(lambda step, *_: ahead.append(any(s.num_in_flight for s in step.sequences)))
    ask(llm, PROMPTS[:1])
    llm.close()
    assert ahead[:9] == [runs_ahead] * 9, "the next one is in flight, but for the last of ten tokens"


def test_two_ranks_give_the_tokens_of_one(plain):
    expected = plain.generate(PROMPTS, GREEDY, False)
    with forked_ranks():
        llm = with_draft_model(MODEL, tensor_parallel_size=2, num_kvcache_blocks=256)
    try:
        assert ask(llm, PROMPTS, GREEDY) == ids(expected)
        counters = llm.engine.counters
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 60, "rank 0 alone has the small model"
        Oracle(expected, 4).into(llm)
        assert ask(llm, PROMPTS, GREEDY) == ids(expected)
        assert counters.num_accepted_tokens < counters.num_draft_tokens
    finally:
        llm.close()


# ---- a small model ---------------------------------------------------------------------------------------------


def with_draft_model(draft: str, **options: object) -> LLM:
    return LLM(MODEL, device="cpu", speculation="model", draft_model=draft, **options)


@contextmanager
def small_runs(llm: LLM) -> Iterator[list[tuple[DecoderModel, int]]]:
    """Within the block, what runs of the small model: the model, and the number of tokens."""
    runs = []

    def note(module: torch.nn.Module, inputs: tuple) -> None:
        if isinstance(module, DecoderModel) and module is not llm.runner.model:
            runs.append((module, len(inputs[0])))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield runs
    finally:
        hook.remove()


@pytest.fixture
def tiny_preset(monkeypatch) -> Callable[..., str]:
    """Makes presets that are `MODEL` with something changed."""

    def make(**changes: object) -> str:
        monkeypatch.setitem(PRESETS, "tiny-changed", PRESETS["qwen2-tiny"] | changes)
        return "random:tiny-changed"

    return make


@pytest.mark.parametrize(
    "variant", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("small chunks", "tiny pool"))]
)
def test_a_small_model_that_is_the_large_one_is_always_right(plain, variant):
    llm = with_draft_model(MODEL, **VARIANTS[variant])
    if variant == "tiny pool":
        admit_whoever_fits(llm)
    seeded = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(PROMPTS))]
    for params in (GREEDY, seeded):
        expected = ask(plain, PROMPTS, params)
        with small_runs(llm) as runs:
            assert [ask(llm, PROMPTS, params) for _ in range(2)] == [expected] * 2
        assert 0 < max(size for _, size in runs) <= llm.options.max_num_batched_tokens
    counters = llm.engine.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 200
    assert (counters.num_preemptions > 0) == (variant == "tiny pool")
    assert llm.calls.stats()["num_used_blocks"] == 0


def test_a_small_model_that_is_wrong_changes_no_token(plain):
    llm = with_draft_model(MODEL, num_kvcache_blocks=256)
    with small_runs(llm) as runs:
        ask(llm, PROMPTS[:1], GREEDY)
    for parameter in runs[0][0].parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    assert ask(llm, PROMPTS, GREEDY) == ask(plain, PROMPTS, GREEDY)
    assert 0 < llm.engine.counters.num_accepted_tokens < llm.engine.counters.num_draft_tokens


def test_a_small_model_may_lack_padding_tokens_of_the_large_ones_vocabulary(tiny_preset):
    padded = tiny_preset(vocab_size=4224)
    prompts = [[4100, 4223, 1, 2], *PROMPTS[:2]]
    llm = LLM(padded, device="cpu", speculation="model", draft_model=MODEL, num_kvcache_blocks=64)
    answers = ask(llm, prompts, GREEDY)
    assert answers == ask(stage_f_graph_tp.LLM(padded, device="cpu", num_kvcache_blocks=64), prompts, GREEDY)
    assert max(map(max, answers)) >= 4096, "answers have tokens that the small model lacks, too"
    assert llm.engine.counters.num_draft_tokens > 0


def test_a_tokenizer_may_have_tokens_that_both_models_lack(tiny_preset):
    fewer = tiny_preset(vocab_size=300)
    llm = LLM(fewer, device="cpu", speculation="model", draft_model=fewer, num_kvcache_blocks=16)
    assert len(llm.tokenizer) > 300
    with pytest.raises(ValueError, match="has 4096 tokens in its vocabulary, and the model needs 300; choose another"):
        LLM(fewer, device="cpu", speculation="model", draft_model=MODEL)


def test_a_small_model_of_fewer_positions_is_refused(tiny_preset):
    with pytest.raises(ValueError, match="has 100 positions, and the model 512; choose another, or lower"):
        with_draft_model(tiny_preset(max_position_embeddings=100), max_model_len=512)


def test_a_small_model_whose_heads_the_backend_cannot_do_runs_with_another_and_says_so(
    tiny_preset, monkeypatch, capsys
):
    make = attention._make
    stand_in = lambda name, device, dtype, size, windows: make(  # noqa: E731
        "reference" if size == 64 else name, device, dtype, size, windows
    )
    monkeypatch.setattr(attention, "_make", stand_in)  # for flash-attn, which has heads of 64 and none of 32
    wide, options = tiny_preset(head_dim=64), {"device": "cpu", "num_kvcache_blocks": 16, "attention_backend": "flash"}
    llm = LLM(wide, speculation="model", draft_model=MODEL, **options)
    assert "draft model: attention_backend='flash' cannot be used: " in (said := capsys.readouterr().err)
    assert "; it runs with 'reference'\n" in said
    assert ask(llm, PROMPTS, GREEDY) == ask(stage_f_graph_tp.LLM(wide, **options), PROMPTS, GREEDY)
    assert llm.engine.counters.num_draft_tokens > 0


@pytest.mark.slow
def test_the_tutors_draft_model_knows_most_of_its_answers_and_the_summary_counts_them():
    llm = LLM("tutor", device="cpu", speculation="model")
    outputs = llm.generate(["What is a KV cache?", "什么是 KV cache？"], replace(GREEDY, max_tokens=50), False)
    count = llm.engine.counters
    assert count.num_accepted_tokens > 0.7 * count.num_draft_tokens > 30
    guesses = f"{count.num_accepted_tokens} of {count.num_draft_tokens} guesses right"
    assert f"{count.num_steps} steps for 100 tokens, {guesses}" in performance_summary(llm, outputs[0])


def test_two_models_share_the_memory_that_there_is_for_one_pool():
    facts = {"device": torch.device("cpu"), "block_size": 16, "max_model_len": 4096, "make_pool": lambda blocks: blocks}
    large, small = (SimpleNamespace(bytes_per_token=n, **facts) for n in (3000, 1000))
    assert make_pools(large, small, SimpleNamespace(num_kvcache_blocks=40)) == (40, 40)
    automatic = SimpleNamespace(num_kvcache_blocks=-1)
    of_one, [of_both] = choose_num_blocks(large, automatic), set(make_pools(large, small, automatic))
    assert of_both == pytest.approx(of_one * 3 / 4, rel=0.1)


@pytest.mark.parametrize(("guesses", "computed"), [([5, 6], 5), ([5, 9], 4), ([7, 5, 6], 3), ([], 3)])
def test_a_small_model_has_computed_the_guesses_before_the_first_wrong_one(guesses, computed):
    followed = Followed([], num_computed_tokens=3, guesses=guesses)
    followed.catch_up([1, 2, 3, 5, 6, 8])
    assert (followed.num_computed_tokens, followed.guesses) == (computed, [])


def test_the_small_model_catches_up_after_a_pause(plain):
    llm = with_draft_model(MODEL, num_kvcache_blocks=256, max_num_batched_tokens=9, max_num_seqs=9)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    request = llm.add_request(PROMPTS[0], params)
    for _ in range(3):
        llm.step()
    [sequence] = llm.engine.scheduler.decoding
    sequence.guesses.resume_at = len(sequence) + 30
    with small_runs(llm) as runs:
        answer = finish(llm)[request]
    assert answer == ask(plain, PROMPTS[:1], params)[0]
    sizes = [size for _, size in runs]
    counters = llm.engine.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 20 and counters.num_steps > 30
    assert max(sizes) == 9 and sizes.count(9) >= 3, "30 tokens that it had not seen, in several steps"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "model"}, "needs draft_model="),
        ({"draft_model": "tutor"}, "speculation='ngram'"),
        ({"speculation": "model", "draft_model": "random:qwen3-0.6b"}, "has 151936 tokens in its vocabulary"),
        ({"speculation": "model", "draft_model": "tutor", "tensor_parallel_size": 2}, "give num_kvcache_blocks"),
    ],
)
def test_a_small_model_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(MODEL, device="cpu", **options)


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft_tokens", [1, 4, 12])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_the_tokens_are_stage_fs(overlap, draft_tokens, dtype):
    """In 16 bits use questions, which have wide margins: a verification may add in another order."""
    questions = ["What is a KV cache?", "What is paged attention?", "什么是连续批处理？", "What is a CUDA graph?"] * 3
    options = {"device": "cuda", "dtype": dtype, "num_kvcache_blocks": 256, "max_num_seqs": 16}
    stage_f = stage_f_graph_tp.LLM("tutor", **options)
    options["without"] = "" if overlap else "overlap"
    temperature = 0.0 if dtype == "bfloat16" else 0.7
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=60, logprobs=i % 2 or None) for i in range(12)]
    expected = stage_f.generate(questions, params, False)
    drafted = LLM("tutor", speculation="model", num_speculative_tokens=draft_tokens, **options)
    assert ask(drafted, questions, params) == ids(expected)
    assert drafted.engine.counters.num_accepted_tokens > 0
    drafted.close()
    llm = LLM("tutor", num_speculative_tokens=draft_tokens, **options)
    assert ask(llm, questions, params) == ids(expected)
    if dtype == "float32":
        asked_again = [2 * (output["prompt_token_ids"] + output["token_ids"]) for output in expected]
        asked_again = [tokens[: len(tokens) // 2 + 12] for tokens in asked_again]
        for count in (1, 4, 12):
            assert ask(llm, asked_again[:count], params[:count]) == ask(stage_f, asked_again[:count], params[:count])
        assert llm.engine.counters.num_accepted_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_gpu_steps_without_guesses_are_one_launch(overlap):
    llm = LLM(
        "random:qwen2.5-0.5b",
        device="cuda",
        dtype="bfloat16",
        without="" if overlap else "overlap",
        num_kvcache_blocks=64,
    )
    [megakernel] = forwards_of(llm.runner, MegakernelSteps)
    rows, launch = [], megakernel.launch
    megakernel.launch = lambda count, inputs: (rows.append(count), launch(count, inputs))[1]
    llm.engine.drafts.drafter = NOBODY
    llm.generate([[1, 2, 3]], GREEDY, False)
    assert rows == [1] * (GREEDY.max_tokens - 1)


def test_the_tokens_of_a_step_without_some_rows_keep_their_logprobs_and_errors():
    error = ValueError("the last row's own")
    step = ScheduledStep(0, 0.0, samples=[True] * 3, num_decodes=3)
    sampled = Sampled([5, 6, 7], [None, {6: -1.0}, None], {0: ValueError("of a row that is gone"), 2: error})
    assert without_rows([0], step, sampled) == Sampled([6, 7], [{6: -1.0}, None], {1: error})
    assert step.samples == [False, True, True]
    assert without_rows([1, 2], step, Sampled([5, 6, 7])) == Sampled([5], None, {})
