"""Judges lab D. The Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import stage_d_paged.attention.reference as reference
import stage_d_paged.attention.triton_decode as triton_decode
import stage_d_paged.attention.triton_store as triton_store
import stage_d_paged.llm as stage
from labs.mutants import assert_catches
from labs.tests.support import check_whole_stage, completion_of, student_random
from labs.variants import shared_prefix
from stage_a_naive.contract.params import SamplingParams
from stage_d_paged import batch, block_manager, kv_cache, layers, model
from stage_d_paged import loop as stage_loop
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence

CPU = torch.device("cpu")


def sequence_of(tokens: list[int], table: list[int] = (), computed: int = 0) -> Sequence:
    sequence = Sequence(completion_of(list(tokens)))
    sequence.block_table = list(table)
    sequence.num_computed_tokens = computed
    return sequence


class TestVariant:
    """A shared beginning: whole blocks of equal tokens that the other has computed, and a token left to run."""

    @pytest.mark.parametrize(
        ("ids", "other_ids", "computed", "blocks"),
        [
            ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], 5, 1),
            ([1, 2, 3, 4], [1, 2, 3, 4], 4, 0),
            ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], 8, 1),
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], 8, 2),
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], 7, 1),
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 9, 5, 6, 7, 8], 8, 0),
            ([1, 2, 3, 4, 5], [7, 2, 3, 4, 5], 5, 0),
            ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 0),
        ],
        ids=str,
    )
    def test_so_many_blocks_are_shared(self, ids: list, other_ids: list, computed: int, blocks: int):
        sequence, other = stage_loop.Sequence(list(ids)), stage_loop.Sequence(list(other_ids))
        other.block_table, other.num_computed = [7, 3, 9], computed
        count = shared_prefix.share(sequence, other, 4)
        case = f"{ids} behind {other_ids}, {computed} of them computed, blocks of 4"
        assert count == blocks, f"{case}: {blocks} blocks are shared, got {count}"
        assert sequence.block_table == [7, 3, 9][:blocks], f"{case}: the table is {sequence.block_table}"
        assert sequence.num_computed == 4 * blocks, f"{case}: num_computed is {sequence.num_computed}"
        sequence.block_table.append(5)
        assert other.block_table == [7, 3, 9], "the other keeps a table of its own"

    def test_the_tutor_gives_the_same_answers_from_fewer_blocks(self):
        model, numbers = stage_loop.load(stage_loop.PagedAttention()), student_random()
        begin = [numbers.randrange(5, 300) for _ in range(40)]
        prompts = [begin + [numbers.randrange(5, 300) for _ in range(count)] for count in (9, 3, 20)]
        answers, held = [], []
        for way in (shared_prefix.share_nothing, shared_prefix.share):
            pool = stage_loop.Pool(model.config, 64, 16)
            answers.append(shared_prefix.generate(model, pool, prompts, -1, way))
            held.append(pool.held[-1])
        assert answers[0] == answers[1], "sharing must change no token"
        assert held[0] - held[1] == 4, f"two blocks of 40 tokens for two others: 4 fewer, got {held[0] - held[1]}"


class TestRotate:
    def test_each_pair_turns_by_its_angle(self):
        torch.manual_seed(0)
        x, angles = torch.randn(3, 2, 8), torch.randn(3, 4)
        cos, sin = angles.cos(), angles.sin()
        tables = torch.stack((cos, cos), 1).unsqueeze(1), torch.stack((-sin, sin), 1).unsqueeze(1)
        out = layers.rotate(x, *tables)
        assert out.shape == x.shape, f"[tokens, heads, head_dim] stays, got {list(out.shape)}"
        x1, x2 = x[..., :4], x[..., 4:]
        c, s = cos[:, None], sin[:, None]
        expected = torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)
        assert torch.allclose(out, expected, atol=1e-6), "(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), halves apart"

    def test_lengths_and_relative_angles_stay(self):
        x = torch.randn(2, 1, 8)
        angles = torch.tensor([[0.0] * 4, [1.0] * 4])
        cos, sin = angles.cos(), angles.sin()
        out = layers.rotate(x, torch.stack((cos, cos), 1).unsqueeze(1), torch.stack((-sin, sin), 1).unsqueeze(1))
        assert torch.allclose(out[0], x[0], atol=1e-6), "position 0 does not turn"
        assert torch.allclose(out.norm(dim=-1), x.norm(dim=-1), atol=1e-5), "a rotation keeps lengths"


class TestFlatBatch:
    def test_a_prefill_in_two_blocks_beside_a_decode(self):
        first = sequence_of([10, 11, 12, 13, 14, 15], table=[4, 1])
        second = sequence_of([20, 21, 22, 23], table=[2])
        out = batch.flat_batch([batch.Chunk(first, 0, 6), batch.Chunk(second, 3, 1)], 4, CPU)
        meta = out.metadata
        assert out.input_ids.tolist() == [10, 11, 12, 13, 14, 15, 23], f"got input_ids {out.input_ids.tolist()}"
        assert out.positions.tolist() == [0, 1, 2, 3, 4, 5, 3], f"got positions {out.positions.tolist()}"
        slots = meta.slot_mapping.tolist()
        assert slots == [16, 17, 18, 19, 4, 5, 11], f"position 5, block table [4, 1]: slot 1 * 4 + 1 = 5; got {slots}"
        assert meta.cu_seqlens_q.tolist() == [0, 6, 7], f"got cu_seqlens_q {meta.cu_seqlens_q.tolist()}"
        assert meta.context_lens.tolist() == [6, 4], f"the last tokens see 6 and 4, got {meta.context_lens.tolist()}"
        assert meta.block_tables.tolist() == [[4, 1], [2, -1]], f"got block_tables {meta.block_tables.tolist()}"
        assert (meta.max_query_len, meta.max_context_len) == (6, 6), "the longest chunk, and the longest context"
        assert out.last_rows.tolist() == [5, 6], f"the last tokens' rows are 5 and 6, got {out.last_rows.tolist()}"
        dtypes = (out.input_ids.dtype, meta.slot_mapping.dtype, meta.cu_seqlens_q.dtype, meta.block_tables.dtype)
        assert dtypes == (torch.int64, torch.int64, torch.int32, torch.int32), (
            f"input ids and slots are int64, cu_seqlens_q and block tables int32; got {dtypes}"
        )

    def test_a_chunk_starts_where_it_is_told_and_takes_no_block_too_many(self):
        sequence = sequence_of(list(range(12)), table=[3, 5, 0])
        out = batch.flat_batch([batch.Chunk(sequence, 4, 4)], 4, CPU)
        assert out.input_ids.tolist() == [4, 5, 6, 7]
        assert out.metadata.slot_mapping.tolist() == [20, 21, 22, 23], f"got {out.metadata.slot_mapping.tolist()}"
        assert out.metadata.context_lens.tolist() == [8], "the chunk's last token sees itself and what came before"
        assert out.metadata.block_tables.tolist() == [[3, 5]], "8 tokens take 2 blocks"
        assert out.last_rows.tolist() == [], "4 of its 12 tokens are left to run: nothing is sampled yet"

    def test_the_first_token_of_a_new_block(self):
        sequence = sequence_of(list(range(9)), table=[1, 0, 6])
        out = batch.flat_batch([batch.Chunk(sequence, 8, 1)], 4, CPU)
        assert out.metadata.slot_mapping.tolist() == [24], "token 8 with 4 a block is the first of its third block"

    def test_a_finished_sequence_keeps_its_row_and_touches_nothing(self):
        done, live = sequence_of([5, 6], table=[7]), sequence_of([1, 2, 3], table=[2])
        done.completion.finish("length")
        out = batch.flat_batch([batch.Chunk(done, 2, 1), batch.Chunk(live, 2, 1)], 4, CPU)
        meta = out.metadata
        assert len(out.input_ids) == 2, "its row stays: one row of padding"
        assert meta.slot_mapping.tolist() == [-1, 10], f"padding writes to slot -1, got {meta.slot_mapping.tolist()}"
        assert meta.context_lens.tolist() == [0, 3], f"padding sees no key, got {meta.context_lens.tolist()}"
        assert out.last_rows.tolist() == [1], f"only live sequences have a last row, got {out.last_rows.tolist()}"


def computed(manager: BlockManager, sequence: Sequence) -> Sequence:
    """Let a sequence's prompt be prefilled."""
    assert manager.allocate(sequence, len(sequence))
    sequence.num_computed_tokens = len(sequence)
    manager.index_computed(sequence)
    return sequence


class TestAllocate:
    def test_blocks_for_the_tokens_and_no_more(self):
        manager = BlockManager(10, 4, enable_prefix_caching=False)
        sequence = sequence_of(range(9))
        assert manager.allocate(sequence, 9) is True
        assert len(set(sequence.block_table)) == 3, f"9 tokens at 4 a block take 3 blocks, got {sequence.block_table}"
        assert manager.num_used == 3, f"these 3 are in use, got {manager.num_used}"
        assert manager.allocate(sequence, 12) is True and len(sequence.block_table) == 3, "token 12 still fits"
        assert manager.allocate(sequence, 13) is True and len(sequence.block_table) == 4, "token 13 takes a block"
        manager.check_invariants([sequence])

    def test_too_few_blocks_change_nothing(self):
        manager = BlockManager(3, 4, enable_prefix_caching=False)
        held, refused = sequence_of(range(8)), sequence_of(range(8))
        assert manager.allocate(held, 8)
        assert manager.allocate(refused, 8) is False, "2 blocks are wanted and 1 is free"
        assert refused.block_table == [] and manager.num_free == 1, "a refusal must leave everything as it was"
        manager.check_invariants([held])

    def test_the_watermark_stays_free(self):
        manager = BlockManager(5, 4, enable_prefix_caching=False)
        assert manager.allocate(sequence_of(range(12)), 12, watermark=3) is False, "3 + 3 blocks do not fit in 5"
        assert manager.allocate(sequence_of(range(8)), 8, watermark=3) is True, "2 + 3 do"

    def test_a_cached_prefix_is_shared(self):
        manager = BlockManager(10, 4)
        first = computed(manager, sequence_of(range(8)))
        second = sequence_of([*range(8), 50, 51])
        assert manager.allocate(second, 10)
        assert second.block_table[:2] == first.block_table, "both full blocks of the prefix are in the cache"
        assert (second.num_computed_tokens, second.num_cached_tokens) == (8, 8), "8 tokens need not run again"
        assert second.num_indexed_blocks == 2, "the cache knows these blocks already"
        assert manager.num_used == 3, f"3 distinct blocks are in use, got {manager.num_used}"
        manager.check_invariants([first, second])

    def test_a_cached_block_that_nobody_holds_leaves_the_free_list(self):
        manager = BlockManager(4, 4)
        first = computed(manager, sequence_of(range(8)))
        manager.free(first)
        second = sequence_of([*range(8), 9, 10])
        assert manager.allocate(second, 10)
        assert manager.num_used == 3, f"2 revived blocks and a fresh one are in use, got {manager.num_used}"
        manager.check_invariants([second])

    def test_revived_blocks_count_as_taken(self):
        manager = BlockManager(3, 4)
        manager.free(computed(manager, sequence_of(range(8))))
        wants_all = sequence_of([*range(8), *range(60, 68)])
        try:
            taken = manager.allocate(wants_all, 16)
        except KeyError:  # of the empty free list
            taken = "a fourth block taken of three"
        assert taken is False, f"2 cached blocks, both free, and 2 fresh ones are more than 3: False; got {taken}"
        assert manager.num_free == 3
        manager.check_invariants([])

    def test_the_cached_tokens_of_a_request_that_is_not_new_stay_as_they_were(self):
        manager = BlockManager(10, 4)
        first = computed(manager, sequence_of(range(9)))
        manager.free(first)
        first.completion.append(9)  # it has run
        assert manager.allocate(first, 10)
        assert (first.num_computed_tokens, first.num_cached_tokens) == (8, 0), "it found its own blocks, not somebody's"


class TestFindCached:
    def test_the_longest_prefix_of_full_blocks(self):
        manager = BlockManager(10, 4)
        first = computed(manager, sequence_of(range(11)))
        assert manager._find_cached(sequence_of([*range(11), 99])) == first.block_table[:2], "2 of its blocks are full"
        assert manager._find_cached(sequence_of([*range(4), 99, 98, 97, 96, 95])) == first.block_table[:1]
        assert manager._find_cached(sequence_of([99, *range(1, 11)])) == [], "another first token, another prefix"

    def test_the_last_token_always_runs(self):
        manager = BlockManager(10, 4)
        first = computed(manager, sequence_of(range(8)))
        found = manager._find_cached(sequence_of(range(8)))
        assert found == first.block_table[:1], f"8 tokens, all cached: the last must run for its logits, got {found}"

    def test_equal_blocks_after_different_prefixes_are_different(self):
        manager = BlockManager(10, 4)
        computed(manager, sequence_of([1, 2, 3, 4, 9, 9, 9, 9]))
        assert manager._find_cached(sequence_of([5, 6, 7, 8, 9, 9, 9, 9, 0])) == []

    def test_a_hash_is_only_a_hint(self, monkeypatch):
        monkeypatch.setattr(block_manager, "block_key", lambda parent_key, tokens: 7)  # every block has the same key
        manager = BlockManager(10, 4)
        computed(manager, sequence_of([1, 2, 3, 4, 9, 9, 9, 9]))
        found = manager._find_cached(sequence_of([5, 6, 7, 8, 9, 9, 9, 9, 0]))
        assert found == [], f"the tokens differ though the hashes are equal: nothing is cached, got blocks {found}"
        found = manager._find_cached(sequence_of([9, 9, 9, 9, 1, 2, 3, 4, 0]))
        assert found == [], f"equal tokens after another prefix are another block, got blocks {found}"

    def test_it_ends_at_the_first_gap(self):
        manager = BlockManager(3, 4)
        manager.free(computed(manager, sequence_of(range(12))))
        computed(manager, sequence_of(range(50, 54)))  # takes the block that was freed first: the last block's
        found = manager._find_cached(sequence_of(range(13)))
        assert len(found) == 2, f"blocks 0 and 1 are still there, got {len(found)} blocks"

    def test_switched_off_it_finds_nothing(self):
        manager = BlockManager(10, 4, enable_prefix_caching=False)
        computed(manager, sequence_of(range(8)))
        assert manager._find_cached(sequence_of(range(9))) == []


def pool_and_query(contexts: list[int], block: int, heads: int, kv_heads: int, head_dim: int, width: int):
    """A pool whose blocks are dealt out at random; unused places hold NaN, which nobody may read."""
    generator = torch.Generator().manual_seed(sum(contexts) + block)
    blocks = len(contexts) * width + 2
    k_cache, v_cache = (torch.randn(blocks, block, kv_heads, head_dim, generator=generator) for _ in range(2))
    order = torch.randperm(blocks, generator=generator).tolist()
    tables = torch.full((len(contexts), width), -1, dtype=torch.int32)
    for s, context in enumerate(contexts):
        blocks = [order.pop() for _ in range(-(-context // block))]
        tables[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        if context % block:
            k_cache[blocks[-1], context % block :] = torch.nan
            v_cache[blocks[-1], context % block :] = torch.nan
    for spare in order:
        k_cache[spare] = v_cache[spare] = torch.nan
    query = torch.randn(len(contexts), heads, head_dim, generator=generator)
    return query, k_cache, v_cache, torch.tensor(contexts, dtype=torch.int32), tables


def attend_by_hand(query, k_cache, v_cache, contexts, tables, scale) -> Tensor:
    out = torch.zeros_like(query)
    block, kv_heads = k_cache.shape[1:3]
    for s, context in enumerate(contexts.tolist()):
        slots = [(int(tables[s, i // block]), i % block) for i in range(context)]
        for head in range(query.shape[1] if context else 0):
            kv = head * kv_heads // query.shape[1]
            keys = torch.stack([k_cache[block, offset, kv] for block, offset in slots]).double()
            values = torch.stack([v_cache[block, offset, kv] for block, offset in slots]).double()
            out[s, head] = ((keys @ query[s, head].double() * scale).softmax(0) @ values).float()
    return out


class TestReferenceDecode:
    @pytest.mark.parametrize("block", [1, 4, 16])
    def test_it_reads_the_right_slots(self, block: int):
        inputs = pool_and_query([5, 1, 13, 8], block, heads=6, kv_heads=2, head_dim=8, width=-(-13 // block))
        out = reference._decode(*inputs, 0.3)
        assert out.shape == inputs[0].shape, f"[seqs, heads, head_dim] expected, got {list(out.shape)}"
        assert not out.isnan().any(), "a slot that nobody has written was read: mask by the context's length"
        assert torch.allclose(out, attend_by_hand(*inputs, 0.3), atol=1e-5), "wrong slots, wrong heads, or wrong scale"

    def test_a_padding_sequence_gets_zeros(self):
        inputs = pool_and_query([3, 0], 4, heads=2, kv_heads=2, head_dim=8, width=1)
        out = reference._decode(*inputs, 0.5)
        assert not out[1].any(), "a context of 0 sees no key: its output is zero"
        assert torch.allclose(out, attend_by_hand(*inputs, 0.5), atol=1e-5)


class TestStoreKernel:
    def test_rows_go_to_their_slots_and_minus_one_goes_nowhere(self):
        # 3 heads of 8: no power of two. Blocks before and behind the pool catch what goes astray.
        memory = torch.zeros(2, 6, 4, 3, 8)
        k_cache, v_cache = memory[0, 1:5], memory[1, 1:5]
        key, value = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
        slots = torch.tensor([9, -1, 0, 15, 4])
        triton_store.store(key, value, k_cache, v_cache, slots)
        expected_k, expected_v = torch.zeros(16, 3, 8), torch.zeros(16, 3, 8)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected_k[slot], expected_v[slot] = key[token], value[token]
        outside = memory[:, 0].any() or memory[:, 5].any()
        assert not outside, "written outside of the pool: slot -1 writes nothing, and a row has WIDTH numbers"
        assert torch.equal(k_cache.view(16, 3, 8), expected_k), "row t of key belongs at slot_mapping[t]; -1 is nowhere"
        assert torch.equal(v_cache.view(16, 3, 8), expected_v), "and so does row t of value"

    def test_tokens_need_not_lie_side_by_side(self):
        qkv = torch.randn(3, 6, 4)  # [tokens, heads + 2 kv_heads, head_dim]: keys and values are views into it
        key, value = qkv[:, 2:4], torch.randn(3, 9, 4)[:, 4:6]
        k_cache, v_cache = torch.zeros(2, 2, 2, 4), torch.zeros(2, 2, 2, 4)
        triton_store.store(key, value, k_cache, v_cache, torch.tensor([1, 3, 0]))
        assert torch.equal(k_cache.view(4, 2, 4)[[1, 3, 0]], key), "use key_stride from one token to the next"
        assert torch.equal(v_cache.view(4, 2, 4)[[1, 3, 0]], value), "use value_stride from one token to the next"

    def test_offsets_may_pass_two_to_the_31(self):
        # Slots 2^30 numbers apart: the third begins at 2^31. The memory between them is never touched.
        memory = torch.empty(2**31 + 64, dtype=torch.float16)
        k_cache, v_cache = (memory[at:].as_strided((3, 1, 1, 8), (2**30, 2**30, 8, 1)) for at in (0, 16))
        key, value = torch.randn(1, 1, 8, dtype=torch.float16), torch.randn(1, 1, 8, dtype=torch.float16)
        triton_store.store(key, value, k_cache, v_cache, torch.tensor([2]))
        assert torch.equal(k_cache[2, 0], key[0]), "the offset slot * slot_stride needs 64 bits"
        assert torch.equal(v_cache[2, 0], value[0]), "the values' offset needs 64 bits too"


@triton.jit
def _softmax_of_one_program(
    out,
    lse,
    query,
    k_cache,
    v_cache,
    table,
    first,
    step,
    context_len,
    slot_stride,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Call `online_softmax` for one group of 16 query heads and one KV head."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, HEAD_PAD)[None, :]
    q = tl.load(query + row * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)
    block = triton_decode.look_up(table, first, context_len, BLOCK_SIZE, BLOCK_N)
    values, log_sum = triton_decode.online_softmax(
        q,
        k_cache,
        v_cache,
        table,
        block,
        first,
        step,
        context_len,
        column,
        slot_stride,
        scale_log2,
        HEAD_DIM,
        HEAD_PAD,
        16,
        BLOCK_SIZE,
        BLOCK_N,
        "ieee",
    )
    tl.store(out + row * HEAD_PAD + column, values)
    tl.store(lse + tl.arange(0, 16), log_sum)


class TestOnlineSoftmax:
    """`online_softmax` by itself, one split of one context."""

    def attend(self, context: int, first: int = 0, step: int = 4, head_dim: int = 8, dtype=torch.float32):
        """Returns values and log2 of the sum: the function's, and in float64; tiles of 4 keys, blocks of 2."""
        torch.manual_seed(context + first)
        query = torch.randn(16, head_dim).to(dtype)
        k_cache, v_cache = (torch.full((12, 2, head_dim), torch.nan, dtype=dtype) for _ in range(2))
        keys, values = (torch.randn(context, head_dim).to(dtype) for _ in range(2))
        table = torch.tensor([7, 2, 11, 0, 5, 9, 1], dtype=torch.int32)
        for i in range(context):
            k_cache[table[i // 2], i % 2], v_cache[table[i // 2], i % 2] = keys[i], values[i]
        pad = 8 if head_dim <= 8 else 16
        out, lse = torch.full((16, pad), torch.nan), torch.full((16,), torch.nan)
        _softmax_of_one_program[(1,)](
            out,
            lse,
            query,
            k_cache,
            v_cache,
            table,
            first,
            step,
            context,
            head_dim,
            0.4 * 1.4426950408889634,
            HEAD_DIM=head_dim,
            HEAD_PAD=pad,
            BLOCK_SIZE=2,
            BLOCK_N=4,
        )
        mine = [i for start in range(first, context, step) for i in range(start, min(start + 4, context))]
        scores = query.double() @ keys[mine].double().T * 0.4
        expected = scores.softmax(-1) @ values[mine].double() if mine else torch.zeros(16, head_dim).double()
        return out[:, :head_dim].double(), lse.double(), expected, scores.logsumexp(-1) / math.log(2)

    def check(self, message: str, tolerance: float = 1e-5, **options: object) -> None:
        out, lse, expected, expected_lse = self.attend(**options)
        error = float((out - expected).abs().nan_to_num(torch.inf).max())
        assert error < tolerance, f"{message}: the largest error of the values is {error:.3g}, with {options}"
        assert torch.allclose(lse, expected_lse, atol=max(tolerance, 1e-4)), (
            f"{message}: log2 of the sum of all weights is {float(expected_lse[0]):.4f}, got {float(lse[0]):.4f}"
        )

    def test_step_1_one_full_tile(self):
        self.check("4 keys, one tile", context=4)

    def test_step_2_a_tile_that_the_context_does_not_fill(self):
        self.check("keys from the context's end on must be masked", context=3)
        self.check("columns from HEAD_DIM to HEAD_PAD must be masked", context=4, head_dim=6)

    def test_step_3_several_tiles(self):
        message = "each tile has its own block ids; sum and accumulator shrink when the maximum grows"
        self.check(message, context=13)

    def test_step_4_every_other_tile(self):
        self.check("tiles begin at first, first + step, …", context=13, first=4, step=8)
        out, lse, _, _ = self.attend(context=3, first=4)
        assert not out.any() and lse.isneginf().all(), f"no key: zeros and -inf, got {out[0, 0]} and {lse[0]}"

    def test_step_5_half_precision(self):
        self.check("keys and values in float16, sums in float32", tolerance=4e-3, context=13, dtype=torch.float16)

    def test_matrix_products_have_the_precision_that_was_asked_for(self, monkeypatch):
        seen, original = [], tl.core.dot

        def spy(*args, **kwargs):
            seen.append(kwargs.get("input_precision"))
            return original(*args, **kwargs)

        monkeypatch.setattr(tl, "dot", spy)
        self.attend(context=5)
        assert seen and set(seen) == {"ieee"}, f"tl.dot(…, input_precision=PRECISION) in every product, got {seen}"


class TestDecodeKernel:
    def attend(self, contexts: list[int], block: int, heads: int, kv_heads: int, head_dim: int, programs: int = 1):
        width = -(-max(contexts) // block)
        query, k_cache, v_cache, lens, tables = pool_and_query(contexts, block, heads, kv_heads, head_dim, width)
        meta = AttentionMetadata(
            cu_seqlens_q=torch.arange(len(contexts) + 1, dtype=torch.int32),
            context_lens=lens,
            slot_mapping=torch.zeros(len(contexts), dtype=torch.int64),
            block_tables=tables,
            max_query_len=1,
            max_context_len=max(contexts),
        )
        out, counters = torch.full_like(query, torch.nan), torch.zeros(64, dtype=torch.int32)
        config = triton_decode.DecodeConfig(16, num_warps=4, num_stages=1, programs_per_sm=programs, split_keys=16)
        triton_decode.decode(query, k_cache, v_cache, meta, 0.3, out, counters, sm_count=1, config=config)
        assert not counters.any(), "the counters of the splits must be zero again after the launch"
        return out, attend_by_hand(query, k_cache, v_cache, lens, tables, 0.3)

    @pytest.mark.parametrize("block", [4, 16])
    def test_one_split(self, block: int):
        out, expected = self.attend([7, 1, 15], block, heads=4, kv_heads=2, head_dim=16)
        assert not out.isnan().any(), "rows are missing, or keys past the context were used"
        assert torch.allclose(out, expected, atol=1e-4), f"largest error {float((out - expected).abs().max()):.3g}"

    def test_a_program_walks_over_several_blocks_of_keys(self):
        out, expected = self.attend([50, 7, 33], 4, heads=4, kv_heads=2, head_dim=16)
        assert torch.allclose(out, expected, atol=1e-4), "when the maximum grows, sum and accumulator must shrink"

    def test_head_sizes_that_are_no_power_of_two(self):
        out, expected = self.attend([9], 4, heads=3, kv_heads=1, head_dim=12)
        assert torch.allclose(out, expected, atol=1e-4), "columns from HEAD_DIM to HEAD_PAD must be masked"

    def test_a_long_context_is_split_and_combined(self):
        out, expected = self.attend([70, 20, 33], 16, heads=2, kv_heads=1, head_dim=16, programs=12)
        assert torch.allclose(out, expected, atol=1e-4), "begin at first, go on by step, return m + log2 l"

    def test_a_padding_sequence_gets_zeros(self):
        out, expected = self.attend([5, 0], 4, heads=2, kv_heads=2, head_dim=16)
        assert not out[1].any(), "no keys: zeros, not a division by zero"
        assert torch.allclose(out, expected, atol=1e-4)


class TestRMSNorm:
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = layers.RMSNorm(x.shape[-1], eps, x.dtype, CPU)
        norm.weight.copy_(weight)
        return norm(x)

    def test_it_is_x_over_the_root_of_the_mean_square(self):
        torch.manual_seed(0)
        x, weight = torch.randn(3, 10), torch.randn(10)
        expected = (x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()).float()
        error = float((self.norm(x, weight, 1e-5) - expected).abs().max())
        assert error < 1e-5, f"x / sqrt(mean(x²) + eps) * weight, row by row: the largest error is {error:.3g}"
        out = self.norm(torch.full((1, 4), 1e-3), torch.ones(4), 1e-2)
        assert abs(float(out[0, 0]) - 1e-3 / (1e-6 + 1e-2) ** 0.5) < 1e-5, f"eps is under the root, got {out[0, 0]}"

    def test_squares_are_added_up_in_float32(self):
        x = torch.full((1, 512), 300.0, dtype=torch.float16)  # 300² is more than float16 holds
        out = self.norm(x, torch.ones(512, dtype=torch.float16), 1e-6)
        assert out.dtype == torch.float16, f"the result has the dtype of x, got {out.dtype}"
        assert (out == 1).all(), f"512 numbers of 300 are 1 each after the norm, got {float(out[0, 0])}"


class TestDecoderLayer:
    def run(self, tokens: int, most_fused_rows: int = 0) -> tuple[Tensor, list[str]]:
        """The layer with blocks that are easy to follow: norms double, attention adds 3 x, the MLP adds 5 x."""
        calls: list[str] = []

        def block(name: str, factor: int):
            def forward(x: Tensor, residual: Tensor, *context: object) -> Tensor:
                calls.append(name)
                assert context == (("rotation", "cache", "metadata") if name == "attention" else ()), context
                return residual.add_(factor * x)

            return forward

        norm = SimpleNamespace(weight="norm weight", eps=1e-6)
        norm_call = type("Norm", (), {"__call__": lambda self, x: 2 * x, **vars(norm)})()
        mlp = type("MLP", (), {"__call__": lambda self, x, residual: block("mlp", 5)(x, residual)})()
        mlp.gate_up_proj = mlp.down_proj = SimpleNamespace(weight="matrix")
        layer = SimpleNamespace(
            input_layernorm=lambda x: 2 * x,
            self_attn=block("attention", 3),
            post_attention_layernorm=norm_call,
            mlp=mlp,
            most_fused_rows=most_fused_rows,
        )
        out = model.DecoderLayer.forward(layer, torch.ones(tokens, 4), "rotation", "cache", "metadata")
        return out, calls

    def test_attention_and_mlp_each_add_to_the_stream(self):
        out, calls = self.run(5)
        assert calls == ["attention", "mlp"], f"attention first, then the MLP, got {calls}"
        assert (out == 77).all(), f"1 + 3 * 2 = 7, then 7 + 5 * (2 * 7) = 77; got {float(out[0, 0])}"

    def test_few_tokens_take_the_fused_operator(self, monkeypatch):
        seen = []
        operators = SimpleNamespace(fused_swiglu_mlp=lambda *args: seen.append(args) or args[0] + 1)
        monkeypatch.setattr(torch.ops, "six_engines", operators, raising=False)
        out, calls = self.run(4, most_fused_rows=4)
        assert calls == ["attention"] and len(seen) == 1, f"up to 4 tokens take one operator, got {calls}"
        x, norm_weight, w_in, w_out, residual, eps, kernel = seen[0]
        assert (x == 7).all() and residual is x, "it reads the stream itself, and adds to it"
        assert (norm_weight, w_in, w_out, eps, kernel) == ("norm weight", "matrix", "matrix", 1e-6, "auto"), seen[0]
        assert (out == 8).all(), f"the operator's result is the layer's: 8, got {float(out[0, 0])}"


class TestPoolSize:
    def blocks(self, monkeypatch, *, total: int, free: int, before: int, peak: int, utilization: float) -> int:
        """`cuda_num_blocks` on a card of which the counts are these, in blocks of 10 bytes."""
        state = {"peak": before + 5_000, "running": 0}  # a peak of something earlier: it must be reset

        def synchronize(device=None) -> None:
            state.update(peak=max(state["peak"], state["running"]), running=0)

        fakes = {
            "synchronize": synchronize,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device=None: state.update(peak=before),
            "memory_allocated": lambda device=None: before,
            "max_memory_allocated": lambda device=None: state["peak"],
            "mem_get_info": lambda device=None: (free, total),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        return kv_cache.cuda_num_blocks(10, utilization, CPU, lambda: state.update(running=peak))

    def test_what_the_weights_and_the_largest_step_leave_of_the_share(self, monkeypatch):
        found = self.blocks(monkeypatch, total=10_000, free=9_000, before=1_000, peak=1_600, utilization=0.9)
        assert found == 740, f"10000 * 0.9 - 1600 = 7400 bytes are 740 blocks of 10, got {found}"

    def test_others_memory_counts_where_it_is_in_the_way(self, monkeypatch):
        found = self.blocks(monkeypatch, total=10_000, free=3_000, before=1_000, peak=1_600, utilization=0.5)
        assert found == 90, f"of 3000 free bytes half, less the step's own 600, are 900: 90 blocks, got {found}"

    def test_no_room_is_said_with_numbers(self, monkeypatch):
        with pytest.raises(MemoryError, match="no room for a single block"):
            self.blocks(monkeypatch, total=10_000, free=9_000, before=8_000, peak=8_999, utilization=0.9)


class TestBreakIt:
    def test_the_learners_test_tells_the_broken_engine_from_the_reference(self):
        assert_catches("d")


class TestWholeStage:
    def test_the_tutor_answers(self):
        alone = {"max_num_seqs": 1, "fused_mlp": "off"}
        uncached = {"enable_prefix_caching": False, "kvcache_block_size": 4}
        check_whole_stage(stage.LLM, {}, alone, uncached, num_kvcache_blocks=64)

    def test_the_same_question_twice_is_found_in_the_cache(self):
        llm = stage.LLM("tutor", device="cpu", num_kvcache_blocks=64, kvcache_block_size=4)
        params = SamplingParams(temperature=0.0, max_tokens=8)
        first, second = (llm.generate([list(range(5, 26))], params, use_tqdm=False)[0] for _ in range(2))
        cached = second["metrics"]["num_cached_tokens"]
        assert first["token_ids"] == second["token_ids"] and cached == 20, f"5 full blocks of 4 expected, got {cached}"
