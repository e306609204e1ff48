"""Drives lab F. No GPU is needed: graphs are recorded by a stand-in, ranks are threads, Triton is interpreted."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

import stage_f_graph_tp.kernels.elementwise as elementwise
import stage_f_graph_tp.llm as stage
from labs import native
from labs.driving import close, near, numbers
from labs.tests.support import Values, some, whole_stage
from labs.variants import early_end
from stage_d_paged.layers import Embedding, Linear
from stage_f_graph_tp import cuda_graph
from stage_f_graph_tp.kernels import rank_sum, skinny_gemm
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.step_input import StepInput, StepShape, host_views
from stage_f_graph_tp.tensor_parallel import all_reduce, sharding

CPU = torch.device("cpu")


class TestVariant:
    """Steps that end early: none that a limit rules out, none left in flight, and unneeded ones are counted."""

    def test_what_is_launched_and_what_for_nothing(self) -> Values:
        cases = [(6, 50), (6, 6), (6, 7), (50, 8), (1, 5), (50, 1), *zip(some(8, 1, 30), some(8, 1, 30), strict=True)]
        for most_ahead in (0, 1, 3):
            for length, max_tokens in cases:
                launched, waited, most = [], [], [0]

                def launch(launched=launched, waited=waited, most=most, length=length) -> Callable[[], int]:
                    number = len(launched)
                    launched.append(number)
                    most[0] = max(most[0], len(launched) - len(waited))
                    return lambda: waited.append(number) or (0 if number + 2 >= length else number + 11)

                first = 0 if length == 1 else 10
                ids, unneeded = early_end.generate_ahead(most_ahead, launch, first, 0, max_tokens)
                given = f"{most_ahead} ahead, an answer of {length} tokens, at most {max_tokens}"
                yield f"{given}: tokens", ids
                yield f"{given}: steps that were launched and not needed", unneeded
                yield f"{given}: steps launched; the first token needs none", len(launched)
                yield f"{given}: steps waited for, in their order", waited
                if min(length, max_tokens) > 1 + most_ahead:
                    yield f"{given}: steps in flight at once, at most", most[0]


class TestCaptureSizes:
    def test_small_sizes_close_together_then_every_sixteen(self) -> Values:
        for most in (64, 1, 2, 3, 5, 12, 20, 100, 512, 1000, *some(5, 17, 500)):
            yield (
                f"capture_sizes({most}), at most 512, where the model runs eagerly above",
                cuda_graph.capture_sizes(most),
            )


def graphs_of(*sizes: int) -> cuda_graph.DecodeGraphs:
    return cuda_graph.DecodeGraphs(list(sizes), table_width=5, max_model_len=20, padding_slot=99)


def shape_of(num_seqs: int, num_decodes: int | None = None) -> StepShape:
    """Return a step's shape; with fewer decodes than sequences, the others are prompts of 3 tokens."""
    decodes = num_seqs if num_decodes is None else num_decodes
    tokens = decodes + 3 * (num_seqs - decodes)
    return StepShape(tokens, num_seqs, num_seqs, 2, decodes, 1 if decodes == num_seqs else 3, 8)


class TestPadded:
    def test_the_smallest_size_that_is_large_enough(self) -> Values:
        for num_seqs in range(1, 9):
            found = graphs_of(1, 2, 4, 8).takes(shape_of(num_seqs))
            given = f"{num_seqs} decodes, graphs of 1, 2, 4 and 8: the recorded shape"
            yield (
                f"{given}: sequences, table width, longest context",
                [
                    found.num_seqs,
                    found.table_width,
                    found.max_context_len,
                ],
            )
        sizes = sorted(numbers.sample(range(1, 60), 6))
        found = [graphs_of(*sizes).takes(shape_of(n)) for n in range(1, sizes[-1] + 2)]
        yield f"graphs of {sizes}: the one for 1, 2, … decodes", [shape and shape.num_seqs for shape in found]

    def test_other_steps_are_not_taken(self) -> Values:
        graphs = graphs_of(1, 2, 4, 8)
        for shape in (shape_of(9), shape_of(3, num_decodes=2), shape_of(1, num_decodes=0)):
            yield f"no graph serves {shape}: too many sequences, or a prefill", graphs.takes(shape)
        yield "a step's tokens come from elsewhere: no graph", graphs.takes(shape_of(3)._replace(source=1))


class TestCapture:
    def test_every_size_is_recorded_the_largest_first(self) -> Values:
        sizes, recorded = sorted(numbers.sample(range(1, 30), 4)), []
        graphs = graphs_of(*sizes)

        def record(body: Callable[[], Tensor]) -> cuda_graph.Recorded:
            recorded.append(body())
            return cuda_graph.Recorded(lambda: None, recorded[-1])

        def body_of(shape: StepShape) -> Callable[[], Tensor]:
            return lambda: torch.full((shape.num_seqs,), shape.num_seqs)

        graphs.capture(record, body_of, CPU)
        yield "the largest first, so that the smaller ones fit into its memory", [len(ids) for ids in recorded]
        for size in sizes:
            shape = graphs.takes(shape_of(size))
            yield f"size {size} is found", shape in graphs._recorded
            yield f"size {size} finds its own graph", graphs._recorded[shape].result
        yield "on a CPU no device memory was taken: bytes", graphs.num_bytes

    def test_the_bytes_are_those_that_the_graphs_took(self) -> Values:
        before, after = numbers.randint(0, 999), numbers.randint(1000, 9999)
        used, graphs = iter([before, after]), graphs_of(1)
        with patch.object(cuda_graph, "_used_bytes", lambda device: next(used)):
            graphs.capture(lambda body: cuda_graph.Recorded(lambda: None, body()), lambda shape: lambda: None, CPU)
        yield f"{before} bytes before and {after} after: the graphs' bytes", graphs.num_bytes


class TestPad:
    def test_padding_rows(self) -> Values:
        for size, count in ((4, 3), (4, 2), (4, 1), (4, 4), (16, numbers.randint(1, 15))):
            old, shape = numbers.randint(1, 9), StepShape(size, size, size, 5, size, 1, 20)
            host = host_views(np.zeros(shape.num_bytes, np.uint8), shape)
            for array in (*host._replace(sampling=host.sampling.rules), *host.sampling):
                array.fill(old)
            graphs_of(size).pad(host, shape_of(count))
            yield from self.found(f"{count} of {size} rows are sequences", host, count, old)

    def found(self, given: str, host: StepInput, count: int, old: int) -> Values:
        yield f"{given}: the others read no key: context_lens", host.context_lens[count:]
        yield f"{given}: the others write no key: slot_mapping", host.slot_mapping[count:]
        yield f"{given}: no block of an older step stays: block_tables", host.block_tables[count:]
        yield (
            f"{given}: their token goes to batch slot 99: batch_slots, sample_slots",
            [
                host.batch_slots[count:],
                host.sample_slots[count:],
            ],
        )
        # What an older step left there is a valid token and a valid position, and so is 0.
        for name in ("input_ids", "positions", "sample_tokens"):
            ids = getattr(host, name)[count:]
            yield f"{given}: {name} of the others that are no valid numbers", ids[(ids < 0) | (ids >= 20)]
        yield f"{given}: all rows have one query: cu_seqlens_q", host.cu_seqlens_q
        arrays = host._asdict() | host.sampling._asdict()
        changed = [name for name in set(arrays) - {"cu_seqlens_q", "sampling"} if (arrays[name][:count] != old).any()]
        yield f"{given}: the step fills these in itself, but they were changed", sorted(changed)


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
    """Run `work` on each rank; return the results, or raise the first error."""
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
    def test_the_ranks_sum_is_the_whole_product_and_the_residual_counts_once(self) -> Values:
        for size in (1, 2, 4):
            weight, x, residual = torch.randn(6, 8), torch.randn(3, 8), torch.randn(3, 6)

            def work(group: ThreadGroup, size=size, weight=weight, x=x, residual=residual) -> Tensor:
                own = slice(group.rank * 8 // size, (group.rank + 1) * 8 // size)
                columns = Linear(8 // size, {"o_proj": 6}, False, torch.float32, CPU)
                columns.weight.copy_(weight[:, own])
                return sharding.RowParallelLinear(columns, group)(x[:, own].contiguous(), residual.clone())

            for rank, out in enumerate(on_ranks(size, work)):
                yield f"rank {rank} of {size}: the whole product, and the residual once", close(out, 1e-5)


class TestVocabParallel:
    def test_every_rank_gets_every_row(self) -> Values:
        for size in (1, 2, 4):
            table, ids = torch.randn(10, 4), torch.tensor([0, 9, *some(5, 0, 9)])

            def work(group: ThreadGroup, size=size, table=table, ids=ids) -> Tensor:
                share = -(-10 // size)
                rows = Embedding(share, 4, torch.float32, CPU)
                rows.weight.copy_(F.pad(table, (0, 0, 0, share * size - 10))[group.rank * share :][:share])
                embedding = sharding.VocabParallelEmbedding(rows, 10, group)
                mine = ids.clone()
                out = embedding(mine)
                assert torch.equal(mine, ids), "the ids that were given must not be changed: the step needs them"
                return out

            for rank, out in enumerate(on_ranks(size, work)):
                yield f"rank {rank} of {size}, ids {ids.tolist()}: zeros for ids of others, then the sum", out


class TestKeep:
    def test_a_token_is_where_the_next_step_of_its_sequence_reads_it(self) -> Values:
        for slots in ([0, 1, 2], [2, 0], [3], numbers.sample(range(4), numbers.randint(1, 4))):
            tokens = LastTokens(4, CPU)
            tokens.by_slot.copy_(torch.arange(90, 95))
            address = tokens.by_slot.data_ptr()
            ids = torch.tensor(some(len(slots), 0, 80))
            inputs = SimpleNamespace(sample_slots=torch.tensor([*slots, 4]))  # and a row of padding
            kept = tokens.keep(ids, inputs, None)
            yield f"slots {slots}, tokens {ids.tolist()}: by_slot", tokens.by_slot
            yield (
                "by_slot is written into, since a recorded step reads that memory",
                tokens.by_slot.data_ptr() == address,
            )
            yield "the host sees the same tokens", kept


class TestSiluAndMultiply:
    def test_it_is_silu_of_gate_times_up(self) -> Values:
        for inter in (8, 13, 1500, numbers.randint(1, 60)):
            out = elementwise.silu_and_multiply(torch.randn(3, 2 * inter))
            yield f"[3, {inter}]: silu(first half) * second half, masked", near(out, 1e-5)

    def test_it_computes_in_float32(self) -> Values:
        out = elementwise.silu_and_multiply((torch.randn(4, 2 * 500) * 3).half())
        yield "float16 is converted before silu, and rounded once", near(out, 1e-4)

    def test_rows_that_were_not_normalised_are_scaled(self) -> Values:
        x, weight = torch.randn(3, 24), torch.randn(2 * 13, 24)
        out = elementwise.silu_and_multiply(x @ weight.T, elementwise.Rows(x, 1e-6))
        yield "a product of rows that are not normalised: scale gate and up", close(out, 1e-3, 1e-3)


class TestSkinnyGemm:
    def test_gate_and_up_of_the_same_neurons_come_from_one_tile(self) -> Values:
        for hidden, inter, tokens in ((32, 16, 1), (48, 24, 5), (40, 20, 17), (600, 12, 3)):
            x, weight = torch.randn(tokens, hidden), torch.randn(2 * inter, hidden)
            out = skinny_gemm.gate_up_silu(skinny_gemm.sum_squares(x), 1e-6, weight, skinny_gemm.Tiles(8))
            yield (
                "rows first + i and first + i + distance of the weight, times the tokens: "
                f"{tokens} tokens, {hidden} columns, {inter} pairs",
                close(out, 1e-3, 1e-3),
            )


class TestRankSum:
    """Two ranks are two processes with mailboxes that both can write."""

    slice_bytes = 32

    def sums(self, calls: list[tuple[int, torch.dtype, bool]], slow: int, first_call: int) -> list:
        """Return each rank's sums after each call; rank `slow` reads its mailbox only when the other one is stuck."""
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

        try:
            with patch.multiple(rank_sum, SPINS=tl.constexpr(4), _look=look):
                self.run(rank, calls, shared, size, first_call)
        finally:
            looks[rank] = ended  # the other rank no longer waits for this one
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

    def test_both_ranks_get_every_sum(self) -> Values:
        single, half = torch.float32, torch.float16
        calls = [(24, single, False), (5, single, True), (40, half, False), (9, half, True)] * 3
        first = 2**31 - 4  # the numbers of the calls overflow
        for slow in (0, 1):
            for rank, results in enumerate(self.sums(calls, slow, first)):
                for i, (count, dtype, onto) in enumerate(calls):
                    way = "added to a residual" if onto else "in place"
                    yield f"call {i} of {count} {dtype}, {way}, rank {slow} is slow: rank {rank} has", results[i]

    def alone(self, ranks: int, x: Tensor, stop: int = 0, note: int = 0, zeros: bool = False) -> tuple[int, int, int]:
        """Run one call of rank 0 without an answer; return its number of looks, the count of calls after it, the note.

        With `zeros`, every other rank's zeros are in the mailbox before the call.
        """
        original, looks, sent = rank_sum._look, [], x[:4].tolist()

        def look(*places):
            looks.append(places)
            if len(looks) > 100:
                raise AssertionError(
                    f"still waits after 100 looks; ranks: {ranks}, stop word: {stop}, numbers sent: {sent}"
                )
            return original(*places)

        size = 2 * ranks * rank_sum.PROGRAMS.value * rank_sum.SLOT.value
        mailboxes = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(ranks)]
        self.slots = [box.view(2, ranks, rank_sum.PROGRAMS.value, rank_sum.SLOT.value)[:, :, 0] for box in mailboxes]
        if zeros:
            self.slots[0][:, 1:] = 0
        counts = torch.full((rank_sum.PROGRAMS.value,), 5, dtype=torch.int32)
        words = [torch.tensor([word], dtype=torch.int32) for word in (stop, note)]
        peers = torch.tensor([tensor.data_ptr() for tensor in (*mailboxes, counts, *words)])
        with patch.multiple(rank_sum, SPINS=tl.constexpr(4), _look=look):
            all_reduce._all_reduce_kernel[(1,)](
                x, x, peers, x.numel(), RANK=0, RANKS=ranks, BLOCK=8, ONTO=False, PDL=False
            )
        return len(looks), int(counts[0]), int(words[1])

    def test_a_nan_with_the_bits_of_an_empty_place_arrives(self) -> Values:
        for dtype in (torch.float32, torch.float16):
            x = torch.full((8 * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)
            bits = torch.int32 if dtype.itemsize == 4 else torch.int16
            _, calls, _ = self.alone(2, x, zeros=True)
            yield f"a NaN with all bits set, {dtype}: the sum", x
            yield "calls counted", calls
            sent = self.slots[1][1, 0, : x.nbytes]  # of call 5
            yield (
                "numbers sent to rank 1 whose bits are all set, which means empty: it would wait for ever",
                int((sent.view(bits) == -1).sum()),
            )
            yield "what was sent is NaN", sent.view(dtype)

    def test_a_wait_ends_when_the_stop_word_is_set_and_the_next_does_not_begin(self) -> Values:
        looks, calls, note = self.alone(2, torch.randn(8), stop=1)
        yield "a stopped call: it looked; the number of calls, and the note", [looks > 0, calls, note]
        looks, calls, _ = self.alone(2, torch.randn(8), note=1)
        yield "with the note of an earlier call: it looked once at most; the number of calls", [looks <= 1, calls]


def mini(version: int) -> Values:
    """Return the rows that a version of the smallest megakernel computes in two launches, and its barriers."""
    row, barriers = native.run_mini(version, numbers.randrange(1, 2**31))
    yield f"version {version}: the rows of two launches", near(torch.tensor(row), 0.03)
    yield f"version {version}: barriers of the grid per layer", barriers


class TestGridBarrier:
    def test_no_block_goes_on_before_all_have_come(self) -> Values:
        yield from mini(1)


class TestWords:
    def test_values_are_read_when_their_flag_is_there(self) -> Values:
        yield from mini(2)


class TestRing:
    def test_weights_come_in_order_and_no_slot_is_overwritten_before_it_was_read(self) -> Values:
        yield from mini(3)


class TestWholeStage:
    def test_the_tutor_answers(self) -> Values:
        variants = {}, {"without": "overlap"}, {"max_num_seqs": 2, "num_kvcache_blocks": 12, "kvcache_block_size": 8}
        yield from whole_stage(stage.LLM, *variants, num_kvcache_blocks=64)
