"""Judges lab P: what a function does is counted, not timed, so that a CPU suffices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stage_b_decode_step.token_log as token_log
import stage_f_graph_tp.llm as stage
from labs.exercises import exercise_of
from labs.tests.support import check_whole_stage, completion_of
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
    @pytest.mark.parametrize("reuse", [True, False])
    def test_a_token_is_written_without_reading_it_on_the_host(self, reuse: bool):
        log = token_log.TokenLog(16, CPU, reuse=reuse, pinned=False)
        with Count() as count:
            for token in range(5):
                log.write(torch.tensor([token]))
        waits = count.operators["aten::_local_scalar_dense"]
        assert waits == 0, f"5 tokens: 0 reads on the host expected, each of which waits for the GPU; got {waits}"
        assert not self.reads(reuse), "tolist() and numpy() read on the host too"
        log.send()
        found, following = log.receive(0), log.next_input.tolist()
        assert (found, following) == ([0, 1, 2, 3, 4], [[4]]), f"the log must still be right, got {found}, {following}"

    def reads(self, reuse: bool) -> bool:
        """Whether a number is read of a token that has none."""
        nowhere = torch.device("meta")
        log = token_log.TokenLog(16, nowhere, reuse=reuse, pinned=False)
        try:
            log.write(torch.tensor([1], device=nowhere))
        except (NotImplementedError, RuntimeError, TypeError):
            return True
        return False


class TestReplays:
    def test_every_number_of_decodes_up_to_the_largest_size_is_replayed(self):
        sizes = cuda_graph.capture_sizes(40)
        graphs = cuda_graph.DecodeGraphs(sizes, table_width=5, max_model_len=20, padding_slot=99)
        shapes = [StepShape(n, n, n, 2, n, 1, 8) for n in range(1, 42)]
        replayed = sum(graphs.takes(shape) in graphs.shapes for shape in shapes)
        assert replayed == 40, f"of 1 to 41 decodes, 40 have a graph of sizes {sizes}; {replayed} are replayed"
        found = [graphs.takes(shape).num_seqs for shape in shapes[:5]]
        assert found == [1, 2, 4, 4, 8], f"in the smallest that holds them: [1, 2, 4, 4, 8] expected, got {found}"


class TestBlocks:
    def block_size(self, **options: object) -> int:
        asked = EngineOptions(attention_backend="reference", **options)
        return runtime.load_runtime(resolve("tutor"), asked, CPU, torch.float32).block_size

    def test_a_block_has_the_size_that_the_backend_prefers(self):
        held = block_manager.BlockManager(200, self.block_size()).blocks_for(100)
        assert held == 7, f"100 tokens are 7 blocks of the 16 that this backend prefers, got {held} blocks"

    def test_the_option_decides(self):
        found = self.block_size(kvcache_block_size=4)
        assert found == 4, f"kvcache_block_size=4 was asked for, got {found}"


class TestHashes:
    def test_a_block_is_hashed_once_in_the_life_of_its_sequence(self, monkeypatch):
        hashed, original = [], block_manager.block_key
        monkeypatch.setattr(block_manager, "block_key", lambda *args: hashed.append(args) or original(*args))
        manager = block_manager.BlockManager(20, 4)
        sequence = Sequence(completion_of(list(range(30))))
        for _ in range(5):  # it waits, and is looked at in every step
            manager.count_cached_tokens(sequence)
        assert manager.allocate(sequence, 30)
        sequence.num_computed_tokens = 30
        manager.index_computed(sequence)
        twin = Sequence(completion_of([*range(30), 5]))
        cached = manager.count_cached_tokens(twin)
        assert cached == 28, f"the twin finds its 7 full blocks: 28 tokens expected, got {cached}"
        assert len(hashed) <= 14, f"2 sequences of 7 full blocks are 14 hashes, got {len(hashed)}"

    def test_a_block_that_fills_while_a_sequence_decodes_is_hashed_once(self, monkeypatch):
        hashed, original = [], block_manager.block_key
        monkeypatch.setattr(block_manager, "block_key", lambda *args: hashed.append(args) or original(*args))
        manager, sequence = block_manager.BlockManager(20, 4), Sequence(completion_of(list(range(30))))
        for token in range(20):  # to 50 tokens, 12 full blocks
            assert manager.allocate(sequence, len(sequence))
            sequence.num_computed_tokens = len(sequence)
            manager.index_computed(sequence)
            sequence.token_ids.append(token)
        assert len(hashed) == 12, f"12 full blocks are 12 hashes, got {len(hashed)}"


def operators_of(penalised: Callable[..., torch.Tensor], rows: int) -> int:
    """The operators of a call in which all rows ask for a penalty."""
    params, table = SamplingParams(repetition_penalty=2.0), torch.zeros(rows, 30, dtype=torch.int16)
    for row in range(rows):
        table[row, [1, 2, row % 30]] = 1
    rules = torch.from_numpy(np.stack([rules_of(params, False, 30, row) for row in range(rows)]))
    with Count() as count:
        out = penalised(torch.ones(rows, 30), rules, table)
    for row in range(rows):
        seen = (out[row] == 0.5).nonzero().flatten().tolist()
        assert seen == sorted({1, 2, row % 30}), f"row {row} must have its own tokens penalised, got {seen}"
    return count.operators.total()


class TestOperators:
    def test_more_rows_take_no_more_operators(self):
        few, many = (operators_of(reference.penalised, rows) for rows in (2, 24))
        assert few == many, f"2 rows take {few} operators, so 24 must take {few}; got {many}"


def slow(identity: str) -> ModuleType:
    """The module of an exercise with the function that the learner was given."""
    exercise = exercise_of(identity)
    module = ModuleType(exercise.module)
    module.__package__ = exercise.module.rpartition(".")[0]
    exec(compile(exercise.starter_text(exercise.reference.read_text("utf-8")), exercise.path, "exec"), vars(module))
    return module


def check_count(work: str, found: object, counted: int) -> None:
    """Compare without saying what was counted."""
    if found != counted:
        pytest.fail(f"{work}: not what is counted in the slow copy, got {found}")


class TestWaitsCount:
    sizes = (1, 6, 40)

    def test_it_is_what_the_slow_copy_does(self):
        for tokens in self.sizes:
            log = slow("P.1").TokenLog(tokens, CPU, reuse=True, pinned=False)
            with Count() as count:
                for token in range(tokens):
                    log.write(torch.tensor([token]))
            counted = count.operators["aten::_local_scalar_dense"]
            check_count(f"{tokens} tokens", counts.waits(tokens), counted)


class TestReplaysCount:
    sizes = (1, 3, 8, 20, 100)

    def test_it_is_what_the_slow_copy_does(self):
        for largest in self.sizes:
            sizes = cuda_graph.capture_sizes(largest)
            graphs = slow("P.2").DecodeGraphs(sizes, table_width=5, max_model_len=20, padding_slot=999)
            shapes = [StepShape(n, n, n, 2, n, 1, 8) for n in range(1, largest + 1)]
            counted = sum(graphs.takes(shape) in graphs.shapes for shape in shapes)
            check_count(f"1 to {largest} decodes", counts.replays(largest), counted)


class TestBlocksCount:
    sizes = (1, 16, 100)

    def test_it_is_what_the_slow_copy_does(self):
        asked = EngineOptions(attention_backend="reference")
        size = slow("P.3").load_runtime(resolve("tutor"), asked, CPU, torch.float32).block_size
        for tokens in self.sizes:
            counted = block_manager.BlockManager(tokens, size).blocks_for(tokens)
            check_count(f"{tokens} tokens", counts.blocks(tokens), counted)


class TestHashesCount:
    sizes = ((1, 1), (7, 5), (3, 20))

    def test_it_is_what_the_slow_copy_does(self):
        for full_blocks, looks in self.sizes:
            hashed, module = [], slow("P.4")
            original = module.block_key
            module.block_key = lambda *args, hashed=hashed, original=original: hashed.append(args) or original(*args)
            manager, sequence = module.BlockManager(20, 4), Sequence(completion_of(list(range(4 * full_blocks + 1))))
            for _ in range(looks):
                manager.count_cached_tokens(sequence)
            work = f"{full_blocks} full blocks, {looks} looks"
            check_count(work, counts.hashes(full_blocks, looks), len(hashed))


class TestOperatorsCount:
    sizes = (2, 3, 9, 30)

    def test_it_is_what_the_slow_copy_does(self):
        two = operators_of(slow("P.5").penalised, 2)
        for rows in self.sizes:
            counted = operators_of(slow("P.5").penalised, rows) - two
            check_count(f"{rows} rows", counts.more_operators(rows), counted)


class TestWholeStage:
    def test_the_tutor_answers(self):
        check_whole_stage(stage.LLM, num_kvcache_blocks=64)
