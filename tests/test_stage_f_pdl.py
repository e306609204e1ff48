"""Programmatic dependent launch, in code compiled for a Hopper GPU: compiling needs Triton's compiler, but no GPU."""

from __future__ import annotations

import importlib
import re

import pytest
from no_gpu import compiled_for_hopper

# Of the arguments of all kernels: those that are not bfloat16 tensors, and their types.
TYPES = {
    name: kind
    for kind, names in {
        "*fp32": "squares partial partial_out partial_lse",
        "*i32": "arrival_counters block_tables context_lens",
        "*i64": "positions slot_mapping peers",
        "fp32": "eps head_norm_eps rows_eps scale_log2",
        "i32": "x_stride residual_stride query_stride qkv_stride rows_stride slot_stride parts tokens table_width "
        "num_splits split_keys count",
    }.items()
    for name in names.split()
}
TILE = {"BLOCK_M": 16, "BLOCK_K": 64, "PRECISION": "tf32"}
HEADS = {"HEADS": 2, "KV_HEADS": 1, "HALF": 32, "HAS_BIAS": True, "HAS_NORM": True}
ROWS = {"ROWS": 128, "ROWS_PAD": 128}
ATTENTION = {"KV_HEADS": 1, "GROUP": 2, "GROUP_PAD": 16, "ROWS": 2, "HEAD_DIM": 64, "HEAD_PAD": 64, "BLOCK_SIZE": 64}
SPLITS = {"BLOCK_N": 32, "SPLITS_PAD": 64, "AHEAD": 8, "PRECISION": "tf32"}
STORE = {"HALF_PAD": 32, "HEADS_PAD": 4, "BLOCK_SIZE": 64, "k_scales": None, "v_scales": None, "LARGEST": None}
SIZE, PARTS = {"SIZE": 128}, {"SIZE": 128, "PARTS": 2}
PADDED = SIZE | {"SIZE_PAD": 128}
PRODUCT = {"OUT_SIZE": 64, "SPLITS": 2, "BLOCK_N": 16, "RANK": 0, "RANKS": 2}
KERNELS = {
    "kernels.elementwise._rotate_and_store_kernel": HEADS | ROWS | STORE,
    "kernels.elementwise._silu_and_multiply_kernel": ROWS | {"INTERMEDIATE": 64, "BLOCK": 64},
    "kernels.elementwise._rms_norm_kernel": PADDED,
    "kernels.skinny_gemm_kernels.sum_squares_kernel": PADDED,
    "kernels.skinny_gemm_kernels.qkv_rotate_kernel": TILE | PARTS | HEADS | {"PAIRS": 32},
    "kernels.skinny_gemm_kernels.gate_up_silu_kernel": TILE | PARTS | {"INTERMEDIATE": 64, "BLOCK_N": 16},
    "kernels.skinny_gemm_kernels.product_add_kernel": TILE | SIZE | PRODUCT,
    "tensor_parallel.all_reduce._all_reduce_kernel": {"RANK": 0, "RANKS": 2, "BLOCK": 2048, "ONTO": True},
    "kernels.decode_attention.dependent_decode_kernel": ATTENTION | SPLITS | {"ONE_NEW_KEY": True, "WINDOW": 0},
}


def compiled(name: str, pdl: bool) -> str:
    """PTX of a kernel."""
    module, _, function = name.rpartition(".")
    kernel = getattr(importlib.import_module(f"stage_f_graph_tp.{module}"), function)
    types = {n: TYPES.get(n, "*bf16") for n in kernel.arg_names}
    return compiled_for_hopper(kernel, types, KERNELS[name] | {"PDL": pdl}, num_warps=4, launch_pdl=pdl)


@pytest.mark.parametrize("name", KERNELS)
def test_a_dependent_kernel_lets_the_next_start_and_waits_before_it_writes(name):
    pytest.importorskip("triton")
    found = re.findall(r"griddepcontrol\.\w+|\bst\.global|\batom\.", compiled(name, pdl=True))
    assert found[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"]
    assert "st.global" in found
    assert "griddepcontrol" not in compiled(name, pdl=False)
