"""Drives lab D. The Triton kernels run in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

import stage_d_paged.attention.reference as reference
import stage_d_paged.attention.triton_decode as triton_decode
import stage_d_paged.attention.triton_store as triton_store
import stage_d_paged.llm as stage
from labs.driving import close, error_of, numbers
from labs.tests.support import Values, completion_of, random_prompt, some, whole_stage
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
    """A shared beginning: whole blocks of equal tokens that the other has computed, and one token left to run."""

    def test_so_many_blocks_are_shared(self) -> Values:
        cases = [
            ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], 5),
            ([1, 2, 3, 4], [1, 2, 3, 4], 4),
            ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], 8),
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], 8),
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], 7),
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 9, 5, 6, 7, 8], 8),
            ([1, 2, 3, 4, 5], [7, 2, 3, 4, 5], 5),
            ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        ]
        for _ in range(20):
            same, rest = some(numbers.randint(0, 12), 1, 9), [some(numbers.randint(1, 6), 1, 9) for _ in range(2)]
            cases.append(([*same, *rest[0]], [*same, *rest[1]], numbers.randint(0, len(same) + len(rest[1]))))
        for ids, other_ids, computed in cases:
            sequence, other = stage_loop.Sequence(list(ids)), stage_loop.Sequence(list(other_ids))
            table = numbers.sample(range(50), -(-len(other_ids) // 4))
            other.block_table, other.num_computed = list(table), computed
            given = f"{ids} behind {other_ids}, {computed} of them computed, blocks of 4, the other's table {table}"
            yield f"{given}: blocks that are shared", shared_prefix.share(sequence, other, 4)
            yield f"{given}: the table", list(sequence.block_table)
            yield f"{given}: num_computed", sequence.num_computed
            sequence.block_table.append(5)
            yield f"{given}: the other keeps a separate table", other.block_table

    def test_the_tutor_gives_the_same_answers_from_fewer_blocks(self) -> Values:
        model, begin = stage_loop.load(stage_loop.PagedAttention()), random_prompt(40)
        prompts = [begin + random_prompt(count) for count in (9, 3, 20)]
        for way in (shared_prefix.share_nothing, shared_prefix.share):
            pool = stage_loop.Pool(model.config, 64, 16)
            yield f"{way.__name__}: tokens", shared_prefix.generate(model, pool, prompts, -1, way)
            yield f"{way.__name__}, 40 tokens in common: blocks held", pool.held[-1]


class TestRotate:
    def rotated(self, x: Tensor, angles: Tensor) -> object:
        cos, sin = angles.cos(), angles.sin()
        return close(
            layers.rotate(x, torch.stack((cos, cos), 1).unsqueeze(1), torch.stack((-sin, sin), 1).unsqueeze(1)), 1e-6
        )

    def test_each_pair_turns_by_its_angle(self) -> Values:
        yield (
            "[tokens, heads, head_dim]: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), halves apart",
            self.rotated(torch.randn(3, 2, 8), torch.randn(3, 4)),
        )

    def test_lengths_and_relative_angles_stay(self) -> Values:
        angles = torch.tensor([[0.0] * 4, [1.0] * 4])
        yield "position 0 does not turn, and a rotation keeps lengths", self.rotated(torch.randn(2, 1, 8), angles)


class TestFlatBatch:
    def found(self, given: str, chunks: list, block: int) -> Values:
        out = batch.flat_batch([batch.Chunk(*chunk) for chunk in chunks], block, CPU)
        meta = out.metadata
        yield f"{given}: input_ids", out.input_ids
        yield f"{given}: positions", out.positions
        yield f"{given}: slot_mapping, a token's block times the block size plus its place in it", meta.slot_mapping
        yield f"{given}: cu_seqlens_q", meta.cu_seqlens_q
        yield f"{given}: context_lens, what the last tokens see", meta.context_lens
        yield f"{given}: block_tables", meta.block_tables
        yield f"{given}: max_query_len and max_context_len", [meta.max_query_len, meta.max_context_len]
        yield f"{given}: last_rows, of those whose last token runs", out.last_rows

    def test_a_prefill_in_two_blocks_beside_a_decode(self) -> Values:
        first = sequence_of([10, 11, 12, 13, 14, 15], table=[4, 1])
        second = sequence_of([20, 21, 22, 23], table=[2])
        given = "6 tokens in blocks [4, 1] and token 3 of 4 in block [2], 4 per block"
        yield from self.found(given, [(first, 0, 6), (second, 3, 1)], 4)

    def test_a_chunk_starts_where_it_is_told_and_takes_no_block_too_many(self) -> Values:
        sequence = sequence_of(list(range(12)), table=[3, 5, 0])
        yield from self.found("tokens 4 to 7 of 12 in blocks [3, 5, 0], 4 per block", [(sequence, 4, 4)], 4)

    def test_the_first_token_of_a_new_block(self) -> Values:
        sequence = sequence_of(list(range(9)), table=[1, 0, 6])
        yield from self.found("token 8, the first of the third block of [1, 0, 6]", [(sequence, 8, 1)], 4)

    def test_a_finished_sequence_keeps_its_row_and_touches_nothing(self) -> Values:
        done, live = sequence_of([5, 6], table=[7]), sequence_of([1, 2, 3], table=[2])
        done.completion.finish("length")
        out = batch.flat_batch([batch.Chunk(done, 2, 1), batch.Chunk(live, 2, 1)], 4, CPU)
        yield "a finished sequence keeps its row, of padding: rows", len(out.input_ids)
        yield "padding writes to slot -1: slot_mapping", out.metadata.slot_mapping
        yield "padding sees no key: context_lens", out.metadata.context_lens
        yield "only live sequences have a last row", out.last_rows

    def test_random_chunks(self) -> Values:
        for _ in range(10):
            block, chunks, blocks = numbers.randint(2, 9), [], numbers.sample(range(100), 60)
            for _ in range(numbers.randint(1, 4)):
                length = numbers.randint(1, 20)
                start = numbers.randrange(length)
                table = [blocks.pop() for _ in range(-(-length // block))]
                chunks.append((sequence_of(some(length, 0, 99), table), start, numbers.randint(1, length - start)))
            given = [f"{count} from {start} on of {len(s)} in {s.block_table}" for s, start, count in chunks]
            yield from self.found(f"tokens {', '.join(given)}; {block} a block", chunks, block)


def computed(manager: BlockManager, sequence: Sequence) -> Sequence:
    """Let a sequence's prompt be prefilled."""
    assert manager.allocate(sequence, len(sequence)), f"{len(sequence)} tokens fit: allocate must return True"
    sequence.num_computed_tokens = len(sequence)
    manager.index_computed(sequence)
    return sequence


class TestAllocate:
    def test_blocks_for_the_tokens_and_no_more(self) -> Values:
        for size, counts in ((4, [9, 12, 13]), (numbers.randint(2, 6), sorted(some(3, 1, 30)))):
            manager, sequence = BlockManager(20, size, enable_prefix_caching=False), sequence_of(range(9))
            for count in counts:
                given = f"{count} tokens at {size} a block"
                yield f"{given}: allocate returns", manager.allocate(sequence, count)
                yield f"{given}: blocks of the sequence, each once", len(set(sequence.block_table))
                yield f"{given}: blocks in use", manager.num_used
            manager.check_invariants([sequence])

    def test_too_few_blocks_change_nothing(self) -> Values:
        manager = BlockManager(3, 4, enable_prefix_caching=False)
        held, refused = sequence_of(range(8)), sequence_of(range(8))
        yield "2 blocks of 3", manager.allocate(held, 8)
        yield "2 blocks are wanted and 1 is free", manager.allocate(refused, 8)
        yield "a refusal leaves everything as it was: table, free blocks", [refused.block_table, manager.num_free]
        manager.check_invariants([held])

    def test_the_watermark_stays_free(self) -> Values:
        for tokens in (12, 8, *some(5, 1, 20)):
            manager = BlockManager(5, 4, enable_prefix_caching=False)
            yield (
                f"{tokens} tokens in 5 blocks of 4 of which 3 stay free",
                manager.allocate(sequence_of(range(tokens)), tokens, watermark=3),
            )

    def test_a_cached_prefix_is_shared(self) -> Values:
        for common, size in ((8, 4), (numbers.randint(2, 30), numbers.randint(2, 6))):
            manager = BlockManager(40, size)
            first = computed(manager, sequence_of(range(common)))
            second = sequence_of([*range(common), 50, 51])
            given = f"{common} tokens in common, {size} a block"
            yield f"{given}: allocate returns", manager.allocate(second, common + 2)
            shared = [first.block_table.index(block) for block in second.block_table if block in first.block_table]
            yield f"{given}: blocks of the first that the second has", shared
            yield (
                f"{given}: num_computed_tokens, num_cached_tokens",
                [
                    second.num_computed_tokens,
                    second.num_cached_tokens,
                ],
            )
            yield f"{given}: num_indexed_blocks, that the cache knows already", second.num_indexed_blocks
            yield f"{given}: distinct blocks in use", manager.num_used
            manager.check_invariants([first, second])

    def test_a_cached_block_that_nobody_holds_leaves_the_free_list(self) -> Values:
        manager = BlockManager(4, 4)
        manager.free(computed(manager, sequence_of(range(8))))
        second = sequence_of([*range(8), 9, 10])
        yield "10 tokens, 2 blocks of them cached and free", manager.allocate(second, 10)
        yield "2 revived blocks and a fresh one are in use", manager.num_used
        manager.check_invariants([second])

    def test_revived_blocks_count_as_taken(self) -> Values:
        manager = BlockManager(3, 4)
        manager.free(computed(manager, sequence_of(range(8))))
        wants_all = sequence_of([*range(8), *range(60, 68)])
        try:
            taken = manager.allocate(wants_all, 16)
        except KeyError:  # of the empty free list
            taken = "a fourth block taken of three"
        yield "2 cached blocks, both free, and 2 fresh ones are more than 3", taken
        yield "free blocks afterwards", manager.num_free
        manager.check_invariants([])

    def test_the_cached_tokens_of_a_request_that_is_not_new_stay_as_they_were(self) -> Values:
        manager = BlockManager(10, 4)
        first = computed(manager, sequence_of(range(9)))
        manager.free(first)
        first.completion.append(9)  # it has run
        yield "10 tokens again", manager.allocate(first, 10)
        found = first.num_computed_tokens, first.num_cached_tokens
        yield "it found its own blocks, not somebody's: num_computed_tokens, num_cached_tokens", found

    def test_requests_that_come_and_go(self) -> Values:
        manager, running = BlockManager(40, 4), []
        for number in range(30):
            begin = [numbers.randint(1, 2)] * numbers.randint(0, 12)
            sequence = sequence_of([*begin, *some(numbers.randint(1, 9), 100, 10**6)])
            taken = manager.allocate(sequence, len(sequence), watermark=numbers.randint(0, 4))
            found = taken, sequence.num_computed_tokens, len(sequence.block_table), manager.num_used
            yield f"request {number}: taken, num_computed_tokens, blocks, blocks in use", found
            if taken:
                sequence.num_computed_tokens = len(sequence)
                manager.index_computed(sequence)
                running.append(sequence)
            manager.check_invariants(running)
            if len(running) > 4:
                manager.free(running.pop(numbers.randrange(4)))


class TestFindCached:
    def found(self, manager: BlockManager, first: Sequence, tokens: list[int]) -> list[int]:
        """Return the first sequence's blocks that are found for another one, by their index in its table."""
        blocks = manager._find_cached(sequence_of(tokens))
        return [first.block_table.index(block) if block in first.block_table else -1 for block in blocks]

    def test_the_longest_prefix_of_full_blocks(self) -> Values:
        manager = BlockManager(10, 4)
        first = computed(manager, sequence_of(range(11)))
        for tokens in ([*range(11), 99], [*range(4), 99, 98, 97, 96, 95], [99, *range(1, 11)]):
            yield f"0 to 10 are cached, 4 per block: of {tokens} the blocks", self.found(manager, first, tokens)

    def test_the_last_token_always_runs(self) -> Values:
        manager = BlockManager(10, 4)
        first = computed(manager, sequence_of(range(8)))
        yield "8 tokens, all cached: the last must run for its logits", self.found(manager, first, list(range(8)))

    def test_equal_blocks_after_different_prefixes_are_different(self) -> Values:
        manager = BlockManager(10, 4)
        first = computed(manager, sequence_of([1, 2, 3, 4, 9, 9, 9, 9]))
        yield "an equal block after another prefix", self.found(manager, first, [5, 6, 7, 8, 9, 9, 9, 9, 0])

    def test_random_beginnings(self) -> Values:
        for _ in range(20):
            size, known = numbers.randint(1, 4), some(numbers.randint(1, 14), 1, 2)
            manager = BlockManager(20, size)
            first = computed(manager, sequence_of(known))
            tokens = [*known[: numbers.randint(0, len(known))], *some(numbers.randint(1, 6), 1, 2)]
            yield f"{known} is cached, {size} a block: of {tokens} the blocks", self.found(manager, first, tokens)

    def test_a_hash_is_only_a_hint(self) -> Values:
        with patch.object(block_manager, "block_key", lambda parent_key, tokens: 7):  # every block has the same key
            manager = BlockManager(10, 4)
            first = computed(manager, sequence_of([1, 2, 3, 4, 9, 9, 9, 9]))
            found = [
                self.found(manager, first, tokens)
                for tokens in ([5, 6, 7, 8, 9, 9, 9, 9, 0], [9, 9, 9, 9, 1, 2, 3, 4, 0])
            ]
        yield "all hashes are equal: blocks for other tokens, and for equal tokens after another prefix", found

    def test_it_ends_at_the_first_gap(self) -> Values:
        manager = BlockManager(3, 4)
        manager.free(computed(manager, sequence_of(range(12))))
        computed(manager, sequence_of(range(50, 54)))  # takes the block that was freed first: the last block's
        yield (
            "of three blocks the last was taken by others: found are",
            len(manager._find_cached(sequence_of(range(13)))),
        )

    def test_switched_off_it_finds_nothing(self) -> Values:
        manager = BlockManager(10, 4, enable_prefix_caching=False)
        first = computed(manager, sequence_of(range(8)))
        yield "without a prefix cache", self.found(manager, first, list(range(9)))


def pool_and_query(contexts: list[int], block: int, heads: int, kv_heads: int, head_dim: int, width: int):
    """A pool with randomly assigned blocks; unused slots hold NaN, which must not be read."""
    blocks = len(contexts) * width + 2
    k_cache, v_cache = (torch.randn(blocks, block, kv_heads, head_dim) for _ in range(2))
    order = torch.randperm(blocks).tolist()
    tables = torch.full((len(contexts), width), -1, dtype=torch.int32)
    for s, context in enumerate(contexts):
        blocks = [order.pop() for _ in range(-(-context // block))]
        tables[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        if context % block:
            k_cache[blocks[-1], context % block :] = torch.nan
            v_cache[blocks[-1], context % block :] = torch.nan
    for spare in order:
        k_cache[spare] = v_cache[spare] = torch.nan
    query = torch.randn(len(contexts), heads, head_dim)
    return query, k_cache, v_cache, torch.tensor(contexts, dtype=torch.int32), tables


class TestReferenceDecode:
    def test_it_reads_the_right_slots(self) -> Values:
        for contexts, block in (([5, 1, 13, 8], 1), ([5, 1, 13, 8], 4), ([5, 1, 13, 8], 16), (some(3, 1, 20), 3)):
            width = -(-max(contexts) // block)
            out = reference._decode(*pool_and_query(contexts, block, 6, 2, 8, width), 0.3)
            yield (
                f"contexts {contexts}, {block} a block, 6 heads of 2 KV heads; NaN where nobody has written",
                close(out, 1e-5),
            )

    def test_a_padding_sequence_gets_zeros(self) -> Values:
        inputs = pool_and_query([3, 0], 4, heads=2, kv_heads=2, head_dim=8, width=1)
        yield "a context of 0 sees no key: its output is zero", close(reference._decode(*inputs, 0.5), 1e-5)


class TestStoreKernel:
    def test_rows_go_to_their_slots_and_minus_one_goes_nowhere(self) -> Values:
        # 3 heads of 8: no power of two. Blocks before and after the pool catch stray writes.
        for slots in ([9, -1, 0, 15, 4], [-1, *numbers.sample(range(16), 4)]):
            memory = torch.zeros(2, 6, 4, 3, 8)
            k_cache, v_cache = memory[0, 1:5], memory[1, 1:5]
            key, value = torch.randn(2, 5, 3, 8)
            triton_store.store(key, value, k_cache, v_cache, torch.tensor(slots))
            yield f"slots {slots}: written outside of the pool?", bool(memory[:, 0].any() or memory[:, 5].any())
            yield f"slots {slots}: row t of key belongs at slot_mapping[t]; -1 is nowhere", k_cache.view(16, 3, 8)
            yield f"slots {slots}: and so does row t of value", v_cache.view(16, 3, 8)

    def test_tokens_need_not_lie_side_by_side(self) -> Values:
        qkv = torch.randn(3, 6, 4)  # [tokens, heads + 2 kv_heads, head_dim]: keys and values are views into it
        k_cache, v_cache = torch.zeros(2, 2, 2, 2, 4)
        triton_store.store(qkv[:, 2:4], torch.randn(3, 9, 4)[:, 4:6], k_cache, v_cache, torch.tensor([1, 3, 0]))
        yield "use key_stride from one token to the next", k_cache
        yield "use value_stride from one token to the next", v_cache

    def test_offsets_may_pass_two_to_the_31(self) -> Values:
        # Slots 2^30 numbers apart: the third begins at 2^31. The memory between them is never touched.
        memory = torch.empty(2**31 + 64, dtype=torch.float16)
        k_cache, v_cache = (memory[at:].as_strided((3, 1, 1, 8), (2**30, 2**30, 8, 1)) for at in (0, 16))
        key, value = torch.randn(2, 1, 1, 8).half()
        triton_store.store(key, value, k_cache, v_cache, torch.tensor([2]))
        yield "the offset slot * slot_stride needs 64 bits", k_cache[2, 0]
        yield "the values' offset needs 64 bits too", v_cache[2, 0]


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
        """Returns values and log2 of the sum; tiles of 4 keys, blocks of 2."""
        query = torch.randn(16, head_dim).to(dtype)
        k_cache, v_cache = (torch.full((12, 2, head_dim), torch.nan, dtype=dtype) for _ in range(2))
        keys, values = torch.randn(2, context, head_dim).to(dtype)
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
        return out[:, :head_dim], lse

    def found(self, message: str, tolerance: float = 1e-5, **options: object) -> Values:
        out, lse = self.attend(**options)
        yield f"{message}: values, with {options}", close(out, tolerance)
        yield f"{message}: log2 of the sum of all weights, with {options}", close(lse, max(tolerance, 1e-4))

    def test_step_1_one_full_tile(self) -> Values:
        yield from self.found("4 keys, one tile", context=4)

    def test_step_2_a_tile_that_the_context_does_not_fill(self) -> Values:
        yield from self.found("keys from the context's end on must be masked", context=3)
        yield from self.found("columns from HEAD_DIM to HEAD_PAD must be masked", context=4, head_dim=6)

    def test_step_3_several_tiles(self) -> Values:
        message = "each tile has its own block ids; sum and accumulator shrink when the maximum grows"
        for context in (13, numbers.randint(5, 14)):
            yield from self.found(message, context=context)

    def test_step_4_every_other_tile(self) -> Values:
        yield from self.found("tiles begin at first, first + step, …", context=13, first=4, step=8)
        yield from self.found("no key: zeros and -inf", context=3, first=4)

    def test_step_5_half_precision(self) -> Values:
        message = "keys and values in float16, sums in float32"
        yield from self.found(message, tolerance=4e-3, context=13, dtype=torch.float16)

    def test_matrix_products_have_the_precision_that_was_asked_for(self) -> Values:
        seen, original = set(), tl.core.dot

        def spy(*args, **kwargs):
            seen.add(str(kwargs.get("input_precision")))
            return original(*args, **kwargs)

        with patch.object(tl, "dot", spy):
            self.attend(context=5)
        yield "tl.dot(…, input_precision=PRECISION) in every product", seen


class TestDecodeKernel:
    def found(
        self, given: str, contexts: list[int], block: int, heads: int, kv_heads: int, head_dim: int, programs: int = 1
    ) -> Values:
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
        yield f"{given}: contexts {contexts}, {block} a block, {heads} heads of {head_dim}", close(out)
        yield "counters of the splits that are not zero again after the launch", int(counters.count_nonzero())

    def test_one_split(self) -> Values:
        for block in (4, 16):
            yield from self.found("keys past the context must not be used", [7, 1, 15], block, 4, 2, 16)

    def test_a_program_walks_over_several_blocks_of_keys(self) -> Values:
        given = "when the maximum grows, sum and accumulator must shrink"
        yield from self.found(given, [50, 7, numbers.randint(20, 49)], 4, 4, 2, 16)

    def test_head_sizes_that_are_no_power_of_two(self) -> Values:
        yield from self.found("columns from HEAD_DIM to HEAD_PAD must be masked", [9], 4, 3, 1, 12)

    def test_a_long_context_is_split_and_combined(self) -> Values:
        given = "begin at first, go on by step, return m + log2 l"
        yield from self.found(given, [70, 20, 33], 16, 2, 1, 16, programs=12)

    def test_a_padding_sequence_gets_zeros(self) -> Values:
        yield from self.found("no keys: zeros, not a division by zero", [5, 0], 4, 2, 2, 16)


class TestRMSNorm:
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = layers.RMSNorm(x.shape[-1], eps, x.dtype, CPU)
        norm.weight.copy_(weight)
        return norm(x)

    def test_it_is_x_over_the_root_of_the_mean_square(self) -> Values:
        yield (
            "x / sqrt(mean(x²) + eps) * weight, row by row",
            close(self.norm(torch.randn(3, 10), torch.randn(10), 1e-5), 1e-5),
        )
        yield "eps is under the root", close(self.norm(torch.full((1, 4), 1e-3), torch.ones(4), 1e-2), 1e-5)

    def test_squares_are_added_up_in_float32(self) -> Values:
        x = torch.full((1, 512), 300.0, dtype=torch.float16)  # 300² is more than float16 holds
        yield "512 numbers of 300 in float16", self.norm(x, torch.ones(512, dtype=torch.float16), 1e-6)


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
        out = model.DecoderLayer.forward(layer, torch.randn(tokens, 4), "rotation", "cache", "metadata")
        return out, calls

    def test_attention_and_mlp_each_add_to_the_stream(self) -> Values:
        out, calls = self.run(5)
        yield "attention first, then the MLP", calls
        yield "norms double, attention adds 3 x, the MLP adds 5 x", out

    def test_few_tokens_take_the_fused_operator(self) -> Values:
        for tokens in (4, 5):
            seen = []
            operators = SimpleNamespace(fused_swiglu_mlp=lambda *args, seen=seen: seen.append(args) or args[0] + 1)
            with patch.object(torch.ops, "six_engines", operators, create=True):
                out, calls = self.run(tokens, most_fused_rows=4)
            yield f"{tokens} tokens, up to 4 take one operator: other blocks that run", calls
            yield f"{tokens} tokens: what comes out", out
            for x, norm_weight, w_in, w_out, residual, eps, kernel in seen:
                yield "the operator reads the stream itself", x
                yield "and adds to it", residual is x
                yield "weights, eps and kernel", [norm_weight, w_in, w_out, eps, kernel]


class TestPoolSize:
    def blocks(self, total: int, free: int, before: int, peak: int, utilization: float) -> int:
        """Call `cuda_num_blocks` on a card with these counts, in blocks of 10 bytes.

        `free` is the free memory after the step when the allocator's cache is empty; before the step it is more, and
        before the cache is emptied less.
        """
        state = {"peak": before + 5_000, "running": 0}  # a peak of something earlier: it must be reset
        state["free"] = free + 700

        def synchronize(device=None) -> None:
            state.update(peak=max(state["peak"], state["running"]), running=0)

        fakes = {
            "synchronize": synchronize,
            "empty_cache": lambda: state.update(free=max(state["free"], free)),
            "reset_peak_memory_stats": lambda device=None: state.update(peak=before),
            "memory_allocated": lambda device=None: before,
            "max_memory_allocated": lambda device=None: state["peak"],
            "mem_get_info": lambda device=None: (state["free"], total),
        }
        with patch.multiple(torch.cuda, **fakes):
            return kv_cache.cuda_num_blocks(10, utilization, CPU, lambda: state.update(running=peak, free=free - 300))

    def test_what_the_weights_and_the_largest_step_leave_of_the_share(self) -> Values:
        cases = [
            (10_000, 9_000, 1_000, 1_600, 0.9),
            (10_000, 3_000, 1_000, 1_600, 0.5),
            (10_000, 9_000, 8_000, 8_999, 0.9),
        ]
        for _ in range(10):
            before = numbers.randint(0, 3_000)
            cases.append(
                (
                    10_000,
                    numbers.randint(500, 9_000),
                    before,
                    before + numbers.randint(0, 900),
                    numbers.choice((0.5, 0.9)),
                )
            )
        for total, free, before, peak, share in cases:
            given = f"{total} bytes, {free} free, weights {before}, with a step {peak}, share {share}, blocks of 10"
            found: list[int] = []

            def count(found=found, numbers=(total, free, before, peak, share)) -> None:
                found.append(self.blocks(*numbers))

            yield (
                f"{given}: blocks, or an error where there is no room for one",
                error_of(count, MemoryError) or found[0],
            )


class TestWholeStage:
    def test_the_tutor_answers(self) -> Values:
        alone = {"max_num_seqs": 1, "fused_mlp": "off"}
        uncached = {"enable_prefix_caching": False, "kvcache_block_size": 4}
        yield from whole_stage(stage.LLM, {}, alone, uncached, num_kvcache_blocks=64)

    def test_the_same_question_twice_is_found_in_the_cache(self) -> Values:
        llm = stage.LLM("tutor", device="cpu", num_kvcache_blocks=64, kvcache_block_size=4)
        params, prompt = SamplingParams(temperature=0.0, max_tokens=8), random_prompt(21)
        for number in range(2):
            [output] = llm.generate([prompt], params, use_tqdm=False)
            yield f"21 tokens in blocks of 4, time {number}: answer", output["token_ids"]
            yield f"21 tokens in blocks of 4, time {number}: cached", output["metrics"]["num_cached_tokens"]
