"""Tokens sampled by shard equal those of the whole row: on the CPU, and with the Triton kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import assert_equal_in_the_interpreter
from test_stage_f_parallel import CPU, F32, on_ranks

from stage_a_naive.contract.filters import SMALLEST
from stage_a_naive.contract.noise import mix32, noise_key
from stage_d_paged.layers import Embedding
from stage_d_paged.sampler.reference import sample_reference
from stage_f_graph_tp.tensor_parallel import RankGroup, ShardSampler
from stage_f_graph_tp.tensor_parallel.sharding import VocabParallelEmbedding


@pytest.mark.parametrize(("vocab", "ranks"), [(1000, 2), (1003, 4), (5, 4)])
def test_all_ranks_choose_the_token_of_the_whole_row(vocab, ranks):
    torch.manual_seed(0)
    rows, share = 60, -(-vocab // ranks)
    logits = torch.randn(rows, vocab) * 3
    logits[0] = -logits[0].abs() - 1  # greedy, and all below 0, which is what padding scores
    logits[6, [share - 1, share, vocab - 1]] = 60.0  # greedy, and equal on both sides of a border between two ranks
    logits[1, :share] = -torch.inf
    temperatures = torch.tensor([(0.0, 0.6, 1.0, 1e-3, SMALLEST, float("inf"))[i % 6] for i in range(rows)])
    keys = torch.tensor([noise_key(i * 977, i) for i in range(rows)]).to(torch.int32)

    def work(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        head = VocabParallelEmbedding(Embedding(share, 1, F32, CPU), vocab, group)
        own = logits[:, head.first : head.last]
        head.own_logits = lambda hidden: F.pad(own, (0, share - own.shape[1]))
        return ShardSampler(head)(logits, temperatures, keys)

    expected = sample_reference(logits, temperatures.clamp(max=1e30), keys, mix32(torch.arange(vocab)))
    assert expected[6] == share - 1
    for ids, told in on_ranks(ranks, work):
        assert torch.equal(ids, expected) and torch.equal(told, expected)
    logits[2, vocab // 2], logits[4, -1] = torch.nan, torch.inf  # of one rank's tokens
    for ids, told in on_ranks(ranks, work):
        assert told[2] == told[4] == -2 and torch.equal(ids[5:], expected[5:]) and 0 <= ids.min() <= ids.max() < vocab


def test_stacking_by_the_one_shot_all_reduce_is_exact(monkeypatch):
    class OneShot:
        """Stands in for the one-shot all-reduce: gloo adds up three ranks' parts of 24 bytes; 96 do not fit."""

        def __init__(self, group: RankGroup) -> None:
            self.group, self.calls = group, 0

        def supports(self, x: torch.Tensor) -> bool:
            return x.nbytes <= 200

        def __call__(self, x: torch.Tensor, residual: None) -> torch.Tensor:
            self.calls += 1
            self.group.one_shot = None
            self.group.all_reduce(x)
            self.group.one_shot = self
            return x

    values = torch.tensor([[1 / 3, -torch.inf, 151_935.0], [1e-38, 3e38, -0.1]])

    def work(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor, int]:
        group.one_shot = OneShot(group)
        own = values * (group.rank + 1)
        return group.stack(own), group.stack(own.repeat(1, 4)), group.one_shot.calls

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape, torch.nan))
    expected = torch.stack([values, values * 2, values * 3])
    for few, many, calls in on_ranks(3, work):
        assert torch.equal(few, expected)
        assert torch.equal(many, expected.repeat(1, 1, 4))
        assert calls == 1


KERNEL_PARITY = """
import torch
from stage_a_naive.contract.noise import mix32, noise_key
from stage_d_paged.sampler.reference import sample_reference
from stage_f_graph_tp.tensor_parallel import shard_sampling as reference, shard_sampling_kernels as kernels
device = "{device}"
torch.manual_seed(0)
for rows, share, ranks, dtype in {cases}:
    scores = (torch.randn(rows, ranks * share) * 3).to(dtype)
    scores[0, [share - 1, share, -1]] = 60.0  # greedy, and equal
    scores[1, :share] = float("-inf")  # a rank without tokens
    scores[:, -20:] = float("-inf")
    scores[-1, share + 7] = (float("nan"), float("inf"))[rows % 2]  # no token can be chosen there
    temperatures = torch.tensor([(0.0, 0.6, 1.0, 1e-3, float("inf"))[i % 5] for i in range(rows)])
    cool = temperatures.clamp(max=1e30)  # as the kernels do: -inf / inf is no number
    keys = torch.tensor([noise_key(i * 977, i) for i in range(rows)]).to(torch.int32)
    mixed = mix32(torch.arange(ranks * share))
    found, expected = [], []
    for first in range(0, ranks * share, share):
        part = scores[:, first : first + share]
        expected.append(reference.find_winners(part, cool, keys, first, mixed[first : first + share]))
        found.append(kernels.find_winners(part.to(device), temperatures.to(device), keys.to(device), first))
    ids, told = (chosen.cpu() for chosen in kernels.compare_winners(torch.stack(found), temperatures.to(device)))
    assert torch.equal(told, reference.compare_winners(torch.stack(expected), cool)[1]), (rows, share, ranks)
    assert torch.equal(ids[:-1], sample_reference(scores, cool, keys, mixed)[:-1])
    assert torch.equal(told[:-1], ids[:-1]) and told[-1] == -2 and 0 <= ids[-1] < ranks * share
    assert ids[0] == share - 1
print("equal")
"""


def test_the_kernels_choose_the_same_tokens_in_the_interpreter():
    pytest.importorskip("triton")
    cases = "[(3, 8200, 2, torch.bfloat16), (6, 300, 3, torch.float32)]"
    assert_equal_in_the_interpreter(KERNEL_PARITY.format(device="cpu", cases=cases))


@pytest.mark.gpu
def test_the_kernels_choose_the_same_tokens_on_the_gpu(capsys):
    cases = [(256, 75_968, 2, torch.bfloat16), (7, 37_984, 4, torch.bfloat16), (64, 64_128, 2, torch.float32)]
    exec(KERNEL_PARITY.format(device="cuda", cases=cases), {})
    assert capsys.readouterr().out.split() == ["equal"]
