"""Stage D's batch sampler equals stage A's row by row, and its number of launches does not grow with the rows."""

from __future__ import annotations

import pytest
import torch
from fake_model import completion_of
from torch.utils._python_dispatch import TorchDispatchMode

from stage_a_naive.contract.outputs import Completion
from stage_a_naive.sampling import SamplingParams, choose_tokens
from stage_d_paged.sampler import BatchSampler, batch_sampler

pytestmark = pytest.mark.fast
VOCAB = 80
CHAT = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
ASKED = [
    CHAT,
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0, frequency_penalty=0.7, logprobs=2),
    SamplingParams(temperature=1.3, min_p=0.05, logit_bias={3: 50, 7: -2.5}),
]


class Operators(TorchDispatchMode):
    """Counts what PyTorch runs: on a GPU, the launches."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def batch_of(params: list[SamplingParams], rows: int, device: str = "cpu") -> tuple[BatchSampler, list[Completion]]:
    """A sampler with a batch of requests that use these parameters in turn, with different tokens so far."""
    sampler = BatchSampler(rows, rows, VOCAB, 4096, torch.device(device))
    completions = [completion_of([1, 2 + row, 2 + row], params[row % len(params)], seed=row) for row in range(rows)]
    for row, completion in enumerate(completions):
        completion.all_token_ids.extend([3, 3, 4][: row % 4])
        sampler.enter(row, completion)
    return sampler, completions


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("group", [1, 2 * VOCAB, 2**24])
def test_a_batch_gets_the_tokens_that_stage_a_chooses_row_by_row(group: int, device: str, monkeypatch):
    monkeypatch.setattr(batch_sampler, "GROUP", group)
    sampler, completions = batch_of(ASKED, 10, device)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        rows = [row for row in range(10) if (row + step) % 3]  # the others have finished, or their prompts have not
        logits = (torch.randn(len(rows), VOCAB, generator=generator) * 3).to(device)
        ready = [completions[row] for row in rows]
        expected = choose_tokens(logits, ready).tolist()
        assert sampler.choose_for(logits, ready, rows).tolist() == expected
        for completion, token_id in zip(ready, expected, strict=True):
            completion.all_token_ids.append(token_id)


def test_a_replaced_function_is_called_once_with_the_scores_after_penalties():
    scores: list[torch.Tensor] = []
    sampler, completions = batch_of([CHAT], 3)
    for completion in completions:
        object.__setattr__(completion.request, "sampling_fn", lambda s, params: scores.append(s) or s.argmax(-1))
    logits = torch.randn(3, VOCAB)
    assert torch.equal(choose_tokens(logits, completions), sampler.choose_for(logits, completions, [0, 1, 2]))
    assert len(scores) == 2 and torch.equal(*scores) and not torch.equal(scores[0], logits)


@pytest.mark.parametrize("params", [[ASKED[1]], [CHAT], ASKED[:4]], ids=["greedy", "chat", "mixed"])
def test_more_rows_take_no_more_operators(params: list[SamplingParams]):
    counted = []
    for rows in (8, 64):
        sampler, completions = batch_of(params, rows)
        with Operators() as operators:
            sampler.choose_for(torch.randn(rows, VOCAB), completions, list(range(rows)))
        counted.append(operators.count)
    assert counted[0] == counted[1], f"8 rows take {counted[0]} operators, 64 rows {counted[1]}"
