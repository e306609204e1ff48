"""Scaled dot-product attention (SDPA) for grouped queries, with its kernels chosen by name.

PyTorch has one function, `scaled_dot_product_attention`, and several kernels behind it, which it picks from by shape,
dtype and mask. Which one runs matters: the one that PyTorch prefers for one shape may plan and allocate anew for every
other. So the stage names the kernels it wants.

In grouped-query attention (Ainslie et al., "GQA", 2023) several query heads share one head of keys and values. With a
mask, transformers copies every key and value once for each query head before it calls SDPA. A decode step has only one
query per head, so it can do better: the queries of one group become the *rows* of one head, and keys and values are
read where they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, softmax
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

ATTENTION_NAME, PREFILL_NAME = "grouped_sdpa", "grouped_sdpa_for_prefill"

# Flash takes no mask, so it serves the prefill. "Efficient" (xFormers) takes one, so it serves decoding with a padded
# cache. "Math" is plain PyTorch, for what the others cannot take (float32 with grouped heads, odd head sizes). cuDNN is
# left out: it makes a plan for every new shape, and a prompt has a new shape almost every time.
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention in the form transformers calls it.

    Args:
        module: the attention layer (not needed).
        query: `[1, heads, tokens, head_dim]`.
        key, value: `[1, kv_heads, positions, head_dim]`.
        attention_mask: added to the scores, broadcast to `[1, heads, tokens, positions]`; None is causal.
        scaling: factor of the scores.

    Returns:
        `[1, tokens, heads, head_dim]`, and None for the attention weights, which SDPA does not keep.
    """
    batch, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    if tokens == 1:
        rows = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)  # query heads of one group are neighbours
        out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, head_dim), None
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def grouped_sdpa_for_prefill(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """`grouped_sdpa` for a prompt; for the one token of a masked step, attention written out for a compiler.

    The fused kernel that takes a mask has one thread block per head, which leaves most of a GPU idle when there are few
    heads and one token. `torch.compile` cannot change a fused kernel; of these three lines it makes its own.
    """
    batch, heads, tokens, head_dim = query.shape
    if tokens > 1:
        return grouped_sdpa(module, query, key, value, attention_mask, scaling)
    assert attention_mask is not None  # a step has one
    rows = query.reshape(batch, key.shape[1], -1, head_dim)
    scores = rows @ key.transpose(2, 3) * scaling + attention_mask  # [1, kv_heads, group, positions]
    weights = softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, head_dim), None


# transformers' own way to add an attention: models find it by this name.
for name, attention in ((ATTENTION_NAME, grouped_sdpa), (PREFILL_NAME, grouped_sdpa_for_prefill)):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)


@contextmanager
def attention_and_matmul_settings(matmul_precision: str) -> Iterator[None]:
    """Name the SDPA kernels and the float32 matmul precision for the time of a block, and put both back after it.

    `high` lets a GPU multiply float32 matrices in TF32 (10 bits of mantissa instead of 23) on its tensor cores;
    bfloat16 and float16 are not touched by it. Both settings belong to the whole process, hence the putting back.
    """
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(matmul_precision)
    try:
        with sdpa_kernel(SDPA_BACKENDS):
            yield
    finally:
        torch.set_float32_matmul_precision(previous)
