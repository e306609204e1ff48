"""Scaled dot-product attention (SDPA) for grouped queries, with its kernels chosen by name.

PyTorch has one function, `scaled_dot_product_attention`, and several kernels behind it, from which it chooses by shape,
dtype and mask. The choice matters: one of the kernels makes a new plan and allocates memory for every new shape. So the
stage names the kernels that may run.

In grouped-query attention (Ainslie et al., "GQA", 2023) several query heads share one head of keys and values. With a
mask, transformers copies every key and value once for each query head before it calls SDPA. A decode step has only one
query per head, so this copy can be avoided: the queries of one group become the *rows* of one head, and keys and values
are read where they are stored.
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

# Flash takes no mask, so it serves the prefill. "Efficient" (xFormers) takes a mask, so it serves decoding with a
# padded cache. "Math" is plain PyTorch, for inputs that the others do not support (float32 with grouped heads, odd
# head sizes). cuDNN is left out: it makes a plan for every new shape, and a prompt has a new shape almost every time.
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
    """Compute attention with the signature that transformers calls.

    Args:
        module: the attention layer (not used).
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
    """Compute a prompt's attention with `grouped_sdpa`, and a masked step's with operations that a compiler can fuse.

    The fused kernel that takes a mask has one thread block per head, which leaves most of a GPU idle if there are few
    heads and one token. `torch.compile` cannot change a fused kernel, but it generates its own kernels for these three
    lines.
    """
    batch, heads, tokens, head_dim = query.shape
    if tokens > 1:
        return grouped_sdpa(module, query, key, value, attention_mask, scaling)
    assert attention_mask is not None  # a step has one
    rows = query.reshape(batch, key.shape[1], -1, head_dim)
    scores = rows @ key.transpose(2, 3) * scaling + attention_mask  # [1, kv_heads, group, positions]
    weights = softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).reshape(batch, 1, heads, head_dim), None


# This is how transformers adds an attention function: models find it by this name.
for name, attention in ((ATTENTION_NAME, grouped_sdpa), (PREFILL_NAME, grouped_sdpa_for_prefill)):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)


@contextmanager
def attention_and_matmul_settings(matmul_precision: str) -> Iterator[None]:
    """Set the SDPA kernels and the float32 matmul precision within a block, and restore both after it.

    `high` lets a GPU multiply float32 matrices in TF32 (10 bits of mantissa instead of 23) on its tensor cores;
    it does not affect bfloat16 and float16. Both settings apply to the whole process, so they are restored.
    """
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(matmul_precision)
    try:
        with sdpa_kernel(SDPA_BACKENDS):
            yield
    finally:
        torch.set_float32_matmul_precision(previous)
