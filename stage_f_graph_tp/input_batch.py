"""From a scheduled step to the model's input, with no loop over the requests.

What a request brings with it (its block table, its prompt's length) is kept in numpy tables with a row for each batch
slot. A row is filled when a sequence is admitted, and written again only when the sequence gets a block. A step gathers
the rows of its sequences with whole-array operations; Python's part is proportional to what changed.
"""

from __future__ import annotations

import numpy as np

from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.step_input import StepInput, StepShape


class InputBatch:
    """The tables of the batch slots, and the building of a step's input from them.

    Args:
        max_num_seqs: sequences that can run at the same time.
        max_model_len, block_size: they bound the length of a block table.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self._tables = np.full((max_num_seqs, self.max_blocks), -1, np.int32)
        self._table_lens = [0] * max_num_seqs
        self._prompt_lens = np.zeros(max_num_seqs, np.int64)

    def update(self, step: ScheduledStep) -> None:
        """Take over what the step changed: the admitted sequences, and the block tables that have grown."""
        for sequence in step.admitted:
            self._tables[sequence.batch_slot] = -1
            self._table_lens[sequence.batch_slot] = 0
            self._prompt_lens[sequence.batch_slot] = sequence.num_prompt_tokens
        for sequence in step.grown:
            row, table = sequence.batch_slot, sequence.block_table
            filled = self._table_lens[row]
            self._tables[row, filled : len(table)] = table[filled:]
            self._table_lens[row] = len(table)

    def shape_of(self, step: ScheduledStep) -> StepShape:
        """The sizes of a step's input. The table is as wide as the longest context needs, and no wider."""
        longest = max(map(int.__add__, step.starts, step.num_tokens))
        return StepShape(
            num_tokens=step.total_tokens,
            num_seqs=len(step),
            num_samples=sum(step.samples),
            table_width=-(-longest // self.block_size),
            num_decodes=step.num_decodes,
            max_query_len=max(step.num_tokens),
            max_context_len=longest,
        )

    def fill(self, step: ScheduledStep, out: StepInput) -> np.ndarray:
        """Write a step's input, all but the sampler's part, into host views of the right shape.

        Returns:
            how many tokens each sampling sequence has generated before, int64 [samples].
        """
        batch_slots = np.array([sequence.batch_slot for sequence in step.sequences])  # [seqs]
        starts, counts = np.array(step.starts), np.array(step.num_tokens)
        ends = starts + counts
        out.batch_slots[:] = batch_slots
        out.context_lens[:] = ends
        out.cu_seqlens_q[0] = 0
        np.cumsum(counts, out=out.cu_seqlens_q[1:])
        out.block_tables[:] = self._tables[batch_slots, : out.block_tables.shape[1]]
        if len(out.positions) == len(batch_slots):  # one token each
            owners, positions = batch_slots, starts  # [tokens]
        else:
            owners = np.repeat(batch_slots, counts)
            positions = np.arange(len(out.positions)) + np.repeat(starts - out.cu_seqlens_q[:-1], counts)
        out.positions[:] = positions
        pages = self._tables[owners, positions // self.block_size]
        np.multiply(pages, self.block_size, out=out.slot_mapping, casting="unsafe", dtype=np.int64)
        np.add(out.slot_mapping, positions % self.block_size, out=out.slot_mapping)
        self._fill_prompt_tokens(step, out)
        if len(out.sample_slots) == len(batch_slots):
            sampling, sampling_ends = slice(None), ends
        else:
            sampling = np.flatnonzero(step.samples)
            sampling_ends = ends[sampling]
        out.sample_slots[:] = batch_slots[sampling]
        out.sample_tokens[:] = out.cu_seqlens_q[1:][sampling] - 1
        return sampling_ends - self._prompt_lens[out.sample_slots]

    def _fill_prompt_tokens(self, step: ScheduledStep, out: StepInput) -> None:
        out.input_ids[: step.num_decodes] = 0
        for i in range(step.num_decodes, len(step)):
            start, count = step.starts[i], step.num_tokens[i]
            first = out.cu_seqlens_q[i]
            out.input_ids[first : first + count] = step.sequences[i].token_ids[start : start + count]
