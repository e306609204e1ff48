"""A bias that balances: experts that are chosen too often get a lower bias, so the tokens of a step spread.

A router has favourites: some experts get many tokens of a step, and others none. So each expert has a bias, a number in
addition to the router's matrix. It takes part only in the choice of the experts. Their weights still come from the
router alone. After a step, the bias of an expert with more than its share of the tokens falls a little, and that of an
expert with less rises (DeepSeek-V3, 2024). `python -m labs.variants.bias` gives 8 of 64 experts three times their
scores, runs 300 steps, and prints how many tokens the fullest expert has in a step.
"""

import torch
from torch import Tensor

from beyond.experts.loop import EXPERTS, HIDDEN, PER_TOKEN, ROUTER

FAVOURITES, TOKENS, STEPS, SPEED = 8, 64, 300, 0.0005


def route_with_bias(scores: Tensor, bias: Tensor, per_token: int, speed: float) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of each token by probability plus bias, and move the biases.

    Args:
        scores: the router's, `[tokens, experts]`.
        bias: `[experts]`.
        per_token: how many experts a token gets.
        speed: how far a bias moves in one step.

    Returns:
        The weights of each token's experts, `[tokens, per_token]`: their probabilities without the bias, divided by
        their sum. The numbers of these experts, in the order of probability plus bias, the largest first. The biases
        for the next step: lower by `speed` where an expert has more tokens than the mean of all experts, higher by
        `speed` where it has fewer, and the same where it has just as many. `bias` itself is not changed.
    """
    probabilities = scores.softmax(-1)
    chosen = (probabilities + bias).topk(per_token).indices
    weights = probabilities.gather(1, chosen)
    counts = chosen.flatten().bincount(minlength=len(bias))
    step = speed * (counts - chosen.numel() / len(bias)).sign()
    return weights / weights.sum(-1, keepdim=True), chosen, bias - step


def fullest(speed: float) -> list[int]:
    """Return how many tokens the fullest expert has in each step, with a router that has favourites."""
    router, numbers = ROUTER.clone(), torch.Generator().manual_seed(2)
    router[:FAVOURITES] *= 3
    bias, found = torch.zeros(EXPERTS), []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, generator=numbers)
        _, chosen, bias = route_with_bias(x @ router.T, bias, PER_TOKEN, speed)
        found.append(int(chosen.flatten().bincount(minlength=EXPERTS).max()))
    return found


def main() -> None:
    last = [sum(fullest(speed)[-50:]) / 50 for speed in (0.0, SPEED)]
    print(f"tokens of the fullest expert, of {TOKENS}: {last[0]:.0f} → {last[1]:.0f}")


if __name__ == "__main__":
    main()
