"""From a scheduled step to the model's input, with no loop over tokens or decodes.

What a request brings with it (its block table, its prompt's length) is kept in numpy tables with a row for each batch
slot. A row is filled when a sequence is admitted, and written again only when the sequence gets a block. The rows of
all decodes are gathered with whole-array operations, and a chunk of a prompt is a slice of each array; Python's part is
proportional to what changed.
"""

from __future__ import annotations

import numpy as np

from stage_d_paged.sequence import pack
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
        self._positions = np.arange(self.max_blocks * block_size)

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
        """Write a step's input, all but the sampler's part, into host views of its size or larger.

        Returns:
            how many tokens each sampling sequence has generated before, int64 [samples].
        """
        seqs = len(step.sequences)
        batch_slots = np.array([sequence.batch_slot for sequence in step.sequences])  # [seqs]
        starts = np.array(step.starts)
        ends = starts + step.num_tokens
        out.batch_slots[:seqs] = batch_slots
        out.context_lens[:seqs] = ends
        out.block_tables[:seqs] = self._tables[:, : out.block_tables.shape[1]][batch_slots]
        self._fill_decodes(step, batch_slots, starts, out)
        self._fill_prompts(step, out)
        sampling = slice(seqs) if all(step.samples) else np.flatnonzero(step.samples)
        sampling_slots = batch_slots[sampling]
        samples = len(sampling_slots)
        out.sample_slots[:samples] = sampling_slots
        out.sample_tokens[:samples] = out.cu_seqlens_q[1:][sampling] - 1
        return ends[sampling] - self._prompt_lens[sampling_slots]

    def _fill_decodes(self, step: ScheduledStep, batch_slots: np.ndarray, starts: np.ndarray, out: StepInput) -> None:
        """Write the sequences that run one token. Which token it is, is known on the device."""
        decodes = step.num_decodes
        out.cu_seqlens_q[: decodes + 1] = np.arange(decodes + 1)
        if decodes:
            positions = starts[:decodes]
            blocks = self._tables[batch_slots[:decodes], positions // self.block_size]
            out.input_ids[:decodes] = 0
            out.positions[:decodes] = positions
            out.slot_mapping[:decodes] = blocks * np.int64(self.block_size) + positions % self.block_size

    def _fill_prompts(self, step: ScheduledStep, out: StepInput) -> None:
        """Write the chunks of prompts, each by slices of what is there."""
        block_size, first = self.block_size, step.num_decodes
        for i in range(step.num_decodes, len(step.sequences)):
            sequence, start, count = step.sequences[i], step.starts[i], step.num_tokens[i]
            end, last = start + count, first + count
            out.cu_seqlens_q[i + 1] = last
            out.input_ids[first:last] = np.frombuffer(pack(sequence.token_ids[start:end]), np.int32)
            out.positions[first:last] = self._positions[start:end]
            block = start // block_size
            blocks = self._tables[sequence.batch_slot, block : -(-end // block_size)]
            slots = np.add.outer(blocks * np.int64(block_size), self._positions[:block_size]).ravel()
            out.slot_mapping[first:last] = slots[start - block * block_size :][:count]
            first = last
