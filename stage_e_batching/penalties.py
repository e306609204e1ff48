"""Penalties for many requests at once: counts of the tokens used, kept on the device.

Stage A looks through a request's tokens at every step. Here each request that asks for a penalty has a row in two
tables on the device, how often each token was generated and which tokens its prompt holds, and a step adds its own
token to them. The token need not pass through the CPU for that. Requests without penalties have no row.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stage_a_naive.sampling import SamplingParams
from stage_e_batching.step import BatchSequence


class PenaltyState:
    """Token counts of the batch slots that need them.

    Args:
        max_num_seqs: sequences that can run at the same time.
        vocab_size: columns of the tables.
        device: where the tables live; they are made when first needed, and grow by doubling.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._row_of_slot = np.full(max_num_seqs, -1, np.int64)
        self._strengths = np.zeros((max_num_seqs, 3), np.float32)  # repetition, presence, frequency
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # generated, by token
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def admit(self, sequence: BatchSequence, params: SamplingParams) -> None:
        """Count the tokens of a sequence that was given a batch slot (perhaps again, after a preemption).

        It may break off anywhere: which rows are in use is read off the slots, and the slot gets its row at the end.
        """
        slot = sequence.batch_slot
        self._row_of_slot[slot] = -1  # the slot's last sequence has left
        if not params.needs_penalties:
            return
        row = self._free_row()
        prompt = torch.tensor(sequence.request.prompt_token_ids, device=self._device)
        output = torch.tensor(sequence.token_ids[len(prompt) :], dtype=torch.int64, device=self._device)
        self._in_prompt[row] = False
        self._in_prompt[row, prompt] = True
        self._counts[row] = torch.bincount(output, minlength=self._counts.shape[1])
        self._strengths[slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._row_of_slot[slot] = row

    def _free_row(self) -> int:
        """Return a row of the tables that no slot has; if there is none, make the tables twice as long."""
        num_rows = len(self._in_prompt)
        free = np.setdiff1d(np.arange(num_rows), self._row_of_slot)
        if len(free):
            return int(free[0])
        more = (0, 0, 0, max(1, num_rows))
        self._counts, self._in_prompt = (F.pad(table, more) for table in (self._counts, self._in_prompt))
        return num_rows

    def apply(self, logits: Tensor, batch_slots: np.ndarray) -> Tensor:
        """Return new logits `[rows, vocab]`, float32, of these batch slots; rows without penalties are as they were."""
        asking = np.flatnonzero(self._row_of_slot[batch_slots] >= 0)
        at = torch.from_numpy(asking).to(self._device)
        counts, seen = self._tables_of(batch_slots[asking])
        strengths = torch.from_numpy(self._strengths[batch_slots[asking]]).to(self._device)
        repetition, presence, frequency = strengths.T.unsqueeze(-1)  # each [asking, 1]
        logits = logits.to(torch.float32, copy=True)
        scores = logits[at]  # [asking, vocab]
        scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
        logits[at] = torch.where(counts > 0, scores - (presence + frequency * counts), scores)
        return logits

    def _tables_of(self, batch_slots: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self._row_of_slot[batch_slots]).to(self._device)
        counts = self._counts[rows]  # [asking, vocab]
        return counts, self._in_prompt[rows] | (counts > 0)

    def count(self, batch_slots: np.ndarray, ids: Tensor) -> None:
        """Add the tokens `[rows]` just sampled for these batch slots."""
        asking = np.flatnonzero(self._row_of_slot[batch_slots] >= 0)
        rows = torch.from_numpy(self._row_of_slot[batch_slots[asking]]).to(self._device)
        sampled = ids[torch.from_numpy(asking).to(self._device)]
        one = torch.ones((), dtype=torch.int32, device=self._device)
        self._counts.index_put_((rows, sampled), one, accumulate=True)
