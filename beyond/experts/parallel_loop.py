"""Expert parallelism: each process holds some whole experts, and a token's row travels to the experts that it chose.

Two processes have separate requests, and the experts of a layer are too many for one process. There are two ways to
divide them. Each process can hold half of every expert: then it needs the rows of all tokens, and sends the others'
parts of the sums back. Or each holds half of the experts, whole: then a row goes to the other process only if one of
its experts is there (dispatch), and the weighted sum of these experts comes back (combine).

`python -m beyond.experts.parallel_loop` runs a layer both ways in two processes, 2 experts per token, and counts the
rows that they send to each other. Both ways give what one process with all experts gives.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from beyond.experts.loop import DOWN, EXPERTS, GATE, HIDDEN, ROUTER, SIZE, UP, compute
from stage_f_graph_tp.tensor_parallel.loop import in_two_processes

RANKS, PER_TOKEN, TOKENS = 2, 2, 64  # tokens of each process


def route(x: Tensor) -> Tensor:
    """Return the weight of every expert for every token, `[tokens, EXPERTS]`; 0 for those that are not chosen."""
    weights, chosen = (x @ ROUTER.T).softmax(-1).topk(PER_TOKEN)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros(len(x), EXPERTS).scatter(1, chosen, weights)


def add_experts(x: Tensor, weights: Tensor, experts: range, run: Callable = compute) -> Tensor:
    """Add up the weighted outputs of some experts, each run on the tokens that chose it."""
    total = torch.zeros_like(x)
    for expert in experts:
        tokens = weights[:, expert].nonzero().flatten()
        total[tokens] += weights[tokens, expert, None] * run(expert, x[tokens])
    return total


def all_to_all(parts: list[Tensor]) -> list[Tensor]:
    """Send `parts[r]` to rank r, and return what every rank has sent to this one (an all-to-all)."""
    sent, received = torch.tensor([len(part) for part in parts]), torch.empty(RANKS, dtype=torch.int64)
    dist.all_to_all_single(received, sent)  # first how many rows, then the rows
    rows = torch.empty(int(received.sum()), parts[0].shape[1])
    dist.all_to_all_single(rows, torch.cat(parts), received.tolist(), sent.tolist())
    return list(rows.split(received.tolist()))


def sharded(rank: int, x: Tensor) -> tuple[Tensor, int]:
    """Hold half of every expert; returns the outputs of this rank's tokens, and how many rows it has sent."""
    features = slice(rank * SIZE // RANKS, (rank + 1) * SIZE // RANKS)

    def half(expert: int, x: Tensor) -> Tensor:
        gate, up = x @ GATE[expert, features].T, x @ UP[expert, features].T
        return (F.silu(gate) * up) @ DOWN[expert][:, features].T

    everyone = all_to_all([x] * RANKS)
    sums = all_to_all([add_experts(rows, route(rows), range(EXPERTS), half) for rows in everyone])
    return torch.stack(sums).sum(0), 2 * (RANKS - 1) * len(x)


def dispatched(rank: int, x: Tensor) -> tuple[Tensor, int]:
    """Hold half of the experts, whole; returns the outputs of this rank's tokens, and how many rows it has sent."""
    own = [range(r * EXPERTS // RANKS, (r + 1) * EXPERTS // RANKS) for r in range(RANKS)]
    weights = route(x)
    going = [weights[:, experts.start : experts.stop].any(1).nonzero().flatten() for experts in own]
    arrived = all_to_all([torch.cat([x[tokens], weights[tokens]], 1) for tokens in going])  # dispatch
    sums = all_to_all([add_experts(rows[:, :HIDDEN], rows[:, HIDDEN:], own[rank]) for rows in arrived])  # combine
    total = torch.zeros_like(x)
    for tokens, part in zip(going, sums, strict=True):
        total[tokens] += part
    others = [r for r in range(RANKS) if r != rank]
    return total, sum(len(going[r]) + len(arrived[r]) for r in others)


def as_rank(way: Callable, x: Tensor, rank: int) -> tuple[Tensor, int]:
    return way(rank, x[rank])


def main() -> None:
    x = torch.randn(RANKS, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected, counts = add_experts(x[0], route(x[0]), range(EXPERTS)), []
    for way in (sharded, dispatched):
        outputs, sent = in_two_processes(way, x, run=as_rank)
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
        counts.append(sent)
    counted = " → ".join(map(str, counts))
    print(f"rows sent by a rank with {TOKENS} tokens: {counted} [16 ranks, 8 of 128 experts: 30 → 12 per token]")


if __name__ == "__main__":
    main()
