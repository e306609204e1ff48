"""Paged attention: every backend against a plain float64 computation, on the CPU, in Triton's interpreter and on a GPU.

Every slot of the pool that no sequence owns holds NaN, and in the interpreter so does all memory that nobody has
written (`guarded_memory` in `conftest.py`), so a kernel that reads too much shows it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from kernel_cases import CASE, CPU, CUDA, F32, HALVES, case, interpreted, on_a_gpu, relative_error
from no_gpu import PretendedDevice, compiled_for_hopper, recorded_launches

from stage_d_paged.attention import AttentionMetadata, BackendUnavailable, pick_backend
from stage_d_paged.attention.decode_plan import plan_decode

TOLERANCE = {F32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of ‖out − expected‖ / ‖expected‖

# query_lens, context_lens
BATCHES = {
    "decode": ([1, 1, 1, 1], [1, 15, 16, 17]),
    "decode with padding rows": ([1, 1, 1], [20, 0, 0]),
    "one long decode": ([1], [300]),
    "prefill": ([16, 1, 33], [16, 1, 33]),
    "prefill after a cached prefix": ([5, 16], [37, 64]),
    "mixed": ([7, 1, 1, 20, 1], [40, 33, 1, 20, 16]),
    "mixed with padding": ([3, 1, 0], [3, 0, 0]),
    "two queries each, with padding": ([2, 2], [3, 0]),
    "a recorded step's padding, longer than several tiles": ([70, 1, 900], [70, 9, 0]),
}


def make_batch(query_lens, context_lens, heads, kv_heads, head_dim, block_size, device=CPU, dtype=F32, window=0):
    """(query, k_cache, v_cache, metadata): shuffled blocks, NaN wherever no sequence has a key.

    With a window, blocks outside of it belong to no sequence: they hold NaN, or the table has no number for them.
    """
    generator = torch.Generator().manual_seed(len(query_lens) * 1000 + sum(context_lens))
    needed = [-(-length // block_size) for length in context_lens]
    pool = torch.full((2, 2 * sum(needed) + 1, block_size, kv_heads, head_dim), float("nan"))
    order = (torch.randperm(sum(needed), generator=generator) * 2 + 1).int()  # a block of NaN behind each one
    tables = torch.full((len(needed), max(needed) + 1), -1, dtype=torch.int32)
    for s, (length, count) in enumerate(zip(context_lens, needed, strict=True)):
        tables[s, :count], order = order[:count], order[count:]
        unseen = max(length - query_lens[s] + 1 - window, 0) // block_size if window else 0
        tables[s, :unseen] = NO_BLOCK
        for position in range(unseen * block_size, length):
            pool[:, tables[s, position // block_size], position % block_size] = torch.randn(
                2, kv_heads, head_dim, generator=generator
            )
    qkv = torch.empty(sum(query_lens), heads + 1, head_dim, dtype=dtype, device=device)
    qkv.copy_(torch.randn(qkv.shape, generator=generator))
    query = qkv[:, 1:]  # a view: tokens are further apart than their heads are wide
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32).to(device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        slot_mapping=torch.full((sum(query_lens),), -1, device=device),
        block_tables=tables.to(device),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    pool = pool.to(device, dtype)
    return query, pool[0], pool[1], metadata


def expected_attention(query, k_cache, v_cache, metadata, scale, window=0):
    """The definition, in float64: softmax(q·k * scale) · v over keys 0 … L - q + i, or the last `window` of these."""
    block_size, group = k_cache.shape[1], query.shape[1] // k_cache.shape[2]
    output = torch.zeros_like(query, dtype=torch.float64)
    starts = metadata.cu_seqlens_q.tolist()
    for s, length in enumerate(metadata.context_lens.tolist()):
        first, last = starts[s], starts[s + 1]
        if first == last or length == 0:
            continue
        blocks = metadata.block_tables[s, : -(-length // block_size)].long().clamp(min=0)
        keys = k_cache[blocks].flatten(0, 1)[:length].double().nan_to_num().repeat_interleave(group, 1)
        values = v_cache[blocks].flatten(0, 1)[:length].double().nan_to_num().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:last].double(), keys) * scale
        position = torch.arange(length - (last - first), length, device=query.device)
        key = torch.arange(length, device=query.device)[None]
        hidden = (key > position[:, None]) | (key <= position[:, None] - (window or length))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[first:last] = torch.einsum("hqk,khd->qhd", weights, values)
    return output


def check(backend, batch, scale=0.2, tolerance=None, window=0):
    query = batch[0]
    output, expected = backend.attend(*batch, scale, window), expected_attention(*batch, scale, window)
    assert output.shape == query.shape and output.dtype == query.dtype
    error = relative_error(output, expected)
    contexts = batch[3].context_lens.tolist()
    assert error < (tolerance or TOLERANCE[query.dtype]), f"relative error {error:.2e} with contexts of {contexts}"
    padding = expected.flatten(1).abs().sum(1) == 0
    assert output[padding].count_nonzero() == 0


NO_BLOCK = -(2**20)  # in a table, of what must not be read: far outside the pool
SMALL = [(4, 2, 16, 24), (7, 1, 24, 64), (3, 3, 20, 32), (3, 3, 64, 16)]  # heads, KV heads, head_dim, block size
LARGE = [(14, 2, 64, 16), (6, 3, 96, 48), (16, 8, 128, 64), (3, 3, 64, 128), (14, 2, 64, 256), (16, 8, 128, 256)]


def backend_or_skip(name, device, dtype, head_dim):
    try:
        return pick_backend(name, device, dtype, head_dim)
    except BackendUnavailable as error:
        if name == "flash" and "cannot be imported" in str(error):
            pytest.skip(str(error))
        raise


def edge_batches(block_size):
    """Lengths around the edges of blocks and of the kernels' tiles."""
    edges = [1, block_size - 1, block_size, block_size + 1, 2 * block_size, 63, 64, 65, 129, 300]
    yield [1] * len(edges), edges
    yield [64, 1, 33, block_size], [300, block_size, 33, block_size]
    yield [200, 2, 1], [2 * block_size + 200, 2, 700]


DEFINED = [
    *(case(("reference", shape)) for shape in SMALL),
    *interpreted(*(("triton", shape) for shape in SMALL[:3])),
    *on_a_gpu(*(("triton", shape) for shape in LARGE)),
    *on_a_gpu(*(("flash", shape) for shape in LARGE if shape[-1] == 256), dtypes=HALVES),
]


@pytest.mark.parametrize(CASE, DEFINED)
def test_a_backend_equals_the_definition(case, device, dtype):
    name, shape = case
    backend = backend_or_skip(name, device, dtype, head_dim=shape[2])
    for batch in [*BATCHES.values(), *(edge_batches(shape[-1]) if device == CUDA else ())]:
        check(backend, make_batch(*batch, *shape, device, dtype))
    assert name != "triton" or not backend.arrival_counters(1).any(), "the counters must be left as they were"


LONG = [([200], [300]), ([64, 1, 1, 30], [300, 129, 64, 30])]  # more keys than the kernels' tiles and any window here
WINDOWED = [
    *(case(("reference", shape)) for shape in SMALL),
    *interpreted(*(("triton", shape) for shape in SMALL[:3])),
    *on_a_gpu(*(("triton", shape) for shape in [*LARGE, (4, 1, 256, 16), (4, 1, 256, 64)])),
    # not flash-attn: its builds may ignore windows
]


@pytest.mark.parametrize("window", [7, 70, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 16))])
@pytest.mark.parametrize(CASE, WINDOWED)
def test_a_window_hides_what_lies_before_it_and_reads_no_block_of_it(case, device, dtype, window):
    name, shape = case
    backend = backend_or_skip(name, device, dtype, head_dim=shape[2])
    for batch in [*BATCHES.values(), *LONG, *(edge_batches(shape[-1]) if device == CUDA else ())]:
        check(backend, make_batch(*batch, *shape, device, dtype, window), window=window)


def test_flash_attention_is_refused_for_a_model_with_windows():
    cuda = torch.device("cuda")
    with pytest.raises(BackendUnavailable, match=r"attention_backend='flash' cannot be used: .*windows.*use 'triton'"):
        pick_backend("flash", cuda, torch.float16, 64, has_windows=True)


def test_a_window_is_split_as_a_context_of_its_length():
    plans = [
        plan_decode(1, length, 4, 64, 1, 256, torch.bfloat16, 132, None, window)
        for length, window in ((100_000, 0), (100_000, 512), (512 + 31, 0))
    ]
    assert plans[1].num_splits == plans[2].num_splits < plans[0].num_splits
    assert [plan.constants["WINDOW"] for plan in plans] == [0, 512, 0]


@pytest.mark.parametrize("name", [name for name in BATCHES if "padding" in name])
def test_reference_reads_no_table_of_a_row_without_context(name):
    batch = make_batch(*BATCHES[name], 4, 2, 64, 16)
    batch[3].block_tables[batch[3].context_lens == 0] = 2**30  # what a step before left there
    check(pick_backend("reference", CPU, F32, 64), batch)


@pytest.mark.parametrize(CASE, [case("reference"), *interpreted("triton"), *on_a_gpu("triton")])
def test_store_writes_its_slots_and_no_other(case, device, dtype):
    block_size, slots = 4, [5, -1, 0, 11, -1]
    key = torch.randn(len(slots), 6, 64, device=device).to(dtype)[:, :3]  # views, as of QKV
    value = torch.randn(len(slots), 9, 64, device=device).to(dtype)[:, 3:-3]
    k_cache, v_cache = (torch.empty(3, block_size, 3, 64, device=device, dtype=dtype).fill_(7.0) for _ in "kv")
    pick_backend(case, device, dtype, 64).store(key, value, k_cache, v_cache, torch.tensor(slots, device=device))
    for cache, new in ((k_cache.flatten(0, 1), key), (v_cache.flatten(0, 1), value)):
        for slot in range(3 * block_size):
            wanted = new[slots.index(slot)] if slot in slots else torch.full_like(new[0], 7.0)
            assert torch.equal(cache[slot], wanted)


def test_key_offsets_are_the_running_sum_of_the_contexts():
    metadata = make_batch([1, 1, 1], [4, 0, 9], 1, 1, 8, 16)[3]
    assert metadata.cu_seqlens_k.tolist() == [0, 4, 4, 13] and metadata.cu_seqlens_k.dtype == torch.int32


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "message"),
    [
        ("fast", CPU, F32, 64, "unknown; choose one of auto, reference, triton, flash"),
        ("flash", CPU, torch.float16, 64, "NVIDIA GPUs, not on cpu"),
        ("flash", CUDA, F32, 64, "float16 or bfloat16"),
        ("flash", CUDA, torch.float16, 100, "head_dim=100: checked"),
        ("triton", CPU, torch.float64, 64, "float64|TRITON_INTERPRET=1"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused(name, device, dtype, head_dim, message):
    with pytest.raises(ValueError, match=message):
        pick_backend(name, device, dtype, head_dim)


@pytest.mark.parametrize(("name", "package"), [("flash", "flash-attn"), ("triton", "triton")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    monkeypatch.delitem(sys.modules, "stage_d_paged.attention.triton_paged", raising=False)
    with pytest.raises(BackendUnavailable, match=f"pip install {package}"):
        pick_backend(name, CUDA if name == "flash" else CPU, torch.float16, 64)


def test_triton_kernels_are_right_in_the_interpreter(run_interpreted_tests):
    run_interpreted_tests(__file__)


@pytest.mark.interpreted
@pytest.mark.parametrize("shift", [-100.0, 100.0])
def test_scores_far_from_zero_neither_vanish_nor_overflow(shift):
    query, k_cache, v_cache, metadata = make_batch(*BATCHES["mixed"], 4, 2, 16, 16)
    k_cache += shift
    check(pick_backend("triton", CPU, F32, 16), (query.abs(), k_cache, v_cache, metadata), tolerance=1e-3)


@pytest.mark.interpreted
@pytest.mark.parametrize("shift", [0.0, 100.0, pytest.param(-100.0, marks=pytest.mark.slow)])
def test_splits_of_unequal_contexts_are_combined(shift):
    """19, 9, 5 and 1 splits: some programs have no work, and one combine needs more than one round of loads."""
    from stage_d_paged.attention.triton_decode import DecodeConfig, decode

    query, k_cache, v_cache, metadata = make_batch([1] * 4, [300, 130, 70, 0], 6, 2, 24, 16)
    k_cache += shift
    out, counters = torch.empty(4, 6, 24), torch.zeros(8, dtype=torch.int32)
    config = DecodeConfig(16, num_warps=4, num_stages=1, programs_per_sm=200, split_keys=16)
    arguments = query.abs(), k_cache, v_cache, metadata, 0.2
    decode(*arguments, out, counters, sm_count=1, config=config)
    assert relative_error(out, expected_attention(*arguments)) < (1e-3 if shift else TOLERANCE[F32])
    assert not out[3].any() and not counters.any()


@pytest.mark.interpreted
def test_triton_kernels_refuse_heads_that_they_cannot_read_and_half_precision_on_a_cpu():
    backend = pick_backend("triton", CPU, F32, 16)
    query, *others = make_batch([2], [4], 4, 3, 16, 16)
    with pytest.raises(ValueError, match="4 query heads: must be a multiple of the 3 KV heads"):
        backend.attend(query, *others, 0.1)
    with pytest.raises(ValueError, match="must be adjacent"):
        backend.attend(query[:, :3].transpose(0, 1).contiguous().transpose(0, 1), *others, 0.1)
    with pytest.raises(BackendUnavailable, match="float32"):
        pick_backend("triton", CPU, torch.bfloat16, 64)


@pytest.mark.interpreted
def test_the_backend_has_counters_for_any_batch():
    counters = pick_backend("triton", CPU, F32, 16).arrival_counters(70_000)
    assert len(counters) == 70_000 and not counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flash"])
def test_a_captured_decode_stays_right_when_lengths_and_blocks_change(name):
    backend = backend_or_skip(name, CUDA, torch.bfloat16, 64)
    shape = (14, 2, 64, 256, CUDA, torch.bfloat16)
    batches = [make_batch([1] * 4, lengths, *shape) for lengths in ([1500, 1, 0, 70], [3, 1400, 256, 0], [1536] * 4)]
    widest = max(batch[1].shape[0] for batch in batches)
    query, metadata = batches[0][0].clone(), batches[0][3]
    k_cache, v_cache = torch.zeros(2, widest, 256, 2, 64, device=CUDA, dtype=torch.bfloat16)
    tables = torch.full((4, 7), -1, dtype=torch.int32, device=CUDA)
    contexts = torch.zeros_like(metadata.context_lens)  # the tables name no block yet
    captured_metadata = AttentionMetadata(metadata.cu_seqlens_q, contexts, metadata.slot_mapping, tables, 1, 1536)
    backend.attend(query, k_cache, v_cache, captured_metadata, 0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = backend.attend(query, k_cache, v_cache, captured_metadata, 0.125)
    for new_query, new_k, new_v, new_metadata in batches:
        query.copy_(new_query)
        k_cache[: new_k.shape[0]].copy_(new_k)
        v_cache[: new_v.shape[0]].copy_(new_v)
        contexts.copy_(new_metadata.context_lens)
        tables[:, : new_metadata.block_tables.shape[1]].copy_(new_metadata.block_tables)
        graph.replay()
        expected = expected_attention(new_query, new_k, new_v, new_metadata, 0.125)
        assert relative_error(output, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_split_decode_gives_the_same_bits_every_time():
    backend = pick_backend("triton", CUDA, torch.bfloat16, 128)
    batch = make_batch([1] * 3, [900, 64, 321], 16, 8, 128, 64, CUDA, torch.bfloat16)
    first = backend.attend(*batch, 0.1)
    assert all(torch.equal(first, backend.attend(*batch, 0.1)) for _ in range(200))
    assert not backend.arrival_counters(1).any(), "the counters must be left as they were"


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 40])
def test_pool_of_more_than_2_to_the_31_elements(query_len):
    backend, block_size, kv_heads, head_dim = pick_backend("triton", CUDA, torch.bfloat16, 64), 16, 3, 64
    blocks = 2**31 // (block_size * kv_heads * head_dim) + 20
    k_cache, v_cache = (
        torch.empty(blocks, block_size, kv_heads, head_dim, dtype=torch.bfloat16, device=CUDA) for _ in "kv"
    )
    key, value = torch.randn(2, 100, kv_heads, head_dim, device=CUDA).bfloat16()
    table = torch.arange(blocks - 7, blocks, dtype=torch.int32, device=CUDA).flip(0)[None]
    position = torch.arange(100, device=CUDA)
    slots = table[0, position // block_size].long() * block_size + position % block_size
    backend.store(key, value, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], key) and torch.equal(v_cache.flatten(0, 1)[slots], value)
    starts, contexts = (torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([0, query_len], [100]))
    metadata = AttentionMetadata(starts, contexts, slots, table, query_len, 100)
    query = torch.randn(query_len, 6, head_dim, device=CUDA).bfloat16()
    check(backend, (query, k_cache, v_cache, metadata))


@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize(("gpu", "large"), [(80, False), (90, True), (100, True), (120, False)])
def test_large_prefill_tiles_are_for_gpus_with_the_shared_memory_for_them(gpu, large, monkeypatch):
    triton_prefill = pytest.importorskip("stage_d_paged.attention.triton_prefill")
    launches = recorded_launches(monkeypatch, triton_prefill, "_prefill_kernel")
    device = torch.device("cuda", gpu)
    with PretendedDevice(device):
        query = torch.empty(8192, 2, 128, dtype=torch.bfloat16, device=device)
        cache = torch.empty(8, 16, 2, 128, dtype=torch.bfloat16, device=device)
        lengths = torch.empty(1, dtype=torch.int32, device=device)
        metadata = AttentionMetadata(lengths, lengths, lengths, lengths[None], 8192, 8192)
        triton_prefill.prefill(query, cache, cache, metadata, 0.1, query)
    [launch] = launches
    tiles = launch.num_stages * 2 * launch.BLOCK_N * 128 * 2  # keys and values of one head, in bytes
    assert (tiles > 64 * 2**10) == large


LONG_PREFILL = {"tokens": 8192, "dtype": torch.bfloat16, "head_dim": 128, "block_size": 64, "window": 0}


@pytest.mark.usefixtures("pretended_gpus")
@pytest.mark.parametrize(
    ("gpu", "change", "wanted"),
    [
        (90, {}, "hopper_prefill_kernel"),
        (90, {"head_dim": 64, "block_size": 256}, "hopper_prefill_kernel"),
        (80, {}, "_prefill_kernel"),
        (100, {}, "_prefill_kernel"),
        (90, {"tokens": 1024}, "_prefill_kernel"),
        (90, {"dtype": F32}, "_prefill_kernel"),
        (90, {"head_dim": 96}, "_prefill_kernel"),
        (90, {"block_size": 16}, "_prefill_kernel"),
        (90, {"window": 100}, "_prefill_kernel"),
    ],
    ids=str,
)
def test_hopper_s_prefill_kernel_gets_what_it_can_compute(gpu, change, wanted, monkeypatch):
    triton_prefill = pytest.importorskip("stage_d_paged.attention.triton_prefill")
    from stage_d_paged.attention import hopper_prefill

    launches = recorded_launches(monkeypatch, triton_prefill, "_prefill_kernel")
    hopper_launches = recorded_launches(monkeypatch, hopper_prefill, "hopper_prefill_kernel")
    asked, device = {**LONG_PREFILL, **change}, torch.device("cuda", gpu)
    with PretendedDevice(device):
        query = torch.empty(asked["tokens"], 2, asked["head_dim"], dtype=asked["dtype"], device=device)
        cache = torch.empty(8, asked["block_size"], 2, asked["head_dim"], dtype=asked["dtype"], device=device)
        lengths = torch.empty(1, dtype=torch.int32, device=device)
        metadata = AttentionMetadata(lengths, lengths, lengths, lengths[None], 8192, 8192)
        triton_prefill.prefill(query, cache, cache, metadata, 0.1, query, window=asked["window"])
    assert [launch.kernel for launch in launches + hopper_launches] == [wanted]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in LARGE if shape[-1] % 64 == 0] + [(14, 2, 64, 64)], ids=str)
def test_hopper_s_prefill_kernel_equals_the_definition(shape, dtype, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for Hopper")
    from stage_d_paged.attention import hopper_prefill

    monkeypatch.setattr(hopper_prefill, "MIN_TOKENS", 0)
    backend = pick_backend("triton", CUDA, dtype, shape[2])
    for batch in [*BATCHES.values(), *LONG, *edge_batches(shape[-1])]:
        check(backend, make_batch(*batch, *shape, CUDA, dtype))


class Number(int):
    """An integer that a kernel's arithmetic can convert."""

    def to(self, _dtype):
        return self


class Array(NamedTuple):
    """Numbers in memory: `array + i` is an address."""

    values: list[int]
    first: int = 0

    def __add__(self, i):
        return Array(self.values, self.first + i)


@pytest.mark.parametrize("batch", [batch for batch in BATCHES.values() if len(batch[0]) > 1], ids=str)
def test_hopper_s_prefill_kernel_divides_every_batch_into_tiles_that_exist(batch, monkeypatch):
    """Run the kernel's arithmetic before its first copy, for every program."""
    hopper_prefill = pytest.importorskip("stage_d_paged.attention.hopper_prefill")
    query_lens, context_lens = batch
    begins = [sum(query_lens[:s]) for s in range(len(query_lens) + 1)]
    rows, group, block_n, seqs = 64, 2, 64, len(query_lens)
    tile = 2 * rows // group
    programs, placed, seen = begins[-1] // tile + seqs, [], Counter()
    gl = MagicMock(minimum=min, maximum=max, int64=None)
    gl.load = lambda address: Number(address.values[address.first])
    gl.where = lambda condition, yes, no: Number(yes if condition else no)
    gl.num_programs = lambda _axis: programs
    gl.warp_specialize = lambda parts, *_: placed.append(parts[0][1][4])
    for name in ("mbarrier", "fence_async_shared", "barrier"):
        monkeypatch.setattr(hopper_prefill, name, MagicMock())
    monkeypatch.setattr(hopper_prefill, "gl", gl)
    for program in range(programs):
        gl.program_id = lambda _axis, program=program: program
        hopper_prefill.hopper_prefill_kernel.fn(
            None, MagicMock(), None, None, 0, Array(context_lens), Array(begins), 1.0, 64, 8, seqs,
            1, group, 64, 64, block_n, 4, rows, 64, False, 104,
        )  # fmt: skip
        start, length, first, cached, context, _, unmasked, tiles = placed[-1]
        assert 0 <= unmasked <= tiles and tiles >= 1
        assert unmasked * block_n <= max(cached + first + 1, 0), "every key of an unmasked tile is seen by every query"
        if first < length:
            assert min(cached + first + tile, context) <= tiles * block_n, "the last query's keys are in a tile"
            seen.update(range(start + first, start + min(first + tile, length)))
    longer = [begins[s] + i for s, n in enumerate(query_lens) if n > 1 for i in range(n)]
    assert seen == Counter(longer), "each query of a prefill is in one program"


@pytest.mark.parametrize(("shape", "overlaps"), [((14, 2, 64), False), ((16, 8, 128), True)])
def test_hopper_s_prefill_kernel_computes_exponentials_while_a_product_runs(shape, overlaps):
    hopper_prefill = pytest.importorskip("stage_d_paged.attention.hopper_prefill")
    heads, kv_heads, head_dim = shape
    swizzled = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    pool = f"tensordesc<bf16[64, 64],{swizzled}>"
    types = dict.fromkeys(("out", "query"), "*bf16") | dict.fromkeys(("k_pool", "v_pool"), pool)
    types |= dict.fromkeys(("block_tables", "context_lens", "cu_seqlens_q"), "*i32") | {"scale_log2": "fp32"}
    types |= dict.fromkeys(("query_stride", "table_width", "num_seqs"), "i32")
    constants = {"KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": 64}
    config = hopper_prefill.CONFIGS[head_dim]
    constants |= {"BLOCK_N": config.block_n, "STAGES": config.num_stages, "ROWS": 64, "COPY": 64}
    constants |= {"OVERLAP": config.overlap, "REGISTERS": config.registers}
    options = {"num_warps": 4, "maxnreg": config.max_registers}
    ptx = compiled_for_hopper(hopper_prefill.hopper_prefill_kernel, types, constants, ("query_stride",), **options)
    meanwhile = re.findall(r"wait_group\S* 1;(.*?)wait_group\S* 0;", ptx, re.DOTALL)
    assert bool(meanwhile) == overlaps and all("ex2.approx" in part for part in meanwhile)


# (heads, KV heads, head_dim) -> sequences, context, splits
SPLITS = {
    (14, 2, 64): [(1, 64, 1), (1, 65, 2), (1, 100_000, 64), (8, 100_000, 64), (1024, 640, 2)],
    (16, 8, 128): [(1, 128, 2), (1, 4096, 64), (64, 4096, 2), (512, 4096, 1)],
}


@pytest.mark.parametrize(("shape", "case"), [(shape, row) for shape, rows in SPLITS.items() for row in rows], ids=str)
def test_a_context_is_split_until_the_gpu_is_full_but_not_finer_than_a_program_can_combine(shape, case):
    seqs, context_len, num_splits = case
    heads, kv_heads, head_dim = shape
    plan = plan_decode(seqs, context_len, heads, 64, kv_heads, head_dim, torch.bfloat16, sm_count=132)
    assert plan.num_splits == num_splits <= plan.constants["SPLITS_PAD"]
    assert plan.programs == seqs * kv_heads * num_splits
    assert plan.constants["GROUP_PAD"] == 16, "no smaller tile fits the tensor cores"
