"""Programmatic dependent launch, in code compiled for a Hopper GPU: compiling needs Triton's compiler, but no GPU."""

from __future__ import annotations

import importlib
import os
import re

import pytest
from hopper import compiled_for_hopper

BF16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
# Of the arguments of all kernels: those that are not bfloat16 tensors.
TYPES = {
    "squares": F32,
    "partial": F32,
    "partial_out": F32,
    "partial_lse": F32,
    "arrival_counters": I32,
    "block_tables": I32,
    "context_lens": I32,
    "positions": I64,
    "slot_mapping": I64,
    "peers": I64,
    "eps": "fp32",
    "head_norm_eps": "fp32",
    "rows_eps": "fp32",
    "scale_log2": "fp32",
} | dict.fromkeys(
    (
        "x_stride",
        "residual_stride",
        "query_stride",
        "qkv_stride",
        "rows_stride",
        "slot_stride",
        "parts",
        "tokens",
        "table_width",
        "num_splits",
        "split_keys",
        "count",
    ),
    "i32",
)
TILE = {"BLOCK_M": 16, "BLOCK_K": 64, "PRECISION": "tf32"}
KERNELS = {
    "kernels.elementwise._rotate_and_store_kernel": {
        "HEADS": 2,
        "KV_HEADS": 1,
        "HALF": 32,
        "HALF_PAD": 32,
        "HEADS_PAD": 4,
        "HAS_NORM": True,
        "HAS_BIAS": True,
        "ROWS": 128,
        "ROWS_PAD": 128,
    },
    "kernels.elementwise._silu_and_multiply_kernel": {"INTERMEDIATE": 64, "BLOCK": 64, "ROWS": 128, "ROWS_PAD": 128},
    "kernels.elementwise._rms_norm_kernel": {"SIZE": 128, "SIZE_PAD": 128},
    "kernels.skinny_gemm_kernels.sum_squares_kernel": {"SIZE": 128, "SIZE_PAD": 128},
    "kernels.skinny_gemm_kernels.qkv_rotate_kernel": TILE
    | {"SIZE": 128, "PARTS": 2, "HEADS": 2, "KV_HEADS": 1, "HALF": 32, "PAIRS": 32, "HAS_BIAS": True, "HAS_NORM": True},
    "kernels.skinny_gemm_kernels.gate_up_silu_kernel": TILE
    | {"SIZE": 128, "PARTS": 2, "INTERMEDIATE": 64, "BLOCK_N": 16},
    "kernels.skinny_gemm_kernels.product_add_kernel": TILE
    | {"SIZE": 128, "OUT_SIZE": 64, "SPLITS": 2, "BLOCK_N": 16, "RANK": 0, "RANKS": 2},
    "tensor_parallel.all_reduce._all_reduce_kernel": {"RANK": 0, "RANKS": 2, "BLOCK": 2048, "ONTO": True},
    "kernels.decode_attention.dependent_decode_kernel": {
        "KV_HEADS": 1,
        "GROUP": 2,
        "GROUP_PAD": 16,
        "ROWS": 2,
        "HEAD_DIM": 64,
        "HEAD_PAD": 64,
        "BLOCK_SIZE": 64,
        "BLOCK_N": 32,
        "SPLITS_PAD": 64,
        "AHEAD": 8,
        "PRECISION": "tf32",
    },
}


def compiled(name: str, pdl: bool) -> str:
    """PTX of a kernel."""
    module, _, function = name.rpartition(".")
    kernel = getattr(importlib.import_module(f"stage_f_graph_tp.{module}"), function)
    types = {n: TYPES.get(n, BF16) for n in kernel.arg_names}
    return compiled_for_hopper(kernel, types, KERNELS[name] | {"PDL": pdl}, num_warps=4, launch_pdl=pdl)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
@pytest.mark.parametrize("name", KERNELS)
def test_a_dependent_kernel_lets_the_next_start_and_waits_before_it_writes(name, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = re.findall(r"griddepcontrol\.\w+|\bst\.global|\batom\.", compiled(name, pdl=True))
    assert found[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"]
    assert "st.global" in found
    assert "griddepcontrol" not in compiled(name, pdl=False)
