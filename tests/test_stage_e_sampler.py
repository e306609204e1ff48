"""The batched sampler chooses what stage A's sampler chooses, row by row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_a_naive.logprobs import top_logprobs
from stage_a_naive.noise import mix32, noise_key
from stage_a_naive.outputs import Request
from stage_a_naive.penalties import apply_penalties
from stage_a_naive.sampling import SamplingParams, sample
from stage_e_batching.sampler import Sampler, draw_reference
from stage_e_batching.step import BatchSequence

VOCAB = 40

params_of_row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 0.6, 1.7, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 3, VOCAB, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7]),
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
        # few distinct values: ties are the rule
        "logits": draw(st.lists(st.sampled_from([-3.0, 0.0, 0.5, 0.5, 4.0, 9.25]), min_size=VOCAB, max_size=VOCAB)),
    }


def seated(sampler: Sampler, batch: list[dict], seats: list[int]) -> None:
    for row, seat in zip(batch, seats, strict=True):
        sequence = BatchSequence(Request(0, row["prompt"], row["params"], row["seed"]), row=seat)
        sequence.token_ids += row["output"]
        sampler.seat(sequence)


def choose(sampler: Sampler, batch: list[dict], seats: list[int]):
    seat_array = np.array(seats)
    temperatures, keys = np.empty(len(seats), np.float32), np.empty(len(seats), np.int32)
    sampler.fill(seat_array, np.array([len(row["output"]) for row in batch]), temperatures, keys)
    logits = torch.tensor([row["logits"] for row in batch])
    return sampler(logits, seat_array, torch.from_numpy(temperatures), torch.from_numpy(keys))


def choose_one_by_one(batch: list[dict]) -> list[int]:
    """Stage A's answer for each row on its own."""
    chosen = []
    for row in batch:
        logits = torch.tensor([row["logits"]])
        logits = apply_penalties(logits, [row["params"]], [row["prompt"]], [row["output"]])
        chosen.append(int(sample(logits, [row["params"]], [row["seed"]], [len(row["output"])])))
    return chosen


@settings(max_examples=150, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_every_row_is_what_stage_a_chooses_for_it_alone(batch, random):
    sampler = Sampler(8, VOCAB, torch.device("cpu"))
    seats = random.sample(range(8), len(batch))
    seated(sampler, batch, seats)
    drawn = choose(sampler, batch, seats)
    assert drawn.ids.tolist() == choose_one_by_one(batch)


@settings(max_examples=40, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_logprobs_are_stage_as(batch):
    sampler = Sampler(8, VOCAB, torch.device("cpu"))
    seats = list(range(len(batch)))
    seated(sampler, batch, seats)
    drawn = choose(sampler, batch, seats)
    ids = drawn.ids.tolist()
    found = drawn.logprobs.to_host(len(ids), ids) if drawn.logprobs else [None] * len(ids)
    for row, token_id, logprobs in zip(batch, ids, found, strict=True):
        count = row["params"].logprobs
        if count is None:
            assert logprobs is None
            continue
        expected = top_logprobs(torch.tensor(row["logits"]), count, token_id)
        # Of equal ones, which belong to the likeliest is open; the values are not.
        likeliest, expected_likeliest = (sorted(x.values(), reverse=True)[:count] for x in (logprobs, expected))
        assert likeliest == pytest.approx(expected_likeliest, abs=1e-5)
        assert logprobs[token_id] == pytest.approx(expected[token_id], abs=1e-5)


def test_penalty_counts_follow_the_tokens_drawn_and_start_again_with_a_new_owner():
    sampler = Sampler(4, VOCAB, torch.device("cpu"))
    params = SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=1.1)
    logits = [float(i % 7) for i in range(VOCAB)]
    row = {"params": params, "seed": 1, "prompt": [3, 4], "output": [], "logits": logits}
    other = row | {"params": SamplingParams(temperature=0), "logits": logits[::-1]}
    seated(sampler, [other, row], [0, 2])
    for _ in range(12):
        expected = choose_one_by_one([other, row])
        ids = choose(sampler, [other, row], [0, 2]).ids.tolist()
        assert ids == expected
        row["output"] = [*row["output"], ids[1]]
    assert len(set(row["output"])) > 6, "the penalty moved the choice along"
    fresh = row | {"output": [], "prompt": [5]}
    seated(sampler, [fresh], [2])
    assert choose(sampler, [fresh], [2]).ids.tolist() == choose_one_by_one([fresh])


def test_noise_keys_are_stage_as():
    sampler = Sampler(3, VOCAB, torch.device("cpu"))
    seeds = [0, 2**64 - 1, 12345678901234567]
    batch = [
        {"params": SamplingParams(), "seed": seed, "prompt": [1], "output": [], "logits": []} for seed in seeds
    ]
    seated(sampler, batch, [0, 1, 2])
    temperatures, keys = np.empty(3, np.float32), np.empty(3, np.int32)
    sampler.fill(np.array([2, 0, 1]), np.array([7, 0, 100_000]), temperatures, keys)
    expected = [noise_key(seeds[2], 7), noise_key(seeds[0], 0), noise_key(seeds[1], 100_000)]
    assert keys.view(np.uint32).tolist() == expected


def test_a_greedy_batch_neither_sorts_nor_draws(monkeypatch):
    sampler = Sampler(4, VOCAB, torch.device("cpu"))
    row = {"params": SamplingParams(temperature=0, top_p=0.5, top_k=3), "seed": 0, "prompt": [1], "output": []}
    row["logits"] = [float(i) for i in range(VOCAB)]
    seated(sampler, [row, row], [0, 1])
    monkeypatch.setattr(Sampler, "_filter", lambda *_: pytest.fail("filtered"))
    monkeypatch.setattr(Sampler, "draw_plain", lambda *_: pytest.fail("drew"))
    assert choose(sampler, [row, row], [0, 1]).ids.tolist() == [VOCAB - 1] * 2


def test_draws_follow_the_distribution():
    sampler = Sampler(1, 4, torch.device("cpu"))
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    row = {"params": SamplingParams(temperature=1.0), "seed": 5, "prompt": [1], "output": [], "logits": probs.log()}
    seated(sampler, [row], [0])
    rows = 20_000
    keys = torch.tensor([noise_key(5, i) for i in range(rows)]).to(torch.int32)
    ids = draw_reference(probs.log().expand(rows, 4), torch.ones(rows), keys, mix32(torch.arange(4)))
    assert torch.bincount(ids, minlength=4).div(rows).tolist() == pytest.approx(probs.tolist(), abs=0.015)


KERNEL_PARITY = """
import torch
from stage_a_naive.noise import mix32, noise_key
from stage_e_batching import sampler_kernels
from stage_e_batching.sampler import draw_reference
device = "{device}"
torch.manual_seed(0)
for rows, vocab, dtype in {cases}:
    scores = (torch.randn(rows, vocab) * 3).to(dtype)
    scores[0, : vocab // 2] = float("-inf")
    temperatures = torch.tensor([(0.0, 0.6, 1.0, 1e-3)[i % 4] for i in range(rows)])
    temperatures[0] = 0.8
    keys = torch.tensor([noise_key(i * 977, i) for i in range(rows)]).to(torch.int32)
    ids = sampler_kernels.draw(scores.to(device), temperatures.to(device), keys.to(device)).cpu()
    expected = draw_reference(scores, temperatures, keys, mix32(torch.arange(vocab)))
    assert torch.equal(ids, expected), (rows, vocab, dtype, (ids != expected).nonzero())
print("equal")
"""
ROOT = Path(__file__).resolve().parent.parent


def test_the_kernel_draws_what_pytorch_draws_in_the_interpreter():
    pytest.importorskip("triton")
    cases = "[(4, 100, torch.float32), (3, 8192, torch.float32), (5, 20000, torch.bfloat16)]"
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_PARITY.format(device="cpu", cases=cases)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.gpu
def test_the_kernel_draws_what_pytorch_draws_on_the_gpu(capsys):
    cases = [(256, 151_936, torch.bfloat16), (64, 151_936, torch.float32), (7, 5000, torch.bfloat16)]
    exec(KERNEL_PARITY.format(device="cuda", cases=cases))
    assert capsys.readouterr().out.strip() == "equal"
