"""Fewer bytes: weights as whole numbers from -127 to 127, with one scale per row, and the same answers.

A decode step takes as long as reading its weights: with half of the bytes, half as long. An int8 is a byte. The largest
number of a row is stored as 127, so the *scale* of the row is `largest / 127`, and each other number as the nearest
multiple of it. The row 0.31, -1.27, 0.02, 0.95 has the scale 0.01 and becomes 31, -127, 2, 95. No number is off by more
than half a scale. And a product needs a scale only once per output: y = Σ (s q) x = s Σ q x.
`python -m beyond.quantization.loop` prints the bytes of the matrices (the tutor's are float32: a quarter is left) and
the first token that is not stage D's. With 8 bits there is none. With 3 bits (7 values) there is one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode
from stage_d_paged.layers import Linear
from stage_d_paged.loop import BLOCK_SIZE, LONGEST, PagedAttention, Pool, generate, load


def keep(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    return weight, torch.ones(1)


def quantize(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round a matrix to whole numbers, int8 `[rows, columns]`, and scales `[rows]`."""
    scales = weight.abs().amax(dim=1) / (2 ** (bits - 1) - 1)
    rounded = (weight / scales[:, None]).round().to(torch.int8)
    assert ((rounded * scales[:, None] - weight).abs() < 0.501 * scales[:, None]).all()  # half, and float32's rounding
    return rounded, scales


class ScaledLinear(nn.Module):  # `x Wᵀ` plus a bias or the residual stream
    def __init__(self, linear: Linear, numbers: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.numbers, self.scales, self.bias = numbers, scales, linear.bias

    def forward(self, x: Tensor, residual: Tensor | float = 0.0) -> Tensor:
        y = x @ self.numbers.to(x.dtype).t() * self.scales
        return y + (residual if self.bias is None else self.bias)


def answer(way: Callable, bits: int, prompts: list[list[int]], eos_id: int) -> tuple[list[int], int]:
    """Generate with one way to store matrices; returns all answers as one list, and the matrices' bytes."""
    model, num_bytes = load(PagedAttention()), 0
    for parent in list(model.modules()):
        for name, linear in parent.named_children():
            if isinstance(linear, Linear):
                stored = way(linear.weight, bits)
                setattr(parent, name, ScaledLinear(linear, *stored))
                num_bytes += sum(tensor.nbytes for tensor in stored)
    pool = Pool(model.config, len(prompts) * LONGEST // BLOCK_SIZE, BLOCK_SIZE)
    return [token for ids in generate(model, pool, prompts, eos_id) for token in ids], num_bytes


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    work = [encode(tokenizer, entry["question"]) for entry in read_faq()[:3]], tokenizer.eos_token_id
    expected, before = answer(keep, 32, *work)
    for bits in (3, 8):
        tokens, after = answer(quantize, bits, *work)
        differs = [i for i, (ours, theirs) in enumerate(zip(tokens, expected, strict=False)) if ours != theirs]
        print(f"{bits} bits: first token that differs:", f"{differs[0]} of {len(expected)}" if differs else "none")
    print(f"bytes of the matrices: {before:,} → {after:,} [H200: Qwen2.5-7B, one request, 1.57 × as fast]")


if __name__ == "__main__":
    main()
