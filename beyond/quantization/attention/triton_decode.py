"""Triton kernel for decode over an 8-bit cache: stage D's, with half the bytes to read.

The scales never touch a tile. A key's scale multiplies its *score*, a value's scale multiplies its *weight*:

    q · (s k) = s (q · k)            sum_i p_i (s_i v_i) = sum_i (p_i s_i) v_i

so a tile of 64 keys of 128 numbers takes 64 multiplications, not 8192. The 8-bit values are exact in bfloat16 (and in
float16), so that the tensor cores multiply what is stored; the sums are float32.

Block table, splits and combine are stage D's functions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from beyond.quantization.formats import Quantized
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.attention.decode_plan import DecodeConfig, plan_decode
from stage_d_paged.attention.triton_decode import LOG2_E, look_up, slots_of, write_result

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # where inline PTX cannot run


@triton.jit
def keep_layout(x):
    """Return the 8-bit `x` as it is: a copy of registers, which the compiler moves no change of layout across.

    The product with the values takes neighbours of one column. Without this, the compiler reorders the values while
    they still are 8 bits, one byte at a time. Behind it they are 16 bits, which shared memory transposes (`ldmatrix`).
    """
    if INTERPRETED:
        return x
    bits = x.to(tl.int8, bitcast=True)  # four in each register; a pure function would be moved, too
    same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], tl.int8, is_pure=False, pack=4)
    return same.to(x.dtype, bitcast=True)


@triton.jit
def quantized_online_softmax(
    q, k_values, v_values, k_scales, v_scales, table, block, first, step, context_len, kv_head, slot_stride, scale_log2,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, GROUP_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of BLOCK_N keys that begin at first, first + step, … below `context_len`.

    `q` is [GROUP_PAD, HEAD_PAD]; `block` is `look_up` of the first tile. Returns (values [GROUP_PAD, HEAD_PAD], log2 of
    the sum of all weights [GROUP_PAD]); without any key these are zeros and -inf.
    """
    key = tl.arange(0, BLOCK_N)
    column = tl.arange(0, HEAD_PAD)[None, :]
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for start in range(first, context_len, step):
        valid = start + key < context_len
        inside = valid[:, None] & (column < HEAD_DIM)
        slot = slots_of(block, start, key, BLOCK_SIZE, BLOCK_N)
        # The next tile's lookup is issued here: at the top of its own step it would cost a stage of the load pipeline.
        block = look_up(table, start + step, context_len, BLOCK_SIZE, BLOCK_N)
        offset = slot[:, None] * slot_stride + kv_head * HEAD_DIM + column
        scale_offset = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        k = tl.load(k_values + offset, mask=inside, other=0.0)  # [BLOCK_N, HEAD_PAD], 8 bits
        v = tl.load(v_values + offset, mask=inside, other=0.0)
        k_scale = tl.load(k_scales + scale_offset, mask=valid, other=0.0)  # [BLOCK_N]
        v_scale = tl.load(v_scales + scale_offset, mask=valid, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)  # [GROUP_PAD, BLOCK_N]
        scores = tl.where(valid[None, :], scores * (k_scale * scale_log2)[None, :], float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        p = tl.exp2(scores - new_highest[:, None])
        total = total * shrink + tl.sum(p, 1)
        weighted = (p * v_scale[None, :]).to(q.dtype)
        acc = tl.dot(weighted, keep_layout(v).to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
    total = tl.where(total == 0.0, 1.0, total)  # without any key
    return acc / total[:, None], highest + tl.log2(total)


# Not specialised on sizes that change from step to step: each new specialisation would be a compilation.
@triton.jit(do_not_specialize=["num_splits", "split_keys", "table_width"])
def quantized_decode_kernel(
    out, query, k_values, v_values, k_scales, v_scales, block_tables, context_lens, cu_seqlens_q, partial_out,
    partial_lse, arrival_counters, scale_log2, query_stride, slot_stride, table_width, num_splits, split_keys,
    MIXED: tl.constexpr,  # the batch also has sequences of several queries, which the prefill kernel serves
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS_PAD: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one query per sequence; the arguments are those of stage D's `decode_kernel`, and the scales."""
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % num_splits
    seq = (tl.program_id(0) // KV_HEADS // num_splits).to(tl.int64)
    token = seq
    if MIXED:
        token = tl.load(cu_seqlens_q + seq).to(tl.int64)
        if tl.load(cu_seqlens_q + seq + 1) - token != 1:
            return
    row = tl.arange(0, GROUP_PAD)[:, None]
    column = tl.arange(0, HEAD_PAD)[None, :]
    head = kv_head * GROUP  # the first query head of the group
    table = block_tables + seq * table_width
    context_len = tl.load(context_lens + seq)
    block = look_up(table, split * BLOCK_N, table_width * BLOCK_SIZE, BLOCK_SIZE, BLOCK_N)
    splits = tl.maximum(tl.minimum(num_splits, tl.cdiv(context_len, split_keys)), 1)  # those that have work
    if split >= splits:
        return
    query_offset = token * query_stride + (head + row) * HEAD_DIM + column
    q = tl.load(query + query_offset, mask=(row < GROUP) & (column < HEAD_DIM), other=0.0)  # [GROUP_PAD, HEAD_PAD]
    acc, lse = quantized_online_softmax(
        q, k_values, v_values, k_scales, v_scales, table, block, split * BLOCK_N, splits * BLOCK_N, context_len,
        kv_head, slot_stride, scale_log2, KV_HEADS, HEAD_DIM, HEAD_PAD, GROUP_PAD, BLOCK_SIZE, BLOCK_N, PRECISION,
    )  # fmt: skip
    heads: tl.constexpr = KV_HEADS * GROUP
    write_result(
        acc, lse, out + (token * heads + head) * HEAD_DIM, partial_out, partial_lse,
        arrival_counters + seq * KV_HEADS + kv_head, seq * heads + head, split, splits, num_splits,
        GROUP, GROUP_PAD, ROWS, SPLITS_PAD, AHEAD, HEAD_DIM, HEAD_PAD,
    )  # fmt: skip


def choose_quantized_config(pairs: int, element_size: int) -> DecodeConfig | None:
    """Choose by what was tried on an H200 with 32 contexts of 4096; None is stage D's choice.

    The one configuration was the fastest with 14 heads of 64 (2 KV heads), and nearly so with 28 of 128 (4 KV heads).
    `pairs` is sequences × KV heads. Fewer than 64 were not tried; float32 has stage D's small tiles.
    """
    if pairs < 64 or element_size == 4:
        return None
    return DecodeConfig(64, num_warps=2, num_stages=3, programs_per_sm=4, min_splits=2)


def decode(
    query: Tensor,  # [tokens, heads, head_dim]
    k_cache: Quantized,
    v_cache: Quantized,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,  # [tokens, heads, head_dim], contiguous
    arrival_counters: Tensor,  # int32 [seqs * kv_heads] at least, zeros; left as zeros
    sm_count: int,
    config: DecodeConfig | None = None,
) -> None:
    """Write to `out` the attention of every sequence that has exactly one query; other rows are left alone."""
    tables, lengths, values = metadata.block_tables, metadata.context_lens, k_cache.values
    config = config or choose_quantized_config(len(lengths) * values.shape[2], query.element_size())
    plan = plan_decode(
        len(lengths), metadata.max_context_len, query.shape[1], *values.shape[1:], query.dtype, sm_count, config
    )
    partial_out, partial_lse = plan.make_partials(query.device)
    quantized_decode_kernel[plan.programs,](
        out, query, values, v_cache.values, k_cache.scales, v_cache.scales, tables, lengths, metadata.cu_seqlens_q,
        partial_out, partial_lse, arrival_counters, scale * LOG2_E, query.stride(0), values.stride(1), tables.stride(0),
        plan.num_splits, plan.split_keys, MIXED=metadata.max_query_len > 1, **plan.constants,
    )  # fmt: skip
