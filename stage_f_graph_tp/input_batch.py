"""Build the model's input from a scheduled step, without a loop over tokens or decodes.

The data of a request (its block table, its prompt's length) is kept in numpy tables with one row per batch slot. A row
is written when a sequence is admitted, and again only when the sequence gets a block. The rows of all decodes are
gathered with whole-array operations, and a chunk of a prompt is a slice of each array. So the work in Python is
proportional to what changed.
"""

from __future__ import annotations

from operator import add

import numpy as np

from stage_d_paged.sequence import pack
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.step_input import StepInput, StepShape


class InputBatch:
    """Keeps a table row per batch slot, and builds the input of a step from these tables.

    Args:
        max_num_seqs: sequences that can run at the same time.
        max_model_len, block_size: bound the length of a block table.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self._tables = np.full((max_num_seqs, self.max_blocks), -1, np.int32)
        self._prompt_lens = np.zeros(max_num_seqs, np.int64)
        self._positions = np.arange(self.max_blocks * block_size)

    def update(self, step: ScheduledStep) -> None:
        """Update the tables: rows of admitted sequences, and block tables that have grown."""
        for sequence in step.admitted:
            self._tables[sequence.batch_slot] = -1
            self._prompt_lens[sequence.batch_slot] = sequence.num_prompt_tokens
        for sequence in step.grown:
            table = sequence.block_table
            self._tables[sequence.batch_slot, : len(table)] = table

    def shape_of(self, step: ScheduledStep) -> StepShape:
        """Return the sizes of a step's input. The block table is as wide as the longest context needs."""
        longest = max(map(add, step.starts, step.num_tokens))
        return StepShape(
            num_tokens=step.total_tokens,
            num_seqs=len(step),
            num_samples=sum(step.samples),
            table_width=-(-longest // self.block_size),
            num_decodes=step.num_decodes,
            max_query_len=max(step.num_tokens),
            max_context_len=longest,
        )

    def fill(self, step: ScheduledStep, out: StepInput[np.ndarray]) -> np.ndarray:
        """Write a step's input, except the sampler's part, into host views of its size or larger.

        Returns:
            how many tokens each sampling sequence has generated before, int64 [samples].
        """
        generated = np.zeros(sum(step.samples), np.int64)
        out.cu_seqlens_q[0] = 0
        if step.num_decodes:
            generated[: step.num_decodes] = self._fill_decodes(step, out)
        first = sample = step.num_decodes
        for i in range(step.num_decodes, len(step)):
            last = self._fill_chunk(step, i, first, out)
            if step.samples[i]:
                sequence = step.sequences[i]
                out.sample_slots[sample] = sequence.batch_slot
                out.sample_tokens[sample] = last - 1
                generated[sample] = out.context_lens[i] - sequence.num_prompt_tokens
                sample += 1
            first = last
        return generated

    def _fill_decodes(self, step: ScheduledStep, out: StepInput[np.ndarray]) -> np.ndarray:
        """Write the decodes, which run one token each and all sample. The device knows the tokens."""
        count = step.num_decodes
        batch_slots = np.array([sequence.batch_slot for sequence in step.sequences[:count]])  # [decodes]
        positions = np.array(step.starts[:count])
        rows = np.arange(count + 1)
        blocks = self._tables[batch_slots, positions // self.block_size]
        out.input_ids[:count] = 0
        out.positions[:count] = positions
        out.slot_mapping[:count] = blocks * np.int64(self.block_size) + positions % self.block_size
        out.batch_slots[:count] = out.sample_slots[:count] = batch_slots
        out.sample_tokens[:count] = rows[:-1]
        out.cu_seqlens_q[: count + 1] = rows
        out.context_lens[:count] = positions + 1
        out.block_tables[:count] = self._tables[:, : out.block_tables.shape[1]][batch_slots]
        return positions + 1 - self._prompt_lens[batch_slots]

    def _fill_chunk(self, step: ScheduledStep, i: int, first: int, out: StepInput[np.ndarray]) -> int:
        """Write entry `i` of the step, a chunk of a prompt, from input token `first` on; returns where it ends."""
        sequence, start, count = step.sequences[i], step.starts[i], step.num_tokens[i]
        end, last, table = start + count, first + count, self._tables[sequence.batch_slot]
        out.input_ids[first:last] = np.frombuffer(pack(sequence.token_ids[start:end]), np.int32)
        out.positions[first:last] = self._positions[start:end]
        block = start // self.block_size
        blocks = table[block : -(-end // self.block_size)]
        slots = np.add.outer(blocks * np.int64(self.block_size), self._positions[: self.block_size]).ravel()
        out.slot_mapping[first:last] = slots[start - block * self.block_size :][:count]
        out.batch_slots[i] = sequence.batch_slot
        out.cu_seqlens_q[i + 1] = last
        out.context_lens[i] = end
        out.block_tables[i] = table[: out.block_tables.shape[1]]
        return last
