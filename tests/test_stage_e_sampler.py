"""The batched sampler chooses what stage A's sampler chooses, row by row."""

from __future__ import annotations

import math
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from examples import examples
from fake_model import completion_of
from hypothesis import given
from hypothesis import strategies as st
from interrupts import interrupt_after

from stage_a_naive.contract.filters import cut_off, distances, weights
from stage_a_naive.contract.logprobs import top_logprobs
from stage_a_naive.contract.penalties import apply_penalties
from stage_a_naive.contract.token_rules import apply_rules
from stage_a_naive.sampling import SamplingParams, sample
from stage_d_paged.sampler.reference import cut_offs, penalised
from stage_d_paged.sampler.rules import rules_of
from stage_e_batching.sampler import LOGPROBS, REPLACED, SampledTokens, Sampler, SamplerInput
from stage_e_batching.sampler import logprobs as row_logprobs
from stage_e_batching.step import BatchSequence

pytestmark = pytest.mark.fast
VOCAB = 40
FEW = st.sampled_from([-3.0, 0.0, 0.5, 0.5, 4.0, 9.25])
MANY = st.floats(-30, 30, width=32)
TINY = [5e-324, 1e-46, 1e-45, 1e-40, 1.2e-38]  # zero, subnormal or just normal once they are float32

params_of_row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0, 0.6, 1.7]) | st.sampled_from([1e-6, 1e300, *TINY]),
    top_k=st.sampled_from([0, 0, 1, 3, VOCAB, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-6, *TINY]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7]),
    logit_bias=st.sampled_from([{}, {}, {3: 100, 5: 99.75}, {1: -100, 2: 0.5}]),
    allowed_token_ids=st.sampled_from([None, None, range(5, 30)]),
    min_tokens=st.sampled_from([0, 0, 3]),
    logprobs=st.sampled_from([None, None, 0, 3, VOCAB + 5]),
)


@st.composite
def rows(draw) -> dict[str, object]:
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
    return {
        "params": draw(params_of_row),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "prompt": draw(tokens),
        "output": draw(tokens | st.just([])),
        # few distinct values, so that ties are the rule, or many
        "logits": draw(st.lists(draw(st.sampled_from([FEW, MANY])), min_size=VOCAB, max_size=VOCAB)),
    }


def admit_all(sampler: Sampler, batch: list[dict], batch_slots: list[int]) -> None:
    for row, slot in zip(batch, batch_slots, strict=True):
        sequence = BatchSequence(completion_of(row["prompt"], row["params"], row["seed"]), batch_slot=slot)
        sequence.token_ids.extend(row["output"])
        sampler.admit(sequence)


def make_sampler(max_num_seqs: int, vocab_size: int = VOCAB) -> Sampler:
    return Sampler(max_num_seqs, max_num_seqs, vocab_size, 4096, torch.device("cpu"))


def rows_of(sampler: Sampler, batch: list[dict], batch_slots: list[int]) -> tuple[SamplerInput, int]:
    """Return a step's input for these rows, on the device, and the sampler features that they need."""
    rows = SamplerInput.empty(len(batch))
    needs = sampler.fill(np.array(batch_slots), np.array([len(row["output"]) for row in batch]), rows)
    return SamplerInput(*map(torch.from_numpy, rows)), needs


def choose(
    sampler: Sampler, batch: list[dict], batch_slots: list[int], dtype: torch.dtype = torch.float32
) -> SampledTokens:
    logits = torch.tensor([row["logits"] for row in batch], dtype=dtype)
    rows, needs = rows_of(sampler, batch, batch_slots)
    given = logits.clone()
    ids, told = sampler.choose(logits, rows)
    assert torch.equal(logits, given), "log-probabilities are of these"
    if not needs & (LOGPROBS | REPLACED):
        return SampledTokens(ids, told)
    return sampler.complete(logits, ids, told, rows, np.array(batch_slots))


def scores_of(sampler: Sampler, batch: list[dict], batch_slots: list[int]) -> torch.Tensor:
    """The scores of these rows after penalties."""
    logits = torch.tensor([row["logits"] for row in batch])
    return penalised(logits, rows_of(sampler, batch, batch_slots)[0].rules, sampler.counts)


def chosen_for(batch: list[dict]) -> list[int]:
    """Return the sampler's choices for a separate batch."""
    sampler = make_sampler(len(batch), len(batch[0]["logits"]))
    admit_all(sampler, batch, list(range(len(batch))))
    return choose(sampler, batch, list(range(len(batch)))).ids.tolist()


def logprobs_for(batch: list[dict]) -> list[dict[int, float] | None]:
    """Return the sampler's log-probabilities for a separate batch."""
    sampler = make_sampler(len(batch), len(batch[0]["logits"]))
    admit_all(sampler, batch, list(range(len(batch))))
    drawn = choose(sampler, batch, list(range(len(batch))))
    return drawn.logprobs.by_row(drawn.told.tolist())


def choose_one_by_one(batch: list[dict], dtype: torch.dtype = torch.float32) -> list[int]:
    """Stage A's answer for each row on its own; the logits are float32 there, whatever the model computes in."""
    chosen = []
    for row in batch:
        logits = torch.tensor([row["logits"]], dtype=dtype).float()
        rules = completion_of(row["prompt"], row["params"]).request.token_rules
        logits = apply_rules(logits, [rules], [len(row["output"])], [row["output"]])
        logits = apply_penalties(logits, [row["params"]], [row["prompt"]], [row["output"]])
        chosen.append(int(sample(logits, [row["params"]], [row["seed"]], [len(row["output"])])))
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(50)
@given(batch=st.lists(rows(), min_size=1, max_size=6), random=st.randoms(use_true_random=False))
def test_every_row_is_what_stage_a_chooses_for_it_alone(dtype, batch, random):
    sampler = make_sampler(8)
    batch_slots = random.sample(range(8), len(batch))
    admit_all(sampler, batch, batch_slots)
    drawn = choose(sampler, batch, batch_slots, dtype)
    assert drawn.told.tolist() == choose_one_by_one(batch, dtype)


@pytest.mark.parametrize("seed", range(3))
def test_the_cut_offs_of_many_rows_are_stage_as(seed):
    generator, choice = torch.Generator().manual_seed(seed), random.Random(seed).choice
    params = [
        SamplingParams(
            top_k=choice((0, 1, 3, 20, 150, 10**6)), top_p=choice((1.0, 0.9, 0.5, 1e-6)), min_p=choice((0.0, 0.05, 1.0))
        )
        for _ in range(60)
    ]
    scaled = -torch.rand(60, 200, generator=generator) * torch.linspace(0.1, 30, 60)[:, None]
    scaled[::2] = (scaled[::2] * 4).round() / 4  # equals
    scaled[:, 77] = 0
    rules = torch.from_numpy(np.stack([rules_of(p, False, 200, 0) for p in params]))
    expected = [int(cut_off(row, p)) for row, p in zip(distances(scaled), params, strict=True)]
    assert cut_offs(distances(scaled), rules)[:, 0].tolist() == expected


def test_a_share_that_is_reached_exactly_needs_no_further_token():
    half = next(d for d in range(23_258_000, 23_259_000) if weights(torch.tensor(d)) == 2**39)
    distance = torch.tensor([[0, half, half]] * 2, dtype=torch.int32)
    rules = np.stack([rules_of(SamplingParams(top_p=p), False, 3, 0) for p in (0.5, 0.5001)])
    assert cut_offs(distance, torch.from_numpy(rules)).tolist() == [[0], [half]]


@pytest.mark.parametrize("asked", [{"min_p": 1e-13}, {"top_p": 0.99999999}, {"top_k": 16384}], ids=str)
def test_a_sum_of_weights_that_float64_rounds_up_is_reached(asked):
    """16,384 times 2**40, and 3: a multiple of 4 in float64, and the next one is nearer."""
    logits = [0.0] * 16_384 + [math.log(3.5 / 2**40)]
    row = {"params": SamplingParams(**asked), "prompt": [1], "output": [], "logits": logits}
    batch = [row | {"seed": seed} for seed in range(3)]
    assert chosen_for(batch) == choose_one_by_one(batch)


@examples(14)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_logprobs_are_stage_as(batch):
    sampler = make_sampler(8)
    batch_slots = list(range(len(batch)))
    admit_all(sampler, batch, batch_slots)
    drawn = choose(sampler, batch, batch_slots)
    ids = drawn.told.tolist()
    found = drawn.logprobs.by_row(ids) if drawn.logprobs else [None] * len(ids)
    for row, token_id, logprobs in zip(batch, ids, found, strict=True):
        count = row["params"].logprobs
        if count is None:
            assert logprobs is None
            continue
        expected = top_logprobs(torch.tensor(row["logits"]), count, token_id)
        assert list(logprobs) == list(expected), "the same tokens in the same order, ties included"
        assert logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("top_p", "kept"), [(0.125, 2), (0.5, 2), (0.501, 3), (0.749, 3), (0.751, 6), (0.999, 6)])
def test_top_p_stops_where_the_mass_reaches_it_and_equals_stay_together(top_p, kept):
    logits = [math.log(weight) for weight in (4.0, 4.0, 4.0 - 2**-20, 4 / 3, 4 / 3, 4 / 3)]  # 1/4 three times, 1/12
    row = {"params": SamplingParams(top_p=top_p), "prompt": [1], "output": [], "logits": logits}
    batch = [row | {"seed": seed} for seed in range(200)]
    ids = chosen_for(batch)
    assert set(ids) == set(range(kept))
    assert ids == choose_one_by_one(batch)


def test_logprobs_of_many_rows_are_computed_group_by_group(monkeypatch):
    params = SamplingParams(temperature=0, logprobs=2)
    row = {"params": params, "seed": 0, "prompt": [1], "output": []}
    batch = [
        row | {"logits": [float((7 * i + 3 * row_number) % VOCAB) for i in range(VOCAB)]} for row_number in range(5)
    ]
    at_once = logprobs_for(batch)
    monkeypatch.setattr(row_logprobs, "GROUP", 2 * VOCAB)
    assert logprobs_for(batch) == at_once and len({next(iter(row)) for row in at_once}) == 5


@examples(20)
@given(st.lists(st.tuples(st.integers(0, 2), rows()), min_size=2, max_size=8))
def test_a_batch_slot_that_is_used_again_keeps_nothing_of_its_last_owner(arrivals):
    """One owner after another in three slots, each generating a token: always the scores that stage A computes."""
    sampler = make_sampler(3)
    owners: dict[int, dict] = {}
    for slot, row in arrivals:
        owners[slot] = row | {"output": list(row["output"])}
        admit_all(sampler, [row], [slot])
        slots, batch = list(owners), list(owners.values())
        logits = torch.tensor([row["logits"] for row in batch])
        expected = apply_penalties(
            logits, [r["params"] for r in batch], [r["prompt"] for r in batch], [r["output"] for r in batch]
        )
        assert torch.equal(scores_of(sampler, batch, slots), expected)
        ids = choose(sampler, batch, slots).ids.tolist()  # and counts them
        assert ids == choose_one_by_one(batch)
        for row, token in zip(batch, ids, strict=True):
            row["output"].append(token)


def test_an_admission_that_breaks_off_leaves_no_trace_in_the_requests_after_it():
    """An interrupt, or a device without memory, at any line; then other requests are admitted into the same slots."""
    row = {"seed": 1, "prompt": [3], "output": [5, 5], "logits": [float(i % 7) for i in range(VOCAB)]}
    plain, strong, weak = (row | {"params": SamplingParams(temperature=0, presence_penalty=p)} for p in (0, 2, 0.5))
    lines = finished = 0
    while not finished:
        lines += 1
        sampler = make_sampler(3)
        with suppress(MemoryError), interrupt_after(lines, MemoryError):
            admit_all(sampler, [strong, strong, plain], [0, 1, 2])
            finished = True
        for batch in ([plain, weak, strong], [weak, plain, weak]):
            admit_all(sampler, batch, [0, 1, 2])
            logits = torch.tensor([each["logits"] for each in batch])
            params, prompts, outputs = ([each[key] for each in batch] for key in ("params", "prompt", "output"))
            expected = apply_penalties(logits, params, prompts, outputs)
            assert torch.equal(scores_of(sampler, batch, [0, 1, 2]), expected)
    assert lines > 40, "every line of an admission"


def test_a_greedy_request_in_the_slot_of_a_random_one_is_greedy_also_beside_random_ones():
    sampler = make_sampler(2)
    row = {"seed": 1, "prompt": [3], "output": [], "logits": [i / VOCAB for i in range(VOCAB)]}
    random, greedy = (row | {"params": SamplingParams(temperature=t)} for t in (2.0, 0.0))
    admit_all(sampler, [random, random], [0, 1])
    admit_all(sampler, [greedy], [0])
    for num_generated in range(5):
        batch = [each | {"output": [0] * num_generated} for each in (greedy, random)]
        assert choose(sampler, batch, [0, 1]).ids.tolist() == choose_one_by_one(batch)


def test_a_row_that_has_its_min_tokens_asks_for_nothing_any_more():
    sampler = make_sampler(2)
    row = {"seed": 1, "prompt": [3], "logits": [float(i == 0) for i in range(VOCAB)]}  # 0 ends an answer
    params = SamplingParams(temperature=0, min_tokens=2, frequency_penalty=0.6)
    batch = [
        row | {"params": params, "output": []},
        row | {"params": SamplingParams(logit_bias={7: 100}), "output": []},
    ]
    admit_all(sampler, batch, [0, 1])
    found = []
    for step in range(5):
        rows, slots = (batch, [0, 1]) if step == 3 else (batch[:1], [0])
        needs = rows_of(sampler, rows, slots)[1]
        found.append((bool(needs & REPLACED), choose(sampler, rows, slots).ids.tolist()))
        batch[0]["output"] = [0] * (step + 1)
    assert found == [(True, [1]), (True, [2]), (False, [0]), (True, [0, 7]), (False, [3])]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_bad_word_is_found_also_while_its_last_token_is_on_its_way_to_the_host(in_flight):
    """The token before is the first one of a bad word in row 0, and not in row 1."""
    sampler = make_sampler(2)
    params = SamplingParams(temperature=0, bad_words=["5 7 9", "8 9"])
    rows = [{"params": params, "seed": 1, "prompt": [3], "output": [6, 5]} for _ in range(2)]
    admit_all(sampler, rows, [0, 1])
    chosen = []
    for best in ([7, 4], [9, 9], [9, 8], [1, 9]):
        logits = [[float(i == token) for i in range(VOCAB)] for token in best]
        ids = choose(sampler, [row | {"logits": one} for row, one in zip(rows, logits, strict=True)], [0, 1]).ids
        chosen.append(ids.tolist())
        for slot, token in enumerate(ids.tolist()):
            rows[slot]["output"] = [*rows[slot]["output"], token]
            known = sampler._sequences[slot].token_ids
            known[1:] = rows[slot]["output"][: -1 if in_flight else None]
    assert chosen == [[7, 4], [0, 9], [9, 8], [1, 0]]
