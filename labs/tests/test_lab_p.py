"""Drives lab P: what a function does is counted, not timed, so that a CPU suffices."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stage_b_decode_step.token_log as token_log
import stage_f_graph_tp.llm as stage
from labs.driving import Compared, error_of, numbers, unsaid
from labs.tests.support import Values, completion_of, some, whole_stage
from labs.variants import counts
from stage_a_naive.checkpoints.loading import resolve
from stage_a_naive.contract.params import SamplingParams
from stage_d_paged import block_manager, runtime
from stage_d_paged.options import EngineOptions
from stage_d_paged.sampler import reference
from stage_d_paged.sampler.rules import rules_of
from stage_d_paged.sequence import Sequence
from stage_f_graph_tp import cuda_graph
from stage_f_graph_tp.step_input import StepShape

CPU = torch.device("cpu")


class Count(TorchDispatchMode):
    """Counts the operators that run within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[function.name().split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


class TestWaits:
    def test_a_token_is_written_without_reading_it_on_the_host(self) -> Values:
        for reuse in (True, False):
            log, ids = token_log.TokenLog(16, CPU, reuse=reuse, pinned=False), some(5, 0, 99)
            with Count() as count:
                for token in ids:
                    log.write(torch.tensor([token]))
            waits = count.operators["aten::_local_scalar_dense"]
            yield "5 tokens: reads on the host, each of which waits for the GPU", waits
            nowhere = torch.device("meta")  # a token that has no number
            unreadable = token_log.TokenLog(16, nowhere, reuse=reuse, pinned=False)
            yield (
                "tolist() and numpy() read on the host too: an error",
                error_of(
                    lambda log=unreadable: log.write(torch.tensor([1], device=nowhere)),  # noqa: B023
                    NotImplementedError,
                    RuntimeError,
                    TypeError,
                ),
            )
            log.send()
            yield "the log is still right: ids, and the next input", [log.receive(0), log.next_input.tolist()]


class TestReplays:
    def test_every_number_of_decodes_up_to_the_largest_size_is_replayed(self) -> Values:
        for largest in (40, numbers.randint(17, 200)):
            sizes = cuda_graph.capture_sizes(largest)
            graphs = cuda_graph.DecodeGraphs(sizes, table_width=5, max_model_len=20, padding_slot=999)
            found = [graphs.takes(StepShape(n, n, n, 2, n, 1, 8)) for n in range(1, largest + 2)]
            replayed = [shape.num_seqs if shape in graphs.shapes else 0 for shape in found]
            yield f"graphs of {sizes}: which is replayed for 1, 2, … {largest + 1} decodes, 0 for none", replayed


class TestBlocks:
    def block_size(self, **options: object) -> int:
        asked = EngineOptions(attention_backend="reference", **options)
        return runtime.load_runtime(resolve("tutor"), asked, CPU, torch.float32).block_size

    def test_a_block_has_the_size_that_the_backend_prefers(self) -> Values:
        held = block_manager.BlockManager(200, self.block_size()).blocks_for(100)
        yield "100 tokens in blocks of the size that this backend prefers: blocks", held

    def test_the_option_decides(self) -> Values:
        for size in (4, 2 ** numbers.randint(0, 5)):
            yield f"kvcache_block_size={size} was asked for", self.block_size(kvcache_block_size=size)


class TestHashes:
    def test_a_block_is_hashed_once_in_the_life_of_its_sequence(self) -> Values:
        hashed, original, length = [], block_manager.block_key, numbers.randint(20, 40)
        with patch.object(block_manager, "block_key", lambda *args: hashed.append(args) or original(*args)):
            manager, sequence = block_manager.BlockManager(30, 4), Sequence(completion_of(list(range(length))))
            for _ in range(5):  # it waits, and the scheduler examines it in every step
                manager.count_cached_tokens(sequence)
            taken = manager.allocate(sequence, length)
            sequence.num_computed_tokens = length
            manager.index_computed(sequence)
            twin = Sequence(completion_of([*range(length), 5]))
            cached = manager.count_cached_tokens(twin)
        yield f"{length} tokens in blocks of 4 fit", taken
        yield "the twin finds its full blocks: tokens", cached
        yield f"2 sequences of {length // 4} full blocks: hashes", Compared(len(hashed), most=2 * (length // 4))

    def test_a_block_that_fills_while_a_sequence_decodes_is_hashed_once(self) -> Values:
        hashed, original, more = [], block_manager.block_key, numbers.randint(10, 30)
        with patch.object(block_manager, "block_key", lambda *args: hashed.append(args) or original(*args)):
            manager, sequence = block_manager.BlockManager(20, 4), Sequence(completion_of(list(range(30))))
            for token in range(more):
                manager.allocate(sequence, len(sequence))
                sequence.num_computed_tokens = len(sequence)
                manager.index_computed(sequence)
                sequence.token_ids.append(token)
        yield f"30 tokens and {more} more in blocks of 4: hashes, one per full block", len(hashed)


class TestOperators:
    def test_more_rows_take_no_more_operators(self) -> Values:
        counted, params = [], SamplingParams(repetition_penalty=2.0)
        for rows in (2, 24, numbers.randint(25, 60)):
            table = torch.zeros(rows, 30, dtype=torch.int16)
            for row in range(rows):
                table[row, [1, 2, row % 30]] = 1
            rules = torch.from_numpy(np.stack([rules_of(params, False, 30, row) for row in range(rows)]))
            with Count() as count:
                out = reference.penalised(torch.ones(rows, 30), rules, table)
            yield f"{rows} rows: each has its own tokens penalised", out
            counted.append(count.operators.total())
            yield f"{rows} rows: operators more than for 2", counted[-1] - counted[0]


class TestWaitsCount:
    def test_it_is_what_the_slow_copy_does(self) -> Values:
        for tokens in (1, 6, 40, *some(3, 2, 200)):
            yield f"{tokens} tokens", unsaid(counts.waits(tokens))


class TestReplaysCount:
    def test_it_is_what_the_slow_copy_does(self) -> Values:
        for largest in (1, 3, 8, 20, 100, *some(3, 2, 200)):
            yield f"1 to {largest} decodes", unsaid(counts.replays(largest))


class TestBlocksCount:
    def test_it_is_what_the_slow_copy_does(self) -> Values:
        for tokens in (1, 16, 100, *some(3, 2, 2000)):
            yield f"{tokens} tokens", unsaid(counts.blocks(tokens))


class TestHashesCount:
    def test_it_is_what_the_slow_copy_does(self) -> Values:
        for full_blocks, looks in ((1, 1), (7, 5), (3, 20), *zip(some(3, 2, 40), some(3, 3, 30), strict=True)):
            yield f"{full_blocks} full blocks, {looks} looks", unsaid(counts.hashes(full_blocks, looks))


class TestOperatorsCount:
    def test_it_is_what_the_slow_copy_does(self) -> Values:
        for rows in (2, 3, 9, 30, *some(3, 2, 60)):
            yield f"{rows} rows", unsaid(counts.more_operators(rows))


class TestWholeStage:
    def test_the_tutor_answers(self) -> Values:
        yield from whole_stage(stage.LLM, num_kvcache_blocks=64)
