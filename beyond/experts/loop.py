"""Mixture of experts: a layer has many small MLPs and reads, in a step, only those that its tokens choose.

Take 4 experts, 2 per token, and 3 tokens that choose (0, 2), (2, 3) and (0, 3). There are six pairs of a token and an
expert. Grouped by expert they are 0: tokens 0, 2; 2: tokens 0, 1; 3: tokens 1, 2. Expert 1 is not read, and each of the
others is read once. Each computes its tokens, and a token's output is the weighted sum over its two experts.

`python -m beyond.experts.loop` runs a layer of 64 experts, 8 per token, on 1, 8 and 64 tokens: every expert on every
token, with weight 0 where it was not chosen, and then grouped. Both give the same rows. It counts the experts read,
and prints the formula for a router that chooses all of them equally often.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EXPERTS, PER_TOKEN, HIDDEN, SIZE = 64, 8, 96, 48  # a token has HIDDEN numbers, inside of an expert SIZE
BATCHES = 20  # steps, whose counts are averaged

torch.manual_seed(0)
ROUTER = F.normalize(torch.randn(EXPERTS, HIDDEN))  # rows of equal length: no expert is preferred
GATE, UP = torch.randn(2, EXPERTS, SIZE, HIDDEN) / HIDDEN**0.5
DOWN = torch.randn(EXPERTS, HIDDEN, SIZE) / SIZE**0.5


def route(x: Tensor) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, those of the largest probabilities; returns their weights and their numbers."""
    weights, chosen = (x @ ROUTER.T).softmax(-1).topk(PER_TOKEN)
    return weights / weights.sum(-1, keepdim=True), chosen  # each [tokens, PER_TOKEN]


def compute(expert: int, x: Tensor) -> Tensor:
    """Run one expert, a small MLP, on rows `[tokens, HIDDEN]`."""
    return (F.silu(x @ GATE[expert].T) * (x @ UP[expert].T)) @ DOWN[expert].T


def dense(x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, int]:
    """Run every expert on every token; returns the outputs and how many experts were read."""
    of_all = torch.zeros(len(x), EXPERTS).scatter(1, chosen, weights)  # 0 for those that were not chosen
    outputs = torch.stack([compute(expert, x) for expert in range(EXPERTS)], 1)  # [tokens, EXPERTS, HIDDEN]
    return (of_all[..., None] * outputs).sum(1), EXPERTS


def grouped(x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, int]:
    """Run every expert on the tokens that chose it; returns the outputs and how many experts were read."""
    of_pairs = chosen.flatten()  # pair number p is token p // PER_TOKEN
    groups = of_pairs.argsort(stable=True).split(of_pairs.bincount(minlength=EXPERTS).tolist())
    outputs, read = torch.empty(len(of_pairs), HIDDEN), 0
    for expert, pairs in enumerate(groups):
        if len(pairs) > 0:
            outputs[pairs] = compute(expert, x[pairs // PER_TOKEN])
            read += 1
    return (weights[..., None] * outputs.view(len(x), PER_TOKEN, HIDDEN)).sum(1), read


def expected(tokens: int) -> float:
    """Return how many experts are read on average if the router chooses all of them equally often."""
    return EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** tokens)


def main() -> None:
    counts, numbers = {}, torch.Generator().manual_seed(2)
    for tokens in (1, 8, 64):
        batches = torch.randn(BATCHES, tokens, HIDDEN, generator=numbers)
        for way in (dense, grouped):
            reads = []
            for x in batches:
                choice = route(x)
                outputs, read = way(x, *choice)
                torch.testing.assert_close(outputs, dense(x, *choice)[0], rtol=1e-4, atol=1e-4)
                reads.append(read)
            counts[tokens, way] = sum(reads) / BATCHES
        shown = f"{counts[tokens, grouped]:.1f} of {EXPERTS} experts read, formula {expected(tokens):.1f}"
        print(f"tokens in a step: {tokens:2}   {shown}")
    before, after = counts[8, dense], counts[8, grouped]
    print(f"experts read for 8 tokens: {before:.0f} → {after:.0f} [Qwen3-30B-A3B, 1 request: 60.4 → 6.1 GB per step]")


if __name__ == "__main__":
    main()
