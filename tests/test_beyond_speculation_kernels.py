"""The table's kernels against its definition: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import CPU, CUDA
from no_gpu import H200, PretendedDevice

import beyond
import stage_e_batching
from beyond.speculation.token_table import TokenTable
from stage_a_naive.sampling import SamplingParams

LLM = partial(beyond.LLM, speculation="ngram")
DEVICES = [pytest.param(CPU, marks=pytest.mark.interpreted), pytest.param(CUDA, marks=pytest.mark.gpu)]
SLOTS, LONGEST, BLOCK_SIZE = 6, 70, 4


def table_for_kernels(slots: int, longest: int, draft_tokens: int, device: torch.device) -> TokenTable:
    """A table that the kernels work on, as on a GPU, whose tensors are on `device`."""
    with PretendedDevice(H200, memory="cpu"):
        table = TokenTable(slots, longest, draft_tokens, H200)
    for name in ("tokens", "noise", "last", "limits"):
        setattr(table, name, getattr(table, name).as_subclass(torch.Tensor).to(device))
    return table


def make_tables(rng: random.Random, draft_tokens: int, device: torch.device) -> tuple[TokenTable, TokenTable]:
    """The same texts in a table that PyTorch works on, and in one that the kernels work on."""
    tables = TokenTable(SLOTS, LONGEST, draft_tokens, CPU), table_for_kernels(SLOTS, LONGEST, draft_tokens, device)
    for slot in range(SLOTS):
        length = rng.choice([1, 2, 3, 4, rng.randint(5, LONGEST)])
        text = [rng.randint(1, rng.choice([1, 3, 50])) for _ in range(length)]
        for table in tables:
            table.tokens[slot, :length] = torch.tensor(text)
            table.noise[slot] = torch.arange(table.noise.shape[1]) + 1000 * slot
            table.last[slot], table.limits[slot] = length - 1, min(length + slot, LONGEST - 1)
    return tables


def make_rows(rng: random.Random, draft_tokens: int) -> tuple[list[int], list[int]]:
    """Batch slots and numbers within their sequence of a step's rows, padding at the end."""
    rows = [(slot, i) for slot in rng.sample(range(SLOTS), 4) for i in range(1 + rng.randint(0, draft_tokens))]
    rows += [(SLOTS, 0)] * rng.choice([0, 1, draft_tokens + 9])
    slots, numbers = zip(*rows, strict=True)
    return list(slots), list(numbers)


class Inputs(SimpleNamespace):
    """A step's input, with the sampler's arrays among the others."""

    sampling = property(lambda self: self)


def make_inputs(rng: random.Random, slots: list[int], numbers: list[int], device: torch.device) -> Inputs:
    """A step's input as the host sends it: rows that the device completes, and two tokens of a prompt that samples."""
    count, zeros = len(slots), [0] * len(slots)
    tables = [rng.sample(range(100), 18) if slot < SLOTS else [-1] * 18 for slot in slots]
    long = {
        "batch_slots": slots,
        "positions": [*numbers, 30, 31],
        "input_ids": [*zeros, 7, 8],
        "slot_mapping": [*zeros, 50, 51],
        "sample_slots": slots,
        "sample_tokens": list(range(count)),
    }
    short = {"context_lens": zeros, "noise_keys": zeros, "block_tables": tables}
    return Inputs(
        **{name: torch.tensor(values, device=device) for name, values in long.items()},
        **{name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in short.items()},
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("draft_tokens", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7))])
def test_kernels_guess_complete_and_keep_as_pytorch_does(device, draft_tokens, monkeypatch):
    from beyond.speculation import token_table_kernels

    for name, smaller in (("STRETCH", 16), ("ROWS", 8)):  # so that a text has several
        monkeypatch.setattr(token_table_kernels, name, smaller)
    rng = random.Random(draft_tokens)
    num_wrong = 0
    for _ in range(10):
        expected, found = make_tables(rng, draft_tokens, device)
        slots, numbers = make_rows(rng, draft_tokens)
        seed = rng.random()
        want, got = (make_inputs(random.Random(seed), slots, numbers, d) for d in (CPU, device))
        for table, inputs in ((expected, want), (found, got)):
            table.resolve(inputs, len(slots), BLOCK_SIZE)
        assert torch.equal(found.tokens.cpu(), expected.tokens)
        for name, tensor in vars(want).items():
            assert torch.equal(getattr(got, name).cpu(), tensor), name

        live = sum(slot < SLOTS for slot in slots)
        for error_rate in (0.3, 0.0):  # the second corrects the first
            following = [*want.input_ids[1 : len(slots)].tolist(), 0]
            sampled = [t + (rng.random() < error_rate) for t in following]
            ids, kept = torch.tensor(sampled), torch.tensor(sampled, device=device)
            last_tokens, found_last = torch.zeros(SLOTS + 1).long(), torch.zeros(SLOTS + 1, device=device).long()
            expected.keep(ids, want, last_tokens)
            found.keep(kept, got, found_last)
            num_wrong += (ids[:live] == -1).sum().item()
            assert torch.equal(kept[:live].cpu(), ids[:live])
            assert torch.equal(found.last[:SLOTS].cpu(), expected.last[:SLOTS])
            for slot in set(slots[:live]):
                # What is sampled at the limit ends the sequence, is not run, and may be sampled by several rows.
                known = min(expected.last[slot], expected.limits[slot]) + 1
                assert torch.equal(found.tokens[slot, :known].cpu(), expected.tokens[slot, :known])
                if expected.last[slot] < known:
                    assert found_last[slot].item() == last_tokens[slot].item()
    assert num_wrong > 5


@pytest.mark.interpreted
def test_kernels_give_an_engines_tokens():
    prompts = [[1, 2, 3], [4, 5, 6] * 6, list(range(50, 83))]
    options = {"device": "cpu", "num_kvcache_blocks": 64}
    llm = LLM("random:qwen2-tiny", num_speculative_tokens=3, **options)
    tokens = llm.runner.layers.tokens
    slots, width = tokens.table.tokens.shape
    tokens.table = table_for_kernels(slots - 1, width - 4, 3, CPU)
    plain = stage_e_batching.LLM("random:qwen2-tiny", **options)
    for temperature in (0.0, 0.7):
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True) for i in range(3)]
        expected, found = (engine.generate(prompts, params, False) for engine in (plain, llm))
        assert [output["token_ids"] for output in found] == [output["token_ids"] for output in expected]
    assert llm.engine.counters.num_accepted_tokens > 20


def test_the_kernels_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)
