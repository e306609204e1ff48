"""The tokens of the running sequences, on the device, so that the device can guess and verify without the host.

A step is launched before the host knows how many guesses of the previous step were right. So the host does not know the
positions of the next step. The device does: it has a table with a row per batch slot, which holds the known tokens and
then the guesses. For every row of a step,

    before the model    write guesses after the known tokens: the text after the last occurrence of these tokens
                        position = the last known token's + the row's number within its sequence
                        token = the table's at this position; slot, context length and noise follow from the position
    after the sampler   write each sampled token one position further
                        a row whose token is not the one that the row before it sampled ran on a wrong guess

This file has tensor operations with fixed shapes, for a CPU. On a GPU they would be some seventy small kernels, so
there are three kernels instead (`token_table_kernels.py`), inside the step's CUDA graph. The host reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from beyond.speculation.ngram import SIZE
from beyond.speculation.sequence import WRONG
from stage_d_paged.batch import upload
from stage_e_batching.step import BatchSequence
from stage_f_graph_tp.step_input import StepInput

NoiseKeys = Callable[[BatchSequence, int], np.ndarray]  # of a sequence's first n sampled tokens, int32


class TokenTable:
    """Known and guessed tokens by batch slot.

    Args:
        num_slots: batch slots; one more is for padding rows.
        max_model_len: the longest sequence.
        draft_tokens: guesses per sequence.
        device: where the model computes.
    """

    def __init__(self, num_slots: int, max_model_len: int, draft_tokens: int, device: torch.device) -> None:
        width = max_model_len + draft_tokens + 1
        self.tokens = torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device)
        self.noise = torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device)  # key at each position
        self.last = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # position of the last known token
        self.limits = torch.full_like(self.last, -1)  # the last position that is run; none of a padding row is
        self._columns = torch.arange(width, device=device)
        self._back = torch.arange(1 - SIZE, 1, device=device)
        self._ahead = torch.arange(draft_tokens, device=device)
        self._kernels = None
        if device.type == "cuda":
            from beyond.speculation import token_table_kernels

            self._kernels = token_table_kernels

    def enter(self, sequences: list[BatchSequence], noise_keys: NoiseKeys, last_tokens: Tensor) -> None:
        """Copy sequences to their batch slots in one transfer. Their last tokens may still be in flight.

        Args:
            last_tokens: int64, by batch slot; has their last tokens by the time the device runs this.
        """
        rows = np.zeros((2, len(sequences), self.tokens.shape[1]), np.int32)
        for row, sequence in enumerate(sequences):
            known, first = sequence.token_ids, sequence.num_prompt_tokens - 1  # from there on tokens are sampled
            rows[0, row, : len(known)] = known
            rows[1, row, first : sequence.max_total_tokens - 1] = noise_keys(
                sequence, sequence.max_total_tokens - 1 - first
            )
        # A sequence's last possible token is sampled but not run.
        facts = [(s.batch_slot, len(s) - 1, s.max_total_tokens - 2) for s in sequences]
        (slots, last, limits), (tokens, noise) = upload([np.array(facts).T, rows], self.tokens.device)
        for table, values in ((self.tokens, tokens), (self.noise, noise), (self.last, last), (self.limits, limits)):
            table.index_copy_(0, slots, values)
        self.tokens[slots, last] = last_tokens[slots].int()

    def resolve(self, inputs: StepInput, num_rows: int, block_size: int) -> None:
        """Guess, and complete the first `num_rows` rows of a step's input.

        Args:
            inputs: `positions` are counted from the last known token of each sequence: 0, 1, 2, ….
        """
        self.guess(inputs.batch_slots[:num_rows])
        self.complete(inputs, num_rows, block_size)

    def complete(self, inputs: StepInput, num_rows: int, block_size: int) -> None:
        """Compute tokens, positions, slots, context lengths and noise of rows whose guesses are in the table."""
        if self._kernels:
            self._kernels.complete(self.tokens, self.noise, self.last, self.limits, inputs, num_rows, block_size)
            return
        slots = inputs.batch_slots[:num_rows]
        # Past its limit a sequence repeats the row there, whose token is not needed any more.
        positions = torch.minimum(self.last[slots] + inputs.positions[:num_rows], self.limits[slots])
        inputs.context_lens[:num_rows] = positions + 1
        positions = positions.clamp_(min=0)
        inputs.positions[:num_rows] = positions
        inputs.input_ids[:num_rows] = self.tokens[slots, positions]
        inputs.sampling.noise_keys[:num_rows] = self.noise[slots, positions]
        blocks = inputs.block_tables[:num_rows].gather(1, (positions // block_size)[:, None])[:, 0]  # -1 for padding
        inputs.slot_mapping[:num_rows] = blocks.long() * block_size + positions % block_size

    def guess(self, slots: Tensor) -> None:
        """Write the tokens after the latest earlier occurrence of the last `SIZE` tokens, as `NgramDrafter.draft` does.

        If there is none, guess the last token again, because the row exists in any case.

        Args:
            slots: the batch slot of each row, int64 [rows]. Rows of one sequence are adjacent.
        """
        if self._kernels:
            self._kernels.guess(self.tokens, self.last, slots, len(self._ahead))
            return
        last, known = self.last[slots], self.tokens[slots]  # [rows], [rows, width]
        sought = known.gather(1, (last[:, None] + self._back).clamp_(min=0))  # [rows, SIZE]
        equal = (known.unfold(1, SIZE, 1) == sought[:, None]).all(-1)  # [rows, where the n-gram begins]
        starts = self._columns[: equal.shape[1]]
        earlier = starts < (last - SIZE + 1)[:, None]
        found = torch.where(equal & earlier, starts, -SIZE).amax(1)
        after = torch.where(found >= 0, found + SIZE, last)
        # If the earlier occurrence overlaps the guess, copying continues inside the guess.
        source = after[:, None] + self._ahead % (last + 1 - after)[:, None]
        self.tokens[slots[:, None], last[:, None] + 1 + self._ahead] = known.gather(1, source)

    def keep(self, ids: Tensor, inputs: StepInput, last_tokens: Tensor) -> None:
        """Enter sampled tokens. Tokens that were sampled after a wrong guess become `WRONG` in `ids`.

        A second call with other tokens for the same step corrects the first.

        Args:
            ids: int64 [samples].
            inputs: the step's, as `resolve` left it.
            last_tokens: receives each sequence's last known token, by batch slot.
        """
        if self._kernels:
            self._kernels.keep(self.tokens, self.last, ids, inputs, last_tokens, len(self._ahead))
            return
        rows, slots = inputs.sample_tokens[: len(ids)], inputs.sample_slots[: len(ids)]
        positions = inputs.positions[rows]
        follows = torch.zeros_like(slots, dtype=torch.bool)  # rows that are not the first of their sequence
        follows[1:] = slots[1:] == slots[:-1]
        wrong = follows.clone()
        wrong[1:] &= ids[:-1] != inputs.input_ids[rows[1:]]
        # The last known token was sampled by the row before the first wrong row, or by the last row if none is wrong.
        sampled_at = positions + 1
        ends = torch.where(follows.roll(-1), self.tokens.shape[1], sampled_at)
        ends = torch.where(wrong, sampled_at.roll(1), ends)
        self.last.scatter_reduce_(0, slots, ends, "amin", include_self=False)
        last = self.last[slots]
        self.tokens[slots, sampled_at] = ids.int()
        last_tokens[slots] = self.tokens[slots, last].long()
        ids.masked_fill_(sampled_at > last, WRONG)
