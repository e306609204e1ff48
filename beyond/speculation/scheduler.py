"""Stage E's scheduler with drafts: a sequence that has one runs several rows in a step, one per token.

A row is a decode of its own: it has its own position and context length, and shares the block table of its sequence.
In every layer a step stores all keys and values before it reads any, so the row of the third guess sees the keys of
the first two. No kernel has to know that rows belong together.

Guesses count for nothing until they are found right: they are not among `num_computed_tokens`, so the prefix cache
never learns of them, and the blocks that they needed are given back with them.
"""

from __future__ import annotations

from typing import Any, cast

from beyond.speculation.sequence import DRAFT, SpeculativeSequence
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import ScheduledStep


class ShrinkingBlockManager(BlockManager):
    """A block manager whose sequences can become shorter."""

    def shrink(self, sequence: Sequence) -> None:
        """Free the blocks past a sequence's computed tokens. They hold nothing that the prefix cache knows."""
        table = sequence.block_table
        while len(table) > self.blocks_for(sequence.num_computed_tokens):
            block = table.pop()
            self._ref_counts[block] = 0
            self._free[block] = None
            self._free.move_to_end(block, last=False)  # nothing is lost if it is handed out next


class DraftScheduler(Scheduler):
    """Decides who runs, and with how many guesses.

    Args:
        max_rows: tokens of decoding sequences, guesses included, that one step runs.
        options: those of `Scheduler`.
    """

    sequence_class = SpeculativeSequence
    decoding: list[SpeculativeSequence]
    block_manager: ShrinkingBlockManager

    def __init__(self, *, max_rows: int, **options: Any) -> None:
        self._max_rows = max_rows
        super().__init__(**options)

    def _start_empty(self) -> None:
        super()._start_empty()
        self.block_manager = ShrinkingBlockManager(*self._pool)

    def _schedule_decodes(self, step: ScheduledStep) -> None:
        """One row per decoding sequence, and one more for each token of its draft that there is room for."""
        super()._schedule_decodes(step)
        if not any(map(DRAFT, step.sequences)):
            return
        spare = self._max_rows - len(step)
        sequences, starts = step.sequences, step.starts
        step.sequences, step.starts = [], []
        for sequence, start in zip(sequences, starts, strict=True):
            if sequence.draft:
                self._fit_draft(sequence, step, spare)
                spare -= len(sequence.draft)
            count = 1 + len(sequence.draft)
            step.sequences += [sequence] * count
            step.starts += range(start, start + count)
        step.num_decodes = len(step)
        step.num_tokens = [1] * len(step)
        step.samples = [True] * len(step)

    def _fit_draft(self, sequence: SpeculativeSequence, step: ScheduledStep, most: int) -> None:
        """Reserve blocks for a draft, or shorten it to the blocks that there are. No request is preempted for it."""
        table, blocks = sequence.block_table, len(sequence.block_table)
        del sequence.draft[most:]
        # Where the next step is launched ahead, it may begin behind all guesses of this one and of the one in flight.
        certain = sequence.num_computed_tokens + sequence.num_unsure + 1
        reach = min(certain + len(sequence.draft), sequence.max_total_tokens - 1)
        if not self.block_manager.allocate(sequence, reach, watermark=len(self.decoding)):
            del sequence.draft[max(0, blocks * self.block_manager.block_size - certain) :]
        if len(table) > blocks:
            step.grown.append(sequence)

    def trim(self, sequence: SpeculativeSequence) -> None:
        """After a verification: index what was found right, and give back the blocks of the rest."""
        self.block_manager.index_computed(sequence)
        if not sequence.num_unsure:
            self.block_manager.shrink(sequence)

    def _vacate(self, sequence: SpeculativeSequence) -> None:
        sequence.draft = []
        super()._vacate(sequence)

    def forget(self) -> None:
        for sequence in cast("list[SpeculativeSequence]", self.unfinished):
            sequence.draft, sequence.num_unsure = [], 0
        super().forget()
