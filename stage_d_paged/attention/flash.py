"""Paged attention with the flash-attn package (Dao 2023, arXiv:2307.08691): the yardstick for our kernels.

`flash_attn_varlen_func` takes a flat batch with a block table, which is a prefill or a mixed step;
`flash_attn_with_kvcache` takes one query per sequence and splits the context, which is a decode step. Both need a block
size that is a multiple of 256 tokens. The package has no kernel that writes K and V by slot, so our Triton kernel
stores them if Triton is installed, and PyTorch otherwise.
"""

from __future__ import annotations

import torch

from .interface import AttentionMetadata, BackendUnavailable

HEAD_DIMS = (64, 128)  # these match the reference; paged decode with heads of 96 (2.8.3, H200) did not


class FlashAttention:
    """flash-attn's kernels. Float16 or bfloat16 on an NVIDIA GPU, heads of 64 or 128, no windows."""

    name = "flash"
    preferred_block_size = block_size_multiple = 256

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int, has_windows: bool = False) -> None:
        if device.type != "cuda":
            raise BackendUnavailable(f"flash-attn runs on NVIDIA GPUs, not on {device.type}")
        if dtype not in (torch.float16, torch.bfloat16):
            raise BackendUnavailable(f"flash-attn computes in float16 or bfloat16, not in {dtype}")
        if head_dim not in HEAD_DIMS:
            raise BackendUnavailable(f"head_dim={head_dim}: checked with flash-attn are {HEAD_DIMS} only")
        if has_windows:  # a build without "local attention" takes a window and attends to everything
            raise BackendUnavailable("flash-attn can be built without windows and then ignores them; use 'triton'")
        try:
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        except ImportError as error:
            raise BackendUnavailable(f"flash-attn cannot be imported ({error}); pip install flash-attn") from error
        self.reason = f"flash-attn serves {dtype} with heads of {head_dim}"
        self._prefill = flash_attn_varlen_func
        self._decode = flash_attn_with_kvcache
        try:
            from .triton_store import store
        except ImportError:
            from .reference import store
        self._store = store

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self._store(key, value, k_cache, v_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
    ) -> torch.Tensor:
        assert not window, "refused above"
        if metadata.max_query_len == 1:
            return self._decode(
                query.unsqueeze(1),  # [seqs, 1, heads, head_dim]
                k_cache,
                v_cache,
                cache_seqlens=metadata.context_lens,
                block_table=metadata.block_tables,
                softmax_scale=scale,
                causal=True,
            ).squeeze(1)
        return self._prefill(
            query,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_context_len,
            softmax_scale=scale,
            causal=True,
            block_table=metadata.block_tables,
        )
