"""Judges lab F. No GPU is needed: graphs are recorded by a stand-in, ranks are threads, Triton is interpreted."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

import stage_f_graph_tp.kernels.elementwise as elementwise
import stage_f_graph_tp.llm as stage
from labs import native
from labs.mutants import assert_catches
from labs.tests.support import check_whole_stage
from labs.variants import early_end
from stage_d_paged.layers import Embedding, Linear
from stage_f_graph_tp import cuda_graph
from stage_f_graph_tp.kernels import rank_sum, skinny_gemm
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.step_input import StepInput, StepShape, host_views
from stage_f_graph_tp.tensor_parallel import all_reduce, sharding

CPU = torch.device("cpu")


class TestVariant:
    """Steps that end early: none that a limit rules out, none left in flight, and those for nothing are counted."""

    @pytest.mark.parametrize("most_ahead", [0, 1, 3])
    @pytest.mark.parametrize(
        ("length", "max_tokens"), [(6, 50), (6, 6), (6, 7), (50, 8), (1, 5), (50, 1)], ids=lambda n: str(n)
    )
    def test_what_is_launched_and_what_for_nothing(self, most_ahead: int, length: int, max_tokens: int):
        launched, waited, most = [], [], 0

        def launch() -> Callable[[], int]:
            nonlocal most
            number = len(launched)
            launched.append(number)
            most = max(most, len(launched) - len(waited))
            return lambda: waited.append(number) or (0 if number + 2 >= length else number + 11)

        answer = [10 + i for i in range(length - 1)] + [0]
        expected = answer[:max_tokens]
        ids, unneeded = early_end.generate_ahead(most_ahead, launch, answer[0], 0, max_tokens)
        case = f"{most_ahead} ahead, an answer of {length} tokens, at most {max_tokens}"
        assert ids == expected, f"{case}: {expected} expected, got {ids}"
        assert waited == launched, f"{case}: {len(launched)} steps launched, {len(waited)} waited for, in {waited}"
        assert unneeded == len(launched) - len(expected) + 1, f"{case}: {unneeded} is not what was launched in vain"
        assert len(launched) < max_tokens, f"{case}: {len(launched)} steps launched; the first token needs none"
        wanted = min(most_ahead, max_tokens - len(expected)) if len(expected) > 1 else 0
        assert unneeded == wanted, f"{case}: {wanted} steps for nothing, got {unneeded}"
        if len(expected) > 1 + most_ahead:
            assert most == most_ahead + 1, f"{case}: up to {most_ahead + 1} in flight at once, got {most}"


class TestCaptureSizes:
    def test_small_sizes_close_together_then_every_sixteen(self):
        expected = [1, 2, 4, 8, 16, 32, 48, 64]
        assert cuda_graph.capture_sizes(64) == expected, (
            f"capture_sizes(64) is {expected}, got {cuda_graph.capture_sizes(64)}"
        )

    @pytest.mark.parametrize("most", [1, 2, 3, 5, 12, 20, 100, 512])
    def test_it_ends_with_the_largest_size_and_has_no_size_twice(self, most: int):
        sizes = cuda_graph.capture_sizes(most)
        assert sizes[-1] == most, f"{most} requests must have a graph of their size, got {sizes}"
        assert sizes == sorted(set(sizes)), f"ascending, and each once: got {sizes}"
        assert sizes[0] == 1, "one request alone is the most common case"

    def test_it_stops_at_512(self):
        assert cuda_graph.capture_sizes(1000)[-1] == 512, "above 512 sequences the model runs eagerly"


def graphs_of(*sizes: int) -> cuda_graph.DecodeGraphs:
    return cuda_graph.DecodeGraphs(list(sizes), table_width=5, max_model_len=20, padding_slot=99)


def shape_of(num_seqs: int, num_decodes: int | None = None) -> StepShape:
    """A step's shape; with fewer decodes than sequences, the others are prompts of 3 tokens."""
    decodes = num_seqs if num_decodes is None else num_decodes
    tokens = decodes + 3 * (num_seqs - decodes)
    return StepShape(tokens, num_seqs, num_seqs, 2, decodes, 1 if decodes == num_seqs else 3, 8)


class TestPadded:
    @pytest.mark.parametrize("num_seqs, size", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
    def test_the_smallest_size_that_is_large_enough(self, num_seqs: int, size: int):
        found = graphs_of(1, 2, 4, 8).takes(shape_of(num_seqs))
        assert found.num_seqs == size, f"{num_seqs} decodes run in the graph of {size}, got {found.num_seqs}"
        assert found.table_width == 5 and found.max_context_len == 20, "the recorded shape, with its table and lengths"

    def test_other_steps_are_not_taken(self):
        graphs = graphs_of(1, 2, 4, 8)
        for shape in (shape_of(9), shape_of(3, num_decodes=2), shape_of(1, num_decodes=0)):
            assert graphs.takes(shape) is None, f"no graph serves {shape}: too many sequences, or a prefill"
        assert graphs.takes(shape_of(3)._replace(source=1)) is None, "its tokens come from elsewhere"


class TestCapture:
    def test_every_size_is_recorded_the_largest_first(self):
        graphs, recorded = graphs_of(1, 2, 4), []

        def record(body: Callable[[], Tensor]) -> cuda_graph.Recorded:
            recorded.append(body())
            return cuda_graph.Recorded(lambda: None, recorded[-1])

        def body_of(shape: StepShape) -> Callable[[], Tensor]:
            return lambda: torch.full((shape.num_seqs,), shape.num_seqs)

        graphs.capture(record, body_of, CPU)
        order = [len(ids) for ids in recorded]
        assert order == [4, 2, 1], f"the largest first, so that the smaller ones fit into its memory; got {order}"
        for size in (1, 2, 4):
            shape = graphs.takes(shape_of(size))
            assert shape in graphs._recorded, f"size {size} cannot be found"
            assert graphs._recorded[shape].result.tolist() == [size] * size, f"size {size} finds another size's graph"
        assert graphs.num_bytes == 0, "on a CPU no device memory was taken"

    def test_the_bytes_are_those_that_the_graphs_took(self, monkeypatch):
        used = iter([1000, 1700])
        monkeypatch.setattr(cuda_graph, "_used_bytes", lambda device: next(used))
        graphs = graphs_of(1)
        graphs.capture(lambda body: cuda_graph.Recorded(lambda: None, body()), lambda shape: lambda: None, CPU)
        assert graphs.num_bytes == 700, f"1000 bytes before and 1700 after are 700, got {graphs.num_bytes}"


class TestPad:
    def padded(self, size: int, count: int) -> StepInput:
        """All arrays of a graph's input, filled with old values, then padded after `count` rows."""
        shape = StepShape(size, size, size, 5, size, 1, 20)
        host = host_views(np.zeros(shape.num_bytes, np.uint8), shape)
        for array in (*host._replace(sampling=host.sampling.rules), *host.sampling):
            array.fill(3)
        graphs_of(size).pad(host, shape_of(count))
        return host

    def test_padding_rows_read_and_write_no_key(self):
        host = self.padded(4, 3)
        assert host.context_lens[3] == 0, f"a context of 0 reads no key, got {host.context_lens[3]}"
        assert host.slot_mapping[3] == -1, f"slot -1 writes no key, got {host.slot_mapping[3]}"
        assert (host.block_tables[3] == -1).all(), "no block of an older step may stay in the block table"

    def test_their_token_goes_to_the_padding_slot_and_is_a_valid_one(self):
        host = self.padded(4, 2)
        assert host.batch_slots[2:].tolist() == host.sample_slots[2:].tolist() == [99, 99], (
            "batch slot 99 belongs to no sequence"
        )
        # What an older step left there is a valid token and a valid position, and so is 0.
        for name in ("input_ids", "positions", "sample_tokens"):
            ids = getattr(host, name)[2:]
            assert ((ids >= 0) & (ids < 20)).all(), f"{name} must stay valid numbers, got {ids.tolist()}"

    def test_every_row_is_a_sequence_of_one_token(self):
        host = self.padded(4, 1)
        starts = host.cu_seqlens_q.tolist()
        assert starts == [0, 1, 2, 3, 4], f"all rows have one query: cu_seqlens_q counts up by one, got {starts}"

    def test_the_other_rows_stay_as_they_are(self):
        host = self.padded(4, 3)
        arrays = host._asdict() | host.sampling._asdict()
        changed = [name for name in set(arrays) - {"cu_seqlens_q", "sampling"} if (arrays[name][:3] != 3).any()]
        assert not changed, f"the step fills in the first 3 rows itself, but these were changed: {sorted(changed)}"

    def test_a_full_batch_has_no_padding(self):
        host = self.padded(4, 4)
        assert (host.slot_mapping == 3).all() and (host.context_lens == 3).all()


class ThreadGroup:
    """A rank among threads, with the collectives of `RankGroup`."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list) -> None:
        self.rank, self.size, self.device = rank, size, CPU
        self._barrier, self._shared = barrier, shared

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self._shared[self.rank] = x.clone()
        self._barrier.wait(10)
        total = sum(self._shared)
        self._barrier.wait(10)
        return x.copy_(total) if residual is None else residual.add_(total)


def on_ranks(size: int, work: Callable[[ThreadGroup], Tensor]) -> list[Tensor]:
    """What each rank's `work` returns; the first error of any."""
    barrier, shared = threading.Barrier(size), [None] * size
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, barrier, shared))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results if isinstance(r, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        if isinstance(error, threading.BrokenBarrierError):
            raise AssertionError("a rank waited alone: every rank must enter the same collectives")
        raise error
    return results


class TestRowParallel:
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_the_ranks_sum_is_the_whole_product_and_the_residual_counts_once(self, size: int):
        torch.manual_seed(0)
        weight, x, residual = torch.randn(6, 8), torch.randn(3, 8), torch.randn(3, 6)

        def work(group: ThreadGroup) -> Tensor:
            own = slice(group.rank * 8 // size, (group.rank + 1) * 8 // size)
            columns = Linear(8 // size, {"o_proj": 6}, False, torch.float32, CPU)
            columns.weight.copy_(weight[:, own])
            return sharding.RowParallelLinear(columns, group)(x[:, own].contiguous(), residual.clone())

        for rank, out in enumerate(on_ranks(size, work)):
            assert out.shape == (3, 6), f"[tokens, out] on every rank, got {list(out.shape)}"
            product = x @ weight.T
            times = float(((out - product) * residual).sum() / (residual * residual).sum())
            assert abs(times - 1) < 1e-3, f"the residual is in the result {times:.2f} times, on {size} ranks"
            assert torch.allclose(out, product + residual, atol=1e-5), f"rank {rank} of {size} has another result"


class TestVocabParallel:
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_every_rank_gets_every_row(self, size: int):
        torch.manual_seed(0)
        table, ids = torch.randn(10, 4), torch.tensor([0, 9, 4, 5, 2, 2, 7])

        def work(group: ThreadGroup) -> Tensor:
            share = -(-10 // size)
            rows = Embedding(share, 4, torch.float32, CPU)
            rows.weight.copy_(F.pad(table, (0, 0, 0, share * size - 10))[group.rank * share :][:share])
            embedding = sharding.VocabParallelEmbedding(rows, 10, group)
            mine = ids.clone()
            out = embedding(mine)
            assert torch.equal(mine, ids), "the ids that were given must not be changed: the step needs them"
            return out

        for rank, out in enumerate(on_ranks(size, work)):
            assert out.shape == (7, 4)
            assert torch.allclose(out, table[ids]), f"rank {rank} of {size}: zeros for ids of others, then the sum"


class TestKeep:
    @pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0], [3]])
    def test_a_token_is_where_the_next_step_of_its_sequence_reads_it(self, slots):
        tokens = LastTokens(4, CPU)
        tokens.by_slot.copy_(torch.arange(90, 95))
        address = tokens.by_slot.data_ptr()
        ids = torch.arange(len(slots)) + 7
        inputs = SimpleNamespace(sample_slots=torch.tensor([*slots, 4]))  # and a row of padding
        kept = tokens.keep(ids, inputs, None)
        expected = [90, 91, 92, 93, 94]
        for slot, token in zip(slots, ids.tolist(), strict=True):
            expected[slot] = token
        found = tokens.by_slot.tolist()
        assert found == expected, f"slots {slots}: {expected}, got {found}"
        assert tokens.by_slot.data_ptr() == address, "write into by_slot itself: a recorded step reads that memory"
        assert kept.tolist() == ids.tolist(), "the host sees the same tokens"


class TestSiluAndMultiply:
    @pytest.mark.parametrize("inter", [8, 13, 1500])
    def test_it_is_silu_of_gate_times_up(self, inter: int):
        torch.manual_seed(0)
        gate_up = torch.randn(3, 2 * inter)
        out = elementwise.silu_and_multiply(gate_up)
        gate, up = gate_up.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        assert out.shape == (3, inter), f"[tokens, intermediate] expected, got {list(out.shape)}"
        assert torch.allclose(out, expected, atol=1e-5), f"with {inter} columns: silu(first half) * second half, masked"

    def test_it_computes_in_float32(self):
        torch.manual_seed(0)
        gate_up = (torch.randn(4, 2 * 500) * 3).half()
        gate, up = gate_up.float().chunk(2, -1)
        expected = (torch.nn.functional.silu(gate) * up).half()
        wrong = int((elementwise.silu_and_multiply(gate_up) != expected).sum())
        assert wrong <= 10, f"{wrong} of 2000 float16 results are not the rounded float32 result: convert before silu"

    def test_rows_that_were_not_normalised_are_scaled(self):
        torch.manual_seed(0)
        x, weight = torch.randn(3, 24), torch.randn(2 * 13, 24)
        out = elementwise.silu_and_multiply(x @ weight.T, elementwise.Rows(x, 1e-6))
        gate, up = (F.rms_norm(x, (24,), eps=1e-6) @ weight.T).chunk(2, -1)
        error = float((out - F.silu(gate) * up).abs().nan_to_num(torch.inf).max())
        assert error < 1e-3, f"product of rows that are not normalised: largest error {error:.3g}; scale gate and up"


class TestSkinnyGemm:
    @pytest.mark.parametrize("hidden, inter, tokens", [(32, 16, 1), (48, 24, 5), (40, 20, 17), (600, 12, 3)])
    def test_gate_and_up_of_the_same_neurons_come_from_one_tile(self, hidden: int, inter: int, tokens: int):
        torch.manual_seed(0)
        x, weight = torch.randn(tokens, hidden), torch.randn(2 * inter, hidden)
        out = skinny_gemm.gate_up_silu(skinny_gemm.sum_squares(x), 1e-6, weight, skinny_gemm.Tiles(8))
        normalised = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        gate, up = (normalised @ weight.T).chunk(2, -1)
        error = float((out - F.silu(gate) * up).abs().nan_to_num(torch.inf).max())
        assert error < 1e-3, (
            f"rows first + i and first + i + distance of the weight, times the tokens: largest error {error:.3g} with "
            f"{tokens} tokens, {hidden} columns, {inter} pairs"
        )


class TestRankSum:
    """Two ranks are two processes with mailboxes that both can write."""

    slice_bytes = 32

    def sums(self, monkeypatch, calls: list[tuple[int, torch.dtype, bool]], slow: int, first_call: int) -> list:
        """What each rank has after each call; rank `slow` looks into its mailbox when the other can go no further."""
        monkeypatch.setattr(rank_sum, "SPINS", tl.constexpr(4))
        size = 2 * 2 * rank_sum.PROGRAMS.value * rank_sum.SLOT.value
        shared = [torch.frombuffer(mmap.mmap(-1, size + 64 * len(calls) * 4), dtype=torch.uint8) for _ in range(2)]
        for memory in shared:
            memory[:size] = 255
        looks = torch.frombuffer(mmap.mmap(-1, 16), dtype=torch.int64)  # [2]: how often each rank has looked
        ended = 2**62
        children = [os.fork() for _ in range(1)]
        rank = 0 if children[0] else 1
        original, until = rank_sum._look, time.monotonic() + 20

        def look(*places):
            assert time.monotonic() < until, "a rank waits for a part that nobody sends, or that was overwritten"
            looks[rank] += 1
            if rank == slow:
                # Six looks later, the other rank has all parts of this call, has sent the next one, and waits again.
                enough, deadline = min(int(looks[1 - rank]) + 6, ended), time.monotonic() + 1
                while int(looks[1 - rank]) < enough and time.monotonic() < deadline:
                    time.sleep(0.0001)
            return original(*places)

        monkeypatch.setattr(rank_sum, "_look", look)
        try:
            self.run(rank, calls, shared, size, first_call)
        finally:
            looks[rank] = ended  # nobody waits for this rank any more
            if rank == 1:
                os._exit(0)
        deadline = time.monotonic() + 20
        while not os.waitpid(children[0], os.WNOHANG)[0]:
            assert time.monotonic() < deadline, "rank 1 did not end: it waits for a part that nobody sends"
            time.sleep(0.01)
        results = [memory[size:].view(torch.float32).view(len(calls), 64) for memory in shared]
        return [[result[i, :count] for i, (count, _, _) in enumerate(calls)] for result in results]

    def run(self, rank: int, calls: list, shared: list, size: int, first_call: int) -> None:
        counts = torch.full((rank_sum.PROGRAMS.value,), first_call, dtype=torch.int32)
        stop, note = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
        peers = torch.tensor([tensor.data_ptr() for tensor in (*shared, counts, stop, note)])
        for i, (count, dtype, onto) in enumerate(calls):
            x = self.values(rank, i, count).to(dtype)
            out = torch.ones(count, dtype=dtype) if onto else x
            all_reduce._all_reduce_kernel[(-(-x.nbytes // self.slice_bytes),)](
                x,
                out,
                peers,
                count,
                RANK=rank,
                RANKS=2,
                BLOCK=self.slice_bytes // x.element_size(),
                ONTO=onto,
                PDL=False,
            )
            shared[rank][size:].view(torch.float32).view(len(calls), 64)[i, :count] = out.float()

    @staticmethod
    def values(rank: int, call: int, count: int) -> Tensor:
        return torch.randint(-8, 8, (count,), generator=torch.Generator().manual_seed(10 * call + rank))

    @pytest.mark.parametrize("slow", [0, 1])
    def test_both_ranks_get_every_sum(self, slow: int, monkeypatch):
        single, half = torch.float32, torch.float16
        calls = [(24, single, False), (5, single, True), (40, half, False), (9, half, True)] * 3
        first = 2**31 - 4  # the numbers of the calls run over
        for rank, results in enumerate(self.sums(monkeypatch, calls, slow, first)):
            for i, (count, dtype, onto) in enumerate(calls):
                expected = (self.values(0, i, count) + self.values(1, i, count) + onto).float()
                assert torch.equal(results[i], expected), (
                    f"call {i} of {count} {dtype}, {'added to a residual' if onto else 'in place'}: rank {rank} has "
                    f"{results[i][:4].tolist()}…, expected {expected[:4].tolist()}…"
                )

    def alone(
        self, monkeypatch, ranks: int, x: Tensor, stop: int = 0, note: int = 0, zeros: bool = False
    ) -> tuple[int, int, int]:
        """One call of rank 0, whom nobody answers: how often it looked, the number of calls after it, the note.

        With `zeros`, they are there from every other rank before the call.
        """
        monkeypatch.setattr(rank_sum, "SPINS", tl.constexpr(4))
        original, looks, sent = rank_sum._look, [], x[:4].tolist()

        def look(*places):
            looks.append(places)
            if len(looks) > 100:
                pytest.fail(f"still waits after 100 looks; ranks: {ranks}, stop word: {stop}, numbers sent: {sent}")
            return original(*places)

        monkeypatch.setattr(rank_sum, "_look", look)
        size = 2 * ranks * rank_sum.PROGRAMS.value * rank_sum.SLOT.value
        mailboxes = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(ranks)]
        self.slots = [box.view(2, ranks, rank_sum.PROGRAMS.value, rank_sum.SLOT.value)[:, :, 0] for box in mailboxes]
        if zeros:
            self.slots[0][:, 1:] = 0
        counts = torch.full((rank_sum.PROGRAMS.value,), 5, dtype=torch.int32)
        words = [torch.tensor([word], dtype=torch.int32) for word in (stop, note)]
        peers = torch.tensor([tensor.data_ptr() for tensor in (*mailboxes, counts, *words)])
        all_reduce._all_reduce_kernel[(1,)](x, x, peers, x.numel(), RANK=0, RANKS=ranks, BLOCK=8, ONTO=False, PDL=False)
        return len(looks), int(counts[0]), int(words[1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_a_nan_with_the_bits_of_an_empty_place_arrives(self, dtype: torch.dtype, monkeypatch):
        x = torch.full((8 * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)
        bits = torch.int32 if dtype.itemsize == 4 else torch.int16
        _, calls, _ = self.alone(monkeypatch, 2, x, zeros=True)
        assert x.isnan().all() and calls == 6, f"a NaN with all bits set: got {x.tolist()}, {calls} calls instead of 6"
        sent = self.slots[1][1, 0, : x.nbytes]  # of call 5
        assert sent.view(dtype).isnan().all() and (sent.view(bits) != -1).all(), (
            f"rank 1 was sent the bytes {sent[:4].tolist()}…: all bits set means empty, so it would wait for ever"
        )

    def test_a_wait_ends_when_the_stop_word_is_set_and_the_next_does_not_begin(self, monkeypatch):
        looks, calls, note = self.alone(monkeypatch, 2, torch.zeros(8), stop=1)
        assert looks and (calls, note) == (5, 1), (
            f"a stopped call: {calls - 5} calls were counted, expected 0; the note is {note}, expected 1"
        )
        looks, calls, _ = self.alone(monkeypatch, 2, torch.zeros(8), note=1)
        assert (looks, calls) == (0, 5), f"with the note of an earlier call: {looks} looks, {calls - 5} calls counted"


class TestGridBarrier:
    def test_no_block_goes_on_before_all_have_come(self):
        assert "2 barriers of the grid" in native.run_mini(1), "two barriers in a layer"


class TestWords:
    def test_values_are_read_when_their_flag_is_there(self):
        native.run_mini(2)


class TestRing:
    def test_weights_come_in_order_and_no_slot_is_overwritten_before_it_was_read(self):
        native.run_mini(3)


class TestBreakIt:
    def test_the_learners_test_tells_the_broken_engine_from_the_reference(self):
        assert_catches("f")


class TestWholeStage:
    def test_the_tutor_answers(self):
        variants = {}, {"without": "overlap"}, {"max_num_seqs": 2, "num_kvcache_blocks": 12, "kvcache_block_size": 8}
        check_whole_stage(stage.LLM, *variants, num_kvcache_blocks=64)
