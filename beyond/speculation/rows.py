"""Rows for drafts: a sequence that has one runs several rows in a step, one per token.

A row is a decode of its own: it has its own position and context length, and shares the block table of its sequence.
In every layer a step stores all keys and values before it reads any, so the row of the third guess sees the keys of
the first two. No kernel has to know that rows belong together.

Guesses count for nothing until they are found right: they are not among `num_computed_tokens`, so the prefix cache
never learns of them, and the blocks that they needed are given back with them.
"""

from __future__ import annotations

from typing import cast

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


class DraftRows:
    """The rows of guesses in the steps of a scheduler, and the blocks that they need.

    Args:
        scheduler: decides the steps, in which a decoding sequence has one row; it has a `ShrinkingBlockManager`.
        max_rows: sequences of one step, every guess counted as one.
    """

    def __init__(self, scheduler: Scheduler, max_rows: int) -> None:
        self._scheduler = scheduler
        self._max_rows = max_rows

    @property
    def decoding(self) -> list[SpeculativeSequence]:
        """The sequences that may have a draft."""
        return cast("list[SpeculativeSequence]", self._scheduler.decoding)

    def add(self, step: ScheduledStep) -> None:
        """Give each sequence that decodes a row more for every token of its draft, as far as there is room."""
        decodes = step.num_decodes
        if not any(map(DRAFT, step.sequences[:decodes])):
            return
        spare = min(self._max_rows - len(step), self._scheduler.max_num_batched_tokens - step.total_tokens)
        sequences, starts = [], []
        for sequence, start in zip(step.sequences[:decodes], step.starts[:decodes], strict=True):
            if sequence.draft:
                self._fit(sequence, step, spare)
                spare -= len(sequence.draft)
            count = 1 + len(sequence.draft)
            sequences += [sequence] * count
            starts += range(start, start + count)
        step.sequences[:decodes], step.starts[:decodes] = sequences, starts
        step.num_decodes = len(sequences)
        step.num_tokens[:decodes] = [1] * len(sequences)
        step.samples[:decodes] = [True] * len(sequences)

    def _fit(self, sequence: SpeculativeSequence, step: ScheduledStep, most: int) -> None:
        """Reserve blocks for a draft, or shorten it to the blocks that there are. No request is preempted for it."""
        table, blocks = sequence.block_table, len(sequence.block_table)
        manager = self._scheduler.block_manager
        del sequence.draft[most:]
        # Where the next step is launched ahead, it may begin behind all guesses of this one and of the one in flight.
        certain = sequence.num_computed_tokens + sequence.num_unsure + 1
        reach = min(certain + len(sequence.draft), sequence.max_total_tokens - 1)
        if not manager.allocate(sequence, reach, watermark=len(self.decoding)):
            del sequence.draft[max(0, blocks * manager.block_size - certain) :]
        if len(table) > blocks:
            step.grown.append(sequence)

    def trim(self, sequence: SpeculativeSequence) -> None:
        """After a verification: index what was found right, and give back the blocks of the rest."""
        manager = cast("ShrinkingBlockManager", self._scheduler.block_manager)
        manager.index_computed(sequence)
        if not sequence.num_unsure:
            manager.shrink(sequence)
            self._scheduler.note_room()

    def forget(self) -> None:
        """Drop all drafts."""
        for sequence in cast("list[SpeculativeSequence]", self._scheduler.unfinished):
            sequence.draft, sequence.num_unsure = [], 0
