"""Copies of popular experts: a step over several ranks ends when the fullest rank does.

Each rank holds some whole experts, and popular ones make their ranks late. So the ranks have a few slots more than
there are experts, and these hold copies: the tokens of an expert are divided among its copies (DeepSeek-V3, 2024).
Which experts are popular is counted in earlier steps, and later steps are only similar. `python -m
labs.variants.copies` counts in 20 steps, places the experts of the lesson's program on 16 ranks, and prints how much
more than the mean the fullest rank has in 20 other steps.
"""

import torch

from beyond.experts.loop import EXPERTS, HIDDEN, PER_TOKEN, ROUTER

RANKS, SLOTS, TOKENS, STEPS = 16, 80, 64, 20
POPULAR = 4


def placed(tokens: list[int], ranks: int, slots: int) -> list[list[int]]:
    """Place experts and copies of them in the slots of all ranks.

    First the number of copies: every expert has one, and each slot that is left goes to the expert with the most tokens
    per copy so far (of equal ones, to the lowest). Then their places: the copies with the most tokens come first (of
    equal ones, those of the lowest expert), and each goes to the rank whose copies have the fewest tokens so far (of
    equal ones, to the lowest rank), among the ranks that have a slot left.

    Args:
        tokens: of each expert; a copy has its part of them.
        ranks: each has `slots // ranks` slots.
        slots: of all ranks together, at least one per expert.

    Returns:
        The experts of each rank, in the order in which they came.
    """
    copies = [1] * len(tokens)
    for _ in range(slots - len(tokens)):
        most = max(range(len(tokens)), key=lambda expert: tokens[expert] / copies[expert])
        copies[most] += 1
    held: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    loads = sorted((-tokens[expert] / copies[expert], expert) for expert in range(len(tokens)))
    for load, expert in [pair for pair in loads for _ in range(copies[pair[1]])]:
        free = [rank for rank in range(ranks) if len(held[rank]) < slots // ranks]
        least = min(free, key=lambda rank: sums[rank])
        held[least].append(expert)
        sums[least] -= load
    return held


def lateness(held: list[list[int]], tokens: list[int]) -> float:
    """Return the tokens of the fullest rank, divided by the mean of all ranks."""
    copies = [sum(rank.count(expert) for rank in held) for expert in range(len(tokens))]
    sums = [sum(tokens[expert] / copies[expert] for expert in rank) for rank in held]
    return max(sums) * len(held) / sum(sums)


def counted(steps: int, seed: int) -> list[list[int]]:
    """Return how many tokens each expert has in each step, with a router that has favourites."""
    router, numbers = ROUTER.clone(), torch.Generator().manual_seed(seed)
    router[:POPULAR] *= 3
    x = torch.randn(steps, TOKENS, HIDDEN, generator=numbers)
    chosen = (x @ router.T).topk(PER_TOKEN).indices.flatten(1)
    return [step.bincount(minlength=EXPERTS).tolist() for step in chosen]


def main() -> None:
    before, after = counted(STEPS, 1), counted(STEPS, 2)
    in_order = [list(range(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)) for rank in range(RANKS)]
    total = [sum(of_expert) for of_expert in zip(*before, strict=True)]
    means = []
    for name, held in {
        "experts in order": in_order,
        "placed, no copies": placed(total, RANKS, EXPERTS),
        f"placed, {SLOTS - EXPERTS} copies": placed(total, RANKS, SLOTS),
    }.items():
        means.append(sum(lateness(held, step) for step in after) / STEPS)
        print(f"{name:17}   fullest rank: {means[-1]:.2f} × the mean")
    print(f"tokens of the fullest rank, mean 1: {means[0]:.2f} → {means[-1]:.2f}")


if __name__ == "__main__":
    main()
