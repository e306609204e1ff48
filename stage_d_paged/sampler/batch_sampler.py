"""The sampler of a batch: the sampling parameters of each row, and the next tokens of all rows in one call.

Stage A samples row by row, with some thirty operators for each row with a temperature. For a batch that is thousands of
launches per step, while the model needs a few hundred. So the parameters of all rows are stored in arrays, which are
filled in once per request, and every operator works on all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.contract.filters import HOTTEST, SMALLEST
from stage_a_naive.contract.noise import mix32
from stage_a_naive.contract.outputs import Completion
from stage_a_naive.sampling import choose_tokens
from stage_d_paged.batch import upload
from stage_d_paged.sampler.reference import count_tokens, filtered, penalised, sample_reference
from stage_d_paged.sampler.rules import FLAGS, LOGPROBS, RANDOM, WORDS, SamplerInput, rules_of

MOST_INT16 = 2**14  # up to this many tokens, twice a token's count fits into an int16
GROUP = 2**24  # logits to process at a time: sorted, as 64-bit weights and with noise, each takes some forty bytes


class BatchSampler:
    """Chooses tokens for the sequences in the rows of a batch.

    Args:
        num_rows: rows of the batch.
        num_penalised: this many rows, from the first on, have a row in the table of counts.
        vocab_size, device: of the logits.
        max_model_len: the longest sequence.

    Attributes:
        counts: the table that penalties read, `[num_penalised, vocab]`; see `reference.py`.
    """

    def __init__(
        self, num_rows: int, num_penalised: int, vocab_size: int, max_model_len: int, device: torch.device
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._rules = np.zeros((num_rows, WORDS), np.int32)
        self._temperatures = np.zeros(num_rows, np.float32)
        self._seed_keys = np.zeros(num_rows, np.int64)
        dtype = torch.int16 if max_model_len < MOST_INT16 else torch.int32
        self.counts = torch.zeros(num_penalised, vocab_size, dtype=dtype, device=device)
        self._mixed_ids = mix32(torch.arange(vocab_size, device=device))  # the hash of every token id

    # ---- the host's part ---------------------------------------------------------------------------------------

    def enter(self, row: int, completion: Completion, replaced: bool = False) -> None:
        """Store a request's sampling parameters in its row of the batch; `completion` has its tokens so far.

        Args:
            replaced: whether its tokens are chosen again after the step.
        """
        params, seed = completion.request.params, completion.request.seed
        if params.needs_penalties:
            self._count(row, completion)
        self._temperatures[row] = min(max(params.temperature, SMALLEST), HOTTEST) if params.temperature else 0.0
        if params.temperature:
            self._seed_keys[row] = mix32(mix32(seed & 0xFFFFFFFF) ^ (seed >> 32))
        self._rules[row] = rules_of(params, replaced, self._vocab_size, row)

    def _count(self, row: int, completion: Completion) -> None:
        """Count a sequence's tokens so far: its prompt's and, after a restart, its generated ones."""
        pinned = self._device.type == "cuda"
        entries = torch.zeros(self._vocab_size, dtype=self.counts.dtype, pin_memory=pinned)
        if output := completion.token_ids:
            entries += 2 * torch.bincount(torch.tensor(output), minlength=self._vocab_size)
        entries.numpy()[completion.request.prompt_token_ids] += 1
        self.counts[row].copy_(entries, non_blocking=True)

    def fill(self, batch_rows: np.ndarray, steps: np.ndarray, out: SamplerInput[np.ndarray]) -> int:
        """Write the sampling parameters of each row of a step into its input on the host.

        Args:
            batch_rows: the row of the batch for each row of the step.
            steps: how many tokens each has generated.
            out: the input, with at least as many rows. If every row is greedy, no noise key is read, and none is made.

        Returns:
            the flags of all rows, combined.
        """
        count, flags = len(batch_rows), self._rules[batch_rows, FLAGS]
        needs = int(np.bitwise_or.reduce(flags))
        out.temperatures[:count] = self._temperatures[batch_rows]
        if needs & RANDOM:
            out.noise_keys[:count] = self.noise_keys(batch_rows, steps)
        if needs & ~RANDOM:
            out.rules[:count] = self._rules[batch_rows]
        else:
            out.rules[:count, FLAGS] = flags
        if needs & LOGPROBS:
            asking = np.flatnonzero(flags & LOGPROBS)
            out.asking[: len(asking)] = asking
        return needs

    def noise_keys(self, batch_rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the bits of `noise_key(seed, step)` for rows of the batch, int32; greedy rows need none."""
        return mix32(self._seed_keys[batch_rows] ^ steps).astype(np.uint32).view(np.int32)

    # ---- the device's part -------------------------------------------------------------------------------------

    def choose_for(self, logits: Tensor, completions: Sequences[Completion], batch_rows: list[int]) -> Tensor:
        """Choose the next token of each request, as stage A's `choose_tokens` does, and count it for penalties.

        Args:
            logits: `[rows, vocab]`, float32.
            completions: the answers so far; all their requests have the same `sampling_fn`.
            batch_rows: their rows of the batch.
        """
        steps = np.array([completion.num_generated_tokens for completion in completions])
        on_host = SamplerInput.empty(len(batch_rows))
        if not self.fill(np.array(batch_rows), steps, on_host) & ~LOGPROBS:  # greedy: nothing to upload
            return choose_tokens(logits, completions, sample=lambda logits, *_: logits.argmax(-1))
        rows = SamplerInput(*upload(list(on_host), self._device))
        ids = choose_tokens(
            logits,
            completions,
            penalise=lambda logits, *_: _in_groups(self._penalise, logits, rows),
            sample=lambda logits, *_: _in_groups(self._sample, logits, rows),
        )
        count_tokens(self.counts, rows.rules, ids.clamp(min=0), torch.ones_like(ids, dtype=torch.bool))
        return ids

    def _penalise(self, logits: Tensor, rows: SamplerInput[Tensor]) -> Tensor:
        return penalised(logits, rows.rules, self.counts)

    def _sample(self, scores: Tensor, rows: SamplerInput[Tensor]) -> Tensor:
        scores = filtered(scores, rows.temperatures, rows.rules)
        return sample_reference(scores, rows.temperatures, rows.noise_keys, self._mixed_ids)


def _in_groups(
    compute: Callable[[Tensor, SamplerInput[Tensor]], Tensor], logits: Tensor, rows: SamplerInput[Tensor]
) -> Tensor:
    size = max(1, GROUP // logits.shape[1])
    parts = zip(logits.split(size), *(column.split(size) for column in rows), strict=True)
    return torch.cat([compute(part, SamplerInput(*columns)) for part, *columns in parts])
