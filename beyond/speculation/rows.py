"""Rows for drafts: a sequence with a draft runs several rows in a step, one per token.

Each row runs as a decode with a separate position and context length, and shares the block table of its sequence. In
every layer a step stores all keys and values before it reads any, so the row of the third guess sees the keys of the
first two. No kernel has to know which rows belong together.

Guesses do not count until they are accepted: they are not in `num_computed_tokens`, so they never enter the prefix
cache, and the blocks of wrong guesses are freed.
"""

from __future__ import annotations

from typing import cast

from beyond.speculation.sequence import DRAFT
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep


def shrink(manager: BlockManager, sequence: Sequence) -> None:
    """Free the blocks past a sequence's computed tokens, which are not in the prefix cache."""
    table = sequence.block_table
    while len(table) > manager.blocks_for(sequence.num_computed_tokens):
        block = table.pop()
        manager._ref_counts[block] = 0
        manager._free[block] = None
        manager._free.move_to_end(block, last=False)  # reuse it first: nothing is lost


class ShrinkingBlockManager(BlockManager):
    """A block manager whose sequences can become shorter."""

    shrink = shrink


class DraftRows:
    """Adds rows for guesses to the steps of a scheduler, and reserves their blocks.

    Args:
        scheduler: schedules steps with one row per decode; uses a `ShrinkingBlockManager`.
        max_rows: rows of a step, at most: sequences and guesses.
    """

    def __init__(self, scheduler: Scheduler, max_rows: int) -> None:
        self._scheduler = scheduler
        self._max_rows = max_rows

    @property
    def decoding(self) -> list[BatchSequence]:
        """The sequences that may have a draft."""
        return self._scheduler.decoding

    def add(self, step: ScheduledStep) -> None:
        """Give each decoding sequence one more row per token of its draft, while there is room."""
        decodes = step.num_decodes
        if not any(map(DRAFT, step.sequences[:decodes])):
            return
        spare = min(self._max_rows - len(step), self._scheduler.max_num_batched_tokens - step.total_tokens)
        sequences, starts = [], []
        for sequence, start in zip(step.sequences[:decodes], step.starts[:decodes], strict=True):
            if sequence.guesses.draft:
                self._fit(sequence, step, spare)
                spare -= len(sequence.guesses.draft)
            count = 1 + len(sequence.guesses.draft)
            sequences += [sequence] * count
            starts += range(start, start + count)
        step.sequences[:decodes], step.starts[:decodes] = sequences, starts
        step.num_decodes = len(sequences)
        step.num_tokens[:decodes] = [1] * len(sequences)
        step.samples[:decodes] = [True] * len(sequences)

    def _fit(self, sequence: BatchSequence, step: ScheduledStep, most: int) -> None:
        """Reserve blocks for a draft, or shorten it to the available blocks. It never preempts a request."""
        table, blocks = sequence.block_table, len(sequence.block_table)
        manager = self._scheduler.block_manager
        del sequence.guesses.draft[most:]
        # A step that is launched ahead may begin after all guesses of this step and of the one in flight.
        certain = sequence.num_computed_tokens + sequence.guesses.num_unsure + 1
        reach = min(certain + len(sequence.guesses.draft), sequence.max_total_tokens - 1)
        if not manager.allocate(sequence, reach, watermark=len(self.decoding)):
            del sequence.guesses.draft[max(0, blocks * manager.block_size - certain) :]
        if len(table) > blocks:
            step.grown.append(sequence)

    def trim(self, sequence: BatchSequence) -> None:
        """After a verification, index the accepted tokens and free the blocks of the others."""
        manager = cast("ShrinkingBlockManager", self._scheduler.block_manager)
        manager.index_computed(sequence)
        if not sequence.guesses.num_unsure:
            manager.shrink(sequence)
            self._scheduler.note_room()

    def forget(self) -> None:
        """Drop all drafts."""
        for sequence in self._scheduler.unfinished:
            sequence.guesses.draft, sequence.guesses.num_unsure = [], 0
