"""The sampler's kernel on a GPU chooses what the sampler in PyTorch chooses."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_equal_in_the_interpreter

KERNEL_PARITY = """
import random
import numpy as np
import torch
from stage_a_naive.contract.noise import mix32, noise_key
from stage_a_naive.contract.params import SamplingParams
from stage_e_batching.sampler import SamplerInput
from stage_e_batching.sampler.kernels import RowChooser
from stage_d_paged.sampler.reference import choose_tokens, count_tokens
from stage_d_paged.sampler.rules import rules_of
device = "{device}"
torch.manual_seed(0)
choice = random.Random(0).choice
for rows, vocab, dtype in {cases}:
    logits = (torch.randn(rows, vocab) * 3).to(dtype)
    logits[0, : vocab // 2] = float("-inf")
    logits[-1, vocab // 2], logits[-2, vocab - 1] = float("nan"), float("inf")  # no token can be chosen there
    logits[1, [vocab * 2 // 3, vocab - 1]] = 60.0  # equals, in two stretches where there are several
    few = logits[3, [5, vocab // 2, vocab - 1]]
    logits[3] = float("-inf")
    logits[3, [5, vocab // 2, vocab - 1]] = few  # fewer are allowed than top-k keeps
    params = [
        SamplingParams(
            temperature=choice((0.6, 0.0, 1.0, 1e-3, 5e-324, 1.5, 1e300)),
            top_k=choice((0, 0, 1, 20, vocab // 2, vocab - 1)),
            top_p=choice((1.0, 1.0, 0.9, 0.5, 1e-6, 5e-324)),
            min_p=choice((0.0, 0.0, 0.1, 1.0)),
            repetition_penalty=choice((1.0, 1.0, 1.1, 0.7)),
            presence_penalty=choice((0.0, 0.0, 0.5)),
            frequency_penalty=choice((0.0, 0.0, -0.7)),
        )
        for _ in range(rows)
    ]
    params[0] = SamplingParams(temperature=1.5, top_p=0.95)  # flat: a nucleus of thousands, longer than the short list
    params[3] = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=0.7)
    params[2] = SamplingParams(temperature=1.0)  # without filters: chosen while the row is read, stretch by stretch
    counts = (torch.randint(0, 9, (rows, vocab)) * (torch.rand(rows, vocab) < 0.1)).to(torch.int16)
    smallest = np.finfo(np.float32).tiny
    temperatures = torch.tensor([min(max(p.temperature, smallest), 1e30) if p.temperature else 0.0 for p in params])
    keys = torch.tensor([noise_key(i * 977, i) for i in range(rows)]).to(torch.int32)
    rules = torch.from_numpy(np.stack([rules_of(p, False, vocab, row) for row, p in enumerate(params)]))
    asked = SamplerInput(temperatures, keys, rules, torch.zeros(rows, dtype=torch.int32))
    _, expected = choose_tokens(logits, asked, counts, mix32(torch.arange(vocab)))
    table = counts.to(device, copy=True)
    chooser = RowChooser(rows, vocab, table)
    on_device = SamplerInput(*(array.to(device) for array in asked))
    ids, told = (found.cpu() for found in chooser(logits.to(device), on_device))
    assert expected[-2:].tolist() == [-2, -2] and ids.min() >= 0, "the next step can run on them"
    count_tokens(counts, rules, ids, torch.ones(rows, dtype=torch.bool))
    assert torch.equal(told, expected), [(i, params[i]) for i in (told != expected).nonzero()[:, 0].tolist()]
    assert torch.equal(table.cpu(), counts), "the tokens are counted"
    table.copy_(counts)
    again = [chooser(logits[first:last].to(device), SamplerInput(*(array[first:last] for array in on_device)))[1]
             for first, last in ((0, 1), (1, rows))]
    _, fewer = choose_tokens(logits, asked, counts, mix32(torch.arange(vocab)))
    assert torch.equal(torch.cat(again).cpu(), fewer), "divided among other numbers of programs"
print("equal")
"""


@pytest.mark.slow
def test_the_kernel_draws_what_pytorch_draws_in_the_interpreter():
    pytest.importorskip("triton")
    cases = "[(5, 100, torch.float32), (4, 8192, torch.float32), (6, 20000, torch.bfloat16)]"
    assert_equal_in_the_interpreter(KERNEL_PARITY.format(device="cpu", cases=cases))


@pytest.mark.gpu
def test_the_kernel_draws_what_pytorch_draws_on_the_gpu(capsys):
    cases = [(256, 151_936, torch.bfloat16), (64, 151_936, torch.float32), (7, 5000, torch.bfloat16)]
    exec(KERNEL_PARITY.format(device="cuda", cases=cases), {})
    assert capsys.readouterr().out.split() == ["equal"]
