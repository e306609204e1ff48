"""A step's input if the device makes the guesses: it is launched before the results of the step in flight are known.

The host sends a lower bound of each sequence's position. `TokenTable` computes the rest on the device, inside the
verification's graph: guesses, tokens, positions, slots, and after sampling which rows ran on the right tokens.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from beyond.speculation.sequence import DRAFT, NUM_UNSURE
from beyond.speculation.token_table import TokenTable
from stage_e_batching.sampler import Sampler
from stage_e_batching.step import BatchSequence, ScheduledStep
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.step_input import StepInput, StepShape, TokenSource


def is_ahead(step: ScheduledStep) -> bool:
    """Whether a step has guesses, or follows a step whose guesses are not resolved on the host yet."""
    decodes = step.sequences[: step.num_decodes]
    return any(map(DRAFT, decodes)) or any(map(NUM_UNSURE, decodes))


class TableTokens:
    """The tokens on the device: each batch slot's last token, and the table of known and guessed tokens.

    Args:
        last: each slot's last sampled token.
        table: of the running sequences.
        block_size: tokens in a block.
    """

    def __init__(self, last: LastTokens, table: TokenTable, block_size: int) -> None:
        self.last, self.table, self._block_size = last, table, block_size
        self.by_slot, self.num_slots = last.by_slot, last.num_slots

    def read(self, inputs: StepInput[Tensor], shape: StepShape) -> None:
        """Complete a step's input on the device: guesses, tokens, positions and slots of the decodes."""
        if shape.source == TokenSource.TABLE:
            self.table.resolve(inputs, shape.num_decodes, self._block_size)
        else:
            self.last.read(inputs, shape)

    def keep(self, ids: Tensor, inputs: StepInput[Tensor], shape: StepShape) -> Tensor:
        """Keep a step's tokens; `WRONG` replaces tokens that the host must not use."""
        if shape.source != TokenSource.TABLE:
            return self.last.keep(ids, inputs, shape)
        kept = ids.clone()
        self.table.keep(kept, inputs, self.by_slot)
        return kept


class AheadBatch(InputBatch):
    """Builds a step's input from lower bounds of the sequences' positions.

    Args:
        max_num_seqs, max_model_len, block_size: see `InputBatch`.
        draft_tokens: how many tokens further each sequence may be.
        tokens: on the device; new sequences are entered there.
        sampler: computes their noise keys.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        draft_tokens: int,
        tokens: TableTokens,
        sampler: Sampler,
    ) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        self._draft_tokens, self._tokens, self._sampler = draft_tokens, tokens, sampler
        self._entered: set[BatchSequence] = set()  # sequences whose tokens are all in the table
        self._completes = False  # whether the device completes the current step

    def update(self, step: ScheduledStep) -> None:
        """Update the tables for the step; the token table too, because steps without guesses do not write to it."""
        super().update(step)
        self._completes = is_ahead(step)
        if not self._completes:
            self._entered = set()
            return
        decoding = set(step.sequences[: step.num_decodes])
        new = [sequence for sequence in decoding if sequence not in self._entered]
        if new:
            self._tokens.table.enter(new, self._noise_keys, self._tokens.by_slot)
        self._entered = decoding

    def shape_of(self, step: ScheduledStep) -> StepShape:
        """Return the sizes of a step's input, with room for tokens that the host does not know yet."""
        shape = super().shape_of(step)
        if not self._completes:
            return shape
        longest = min(shape.max_context_len + self._draft_tokens, self.max_model_len)
        width = -(-longest // self.block_size)
        return shape._replace(max_context_len=longest, table_width=width, source=TokenSource.TABLE)

    def _fill_decodes(self, step: ScheduledStep, out: StepInput) -> np.ndarray:
        generated = super()._fill_decodes(step, out)
        if self._completes:
            rows = np.arange(step.num_decodes)
            firsts = np.where(np.diff(out.batch_slots[: len(rows)], prepend=-1) != 0, rows, 0)
            out.positions[: len(rows)] = rows - np.maximum.accumulate(firsts)
        return generated

    def _noise_keys(self, sequence: BatchSequence, count: int) -> np.ndarray:
        return self._sampler.noise_keys(np.full(count, sequence.batch_slot), np.arange(count))
