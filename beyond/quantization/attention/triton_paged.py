"""The Triton kernels that write and read 8 bits, for stage D's `TritonAttention`."""

from __future__ import annotations

from beyond.quantization.attention.triton_decode import decode
from beyond.quantization.attention.triton_prefill import prefill
from beyond.quantization.attention.triton_store import store
from stage_d_paged.attention.triton_paged import Kernels

KERNELS = Kernels(store, prefill, decode)
