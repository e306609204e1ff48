"""Engines on the fake model that are a step ahead, guess, or have several batches in flight; guesses that are known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import torch
from fake_model import VOCAB, FakeRunner, LateTokens, calls_of, next_token
from fake_model import make_calls as make_plain
from torch import Tensor

from beyond.scale_out.micro_batches import MicroBatches
from beyond.scale_out.pipeline_scheduler import PipelineScheduler
from beyond.speculation.ahead_drafts import DeviceDrafts
from beyond.speculation.device_inputs import AheadBatch, TableTokens
from beyond.speculation.drafts import HostDrafts, SpeculationCounters
from beyond.speculation.host_inputs import DraftBatch
from beyond.speculation.rows import DraftRows, ShrinkingBlockManager
from beyond.speculation.sequence import guessing_sequence
from beyond.speculation.token_table import TokenTable
from beyond.windows.blocks import HybridBlockManager, WindowBlocks
from beyond.windows.pools import Limits
from beyond.windows.tables import HybridBatch
from stage_e_batching.calls import Calls
from stage_e_batching.engine import Engine
from stage_e_batching.parts import Sampled
from stage_e_batching.sampler import Sampler
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep
from stage_f_graph_tp.compose import compose_runner
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.options import GraphOptions

DRAFT = 4  # guesses of the device
DRAFTED = {"new_sequence": guessing_sequence, "block_manager_class": ShrinkingBlockManager}


def following(tokens: list[int], wrong: list[bool]) -> list[int]:
    """As many of the fake model's next tokens, those that are to be `wrong` changed."""
    tokens, known = list(tokens), len(tokens)
    for is_wrong in wrong:
        tokens.append((next_token([(t, i) for i, t in enumerate(tokens)]) + is_wrong) % VOCAB)
    return tokens[known:]


# ---- guesses of the host ---------------------------------------------------------------------------------------------


class FinishedDrafts:
    """Drafts that are complete when they are made."""

    def complete(self, sequences: list[BatchSequence]) -> None:
        assert all(sequence.guesses.draft for sequence in sequences)


class HashDrafter(FinishedDrafts):
    """Sometimes knows the fake model's next tokens, and is wrong about some."""

    def __init__(self, seed: int, error_rate: float, num_tokens: int) -> None:
        self._random = random.Random(seed)
        self._error_rate, self._num_tokens = error_rate, num_tokens

    def has_draft(self, sequence: BatchSequence) -> bool:
        return self._random.random() < 0.7

    def draft(self, sequence: BatchSequence) -> list[int]:
        count = self._random.randint(0, self._num_tokens)
        return following(sequence.token_ids, [self._random.random() < self._error_rate for _ in range(count)])


class DraftRunner(FakeRunner):
    """The fake model for steps with drafts: a step's tokens are all on the device, or are all sent."""

    def __init__(self, scheduler: Scheduler, max_rows: int, fail_at: frozenset[int]) -> None:
        super().__init__(scheduler, fail_at)
        self.batch = DraftBatch(max_rows, scheduler.capacity + 1, self.block_size)

    def known_tokens(self, sequence: BatchSequence, start: int, end: int) -> list[int]:
        return [*sequence.token_ids, *sequence.guesses.draft][start:end]

    def check_table(self, table: list[int], blocks: list[int]) -> None:
        assert table[: len(blocks)] == blocks  # the rest may have been freed


def make_guessing(
    *,
    drafter: object,
    overlap: bool = True,
    draft_tokens: int = 6,
    max_model_len: int = 4096,
    fail_at: frozenset[int] = frozenset(),
    **options: object,
) -> Calls:
    max_rows = min(options["max_num_seqs"] * (1 + draft_tokens), options["max_num_batched_tokens"])
    scheduler = Scheduler(**DRAFTED, **options)
    runner = DraftRunner(scheduler, max_rows, fail_at)
    counters = SpeculationCounters()
    drafts = HostDrafts(drafter, DraftRows(scheduler, max_rows), counters)
    return calls_of(Engine(scheduler, runner, depth=int(overlap), drafts=drafts, counters=counters), max_model_len)


# ---- guesses of the device -------------------------------------------------------------------------------------------


class HashModel:
    """The fake model as a model: a row's scores say its next token, a hash of all that it sees through its blocks."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.pool: list[tuple[int, int] | None] = [None] * capacity
        self._block_size = block_size

    def __call__(self, input_ids: Tensor, positions: Tensor, kv_cache: object, metadata: object) -> Tensor:
        entries = zip(input_ids.tolist(), positions.tolist(), strict=True)
        for slot, entry in zip(metadata.slot_mapping.tolist(), entries, strict=True):
            if slot >= 0:
                self.pool[slot] = entry
        ends, tables = metadata.cu_seqlens_q.tolist(), metadata.block_tables.tolist()
        hidden = torch.zeros(len(input_ids), 1)
        for row, length in enumerate(metadata.context_lens.tolist()):
            size = self._block_size
            slots = [tables[row][i // size] * size + i % size for i in range(length)]
            assert min(slots) >= 0, "a context beyond the blocks"
            hidden[ends[row + 1] - 1] = next_token([self.pool[slot] for slot in slots])
        return hidden

    def compute_logits(self, hidden: Tensor, out: None) -> Tensor:
        return 1e6 * torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float()


class HashRunner:
    """The real runner on the fake model. Failing steps with an even number fail when they are waited for."""

    def __init__(self, scheduler: Scheduler, max_rows: int, guess: object, fail_at: frozenset[int]) -> None:
        block_size = scheduler.block_manager.block_size
        cpu, longest = torch.device("cpu"), scheduler.capacity + 1
        runtime = SimpleNamespace(
            model=HashModel(scheduler.capacity, block_size),
            device=cpu,
            dtype=torch.float32,
            config=SimpleNamespace(vocab_size=VOCAB),
            max_model_len=longest,
            block_size=block_size,
        )
        options = GraphOptions(max_num_seqs=max_rows, max_num_batched_tokens=scheduler.max_num_batched_tokens)
        sampler = Sampler(max_rows, max_rows, VOCAB, longest, cpu)
        tokens = TableTokens(LastTokens(max_rows, cpu), TokenTable(max_rows, longest, DRAFT, cpu), block_size)
        tokens.table.guess = partial(guess, tokens.table)
        batch = AheadBatch(max_rows, longest, block_size, DRAFT, tokens, sampler)
        self._runner = compose_runner(runtime, None, sampler, options, batch, tokens)
        self.layers, self.forget = self._runner.layers, self._runner.forget
        self.steps: list[ScheduledStep] = []
        self.launched: list[LateTokens] = []
        self._fail_at = fail_at

    def launch(self, step: ScheduledStep) -> LateTokens:
        self.steps.append(step)
        fails = len(self.steps) in self._fail_at
        launched = self._runner.launch(step)
        if fails and len(self.steps) % 2:
            raise RuntimeError("the device failed")
        self.launched.append(LateTokens(launched.wait(), fails))
        return self.launched[-1]


class Sometimes:
    """Reports at random that there is a guess."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def has_draft(self, sequence: BatchSequence) -> bool:
        return self._random.random() < 0.7


def guess_hashes(error_rate: float, table: TokenTable, slots: Tensor) -> None:
    """Guess the fake model's next tokens, some of them wrong."""
    for slot in set(slots.tolist()):
        first = table.last[slot].item() + 1
        wrong = [random.Random(100 * slot + i).random() < error_rate for i in range(first, first + DRAFT)]
        table.tokens[slot, first : first + DRAFT] = torch.tensor(following(table.tokens[slot, :first].tolist(), wrong))


def make_ahead(
    *,
    drafter: object,
    error_rate: float = 0.0,
    max_model_len: int = 4096,
    fail_at: frozenset[int] = frozenset(),
    **options: object,
) -> Calls:
    max_rows = min(options["max_num_seqs"] * (1 + DRAFT), options["max_num_batched_tokens"])
    scheduler = Scheduler(**DRAFTED, **options)
    runner = HashRunner(scheduler, max_rows, partial(guess_hashes, error_rate), fail_at)
    counters = SpeculationCounters()
    drafts = DeviceDrafts(drafter, DraftRows(scheduler, max_rows), counters, DRAFT)
    return calls_of(Engine(scheduler, runner, depth=1, drafts=drafts, counters=counters), max_model_len)


# ---- stages of a pipeline --------------------------------------------------------------------------------------------


class Returning:
    """A step on its way through the stages."""

    def __init__(self, runner: StagesRunner, step: ScheduledStep, late: LateTokens, tokens: list[int]) -> None:
        self.runner, self.late, self.done = runner, late, False
        self.rows = [(e.sequence, e.sequence.batch_slot) for e in step if e.samples]
        self.tokens = tokens

    def sample(self) -> LateTokens:
        self.done = True
        for (sequence, slot), token in zip(self.rows, self.tokens, strict=True):
            assert self.runner.occupants[slot] is sequence, "the sampler's row belongs to another request already"
            self.runner.last_tokens[slot] = token
        return self.late

    def wait(self) -> Sampled:
        return self.sample().wait()


class StagesRunner(FakeRunner):
    """The fake model on stages: a step's layers run when it is launched, its sampler when the engine asks for it."""

    def __init__(self, scheduler: PipelineScheduler, fail_at: frozenset[int] = frozenset()) -> None:
        super().__init__(scheduler, fail_at)
        self.occupants = {}
        self.in_flight: deque[Returning] = deque()

    def launch(self, step: ScheduledStep) -> Returning:
        assert not any(
            not other.done and set(step.sequences[: step.num_decodes]) & {s for s, _ in other.rows}
            for other in self.in_flight
        ), "a sequence ran before its last token was sampled"
        self.occupants |= {sequence.batch_slot: sequence for sequence in step.admitted}
        known = list(self.last_tokens)
        late = super().launch(step)
        tokens = [self.last_tokens[e.sequence.batch_slot] for e in step if e.samples]
        self.last_tokens = known
        self.in_flight.append(Returning(self, step, late, tokens))
        return self.in_flight[-1]

    def forget(self) -> None:
        for step in self.in_flight:
            if not step.done:
                with suppress(RuntimeError):
                    step.sample().wait()
        self.in_flight.clear()


def make_pipeline(
    *, fail_at: frozenset[int] = frozenset(), max_model_len: int = 4096, num_micro_batches: int = 3, **options: object
) -> Calls:
    scheduler = PipelineScheduler(num_micro_batches=num_micro_batches, **options)
    engine = Engine(scheduler, StagesRunner(scheduler, fail_at), depth=MicroBatches(scheduler).next_depth)
    return calls_of(engine, max_model_len)


class DraftStagesRunner(StagesRunner):
    """The fake model on stages, for steps with drafts."""

    def __init__(self, scheduler: PipelineScheduler, max_rows: int, fail_at: frozenset[int]) -> None:
        super().__init__(scheduler, fail_at)
        self.batch = DraftBatch(max_rows, scheduler.capacity + 1, self.block_size)

    known_tokens, check_table = DraftRunner.known_tokens, DraftRunner.check_table


def make_guessing_pipeline(
    *,
    drafter: object,
    fail_at: frozenset[int] = frozenset(),
    max_model_len: int = 4096,
    num_micro_batches: int = 2,
    **options: object,
) -> Calls:
    max_rows = min(options["max_num_seqs"] * 7, options["max_num_batched_tokens"])
    scheduler = PipelineScheduler(num_micro_batches=num_micro_batches, **DRAFTED, **options)
    runner, counters = DraftStagesRunner(scheduler, max_rows, fail_at), SpeculationCounters()
    drafts = HostDrafts(drafter, DraftRows(scheduler, max_rows), counters)
    engine = Engine(scheduler, runner, depth=MicroBatches(scheduler).next_depth, drafts=drafts, counters=counters)
    return calls_of(engine, max_model_len)


# ---- layers with a window --------------------------------------------------------------------------------------------


class WindowRunner(FakeRunner):
    """The fake model with layers that see the last tokens: what these read through the tables that were sent is right.

    The second pool holds what was written to the windowed blocks; a block's next owner overwrites its content.
    """

    def __init__(self, scheduler: Scheduler, fail_at: frozenset[int] = frozenset()) -> None:
        super().__init__(scheduler, fail_at)
        self.windows: WindowBlocks = scheduler.block_manager.windows
        self.batch = self.make_batch(scheduler)
        self.batch.windows = self.windows
        self.windowed_pool: list[tuple[int, int] | None] = [None] * (self.windows.num_blocks * self.block_size)
        self.sent: list[list[int]] = []  # for each entry of a step, the windowed block of each of its blocks
        self.most_used = 0

    def make_batch(self, scheduler: Scheduler) -> HybridBatch:
        return HybridBatch(InputBatch(scheduler.max_num_seqs, scheduler.capacity + 1, self.block_size))

    def launch(self, step: ScheduledStep) -> LateTokens:
        self.sent = []
        self.most_used = max(self.most_used, self.windows.num_used)
        return super().launch(step)

    def check_table(self, table: list[int], blocks: list[int]) -> None:
        width = len(table) // 2
        blocks = blocks[:width]
        assert table[: len(blocks)] == blocks  # behind them may be some of wrong guesses
        self.sent.append(table[width:])

    def compute(self, step: ScheduledStep, on_device: int) -> Sampled:
        sampled = super().compute(step, on_device)
        for i in range(len(step)):  # all is written before anything is read
            self._write(step, i)
        for i in range(len(step)):
            self._check(step, i)
        return sampled

    def _windowed_slot(self, i: int, position: int) -> int:
        return self.sent[i][position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, step: ScheduledStep, i: int) -> None:
        for position in range(step.starts[i], step.starts[i] + step.num_tokens[i]):
            token = self.pool[self._slot(step.sequences[i], position)]
            self.windowed_pool[self._windowed_slot(i, position)] = token

    def _check(self, step: ScheduledStep, i: int) -> None:
        start, end = step.starts[i], step.starts[i] + step.num_tokens[i]
        for position in range(max(0, start - self.windows.window + 1), end):
            right = self.pool[self._slot(step.sequences[i], position)]
            assert self.windowed_pool[self._windowed_slot(i, position)] == right, f"position {position} is lost"


class GuessingWindowRunner(WindowRunner):
    """The same for steps with guesses of the host."""

    def make_batch(self, scheduler: Scheduler) -> HybridBatch:
        most_rows = min(scheduler.max_num_seqs * 7, scheduler.max_num_batched_tokens)
        return HybridBatch(DraftBatch(most_rows, scheduler.capacity + 1, self.block_size))

    known_tokens = DraftRunner.known_tokens


def windowed(
    options: dict[str, object], window: int, spare: int, guesses: int = 0
) -> Callable[..., HybridBlockManager]:
    """What makes the block manager of two pools, the windowed one as small as may be, or `spare` blocks larger."""
    blocks, size, tokens = options["num_blocks"], options["block_size"], options["max_num_batched_tokens"]
    limits = Limits(window, 4096, options["max_num_seqs"], tokens, guesses)
    least = limits.held(size) + limits.of_a_step(size)
    pools = SimpleNamespace(num_blocks=blocks, num_window_blocks=min(blocks, least + spare), block_size=size)
    pools.limits = limits
    return partial(HybridBlockManager, WindowBlocks(pools))


def make_windowed(
    *,
    window: int,
    spare: int,
    late: bool = True,
    fail_at: frozenset[int] = frozenset(),
    max_model_len: int = 4096,
    **options: object,
) -> Calls:
    scheduler = Scheduler(block_manager_class=windowed(options, window, spare), **options)
    return calls_of(Engine(scheduler, WindowRunner(scheduler, fail_at), depth=int(late)), max_model_len)


def make_guessing_windowed(
    *,
    drafter: object,
    window: int,
    spare: int,
    fail_at: frozenset[int] = frozenset(),
    max_model_len: int = 4096,
    **options: object,
) -> Calls:
    max_rows = min(options["max_num_seqs"] * 7, options["max_num_batched_tokens"])
    manager = windowed(options, window, spare, guesses=6)
    scheduler = Scheduler(new_sequence=guessing_sequence, block_manager_class=manager, **options)
    runner, counters = GuessingWindowRunner(scheduler, fail_at), SpeculationCounters()
    drafts = HostDrafts(drafter, DraftRows(scheduler, max_rows), counters)
    return calls_of(Engine(scheduler, runner, depth=1, drafts=drafts, counters=counters), max_model_len)


Make = Callable[..., Calls]
ROWS: dict[str, Callable[[int, float], Make]] = {  # by a seed, and how often guesses are wrong
    "one step ahead": lambda seed, errors: partial(make_plain, late=True),
    "guesses": lambda seed, errors: partial(make_guessing, drafter=HashDrafter(seed, errors, 6)),
    "guesses, no overlap": lambda seed, errors: partial(
        make_guessing, drafter=HashDrafter(seed, errors, 6), overlap=False
    ),
    "guesses of the device": lambda seed, errors: partial(make_ahead, drafter=Sometimes(seed), error_rate=errors),
    "stages": lambda seed, errors: make_pipeline,
    "two pools": lambda seed, errors: partial(make_windowed, window=seed % 11 + 1, spare=seed % 7),
    "two pools, guesses": lambda seed, errors: partial(
        make_guessing_windowed, drafter=HashDrafter(seed, errors, 6), window=seed % 11 + 1, spare=seed % 7
    ),
    "guesses on stages": lambda seed, errors: partial(make_guessing_pipeline, drafter=HashDrafter(seed, errors, 6)),
}
