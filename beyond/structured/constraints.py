"""Masks in a step: the tokens of requests that want a form, chosen among those that their grammars allow.

The mask of step n + 1 needs token n, and stage F launches step n + 1 before the host knows token n. So a step is cut in
two, and the second part alone waits:

    CPU  [launch forward n + 1]……[token n arrives][fill masks][launch: copy masks, choose again]
    GPU  …forward n, choose n   ][ forward n + 1                               ][ choose n + 1 ]

The step chooses a token for every row as always, in its CUDA graph or megakernel if it has one. Behind it the rows with
a grammar are chosen for again, from the same logits, where a token that its mask forbids has the lowest score there is.
So rows without a grammar keep their tokens bit by bit, and nothing that is recorded has to know of masks.

A mask is a bit per token. The masks of a step travel in one pinned copy, and are unpacked on the device.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from beyond.structured.grammars import Grammars, Matcher
from stage_a_naive.checkpoints.loading import ModelSource
from stage_a_naive.contract.structured_outputs import GrammarError
from stage_d_paged.batch import upload
from stage_d_paged.runtime import Runtime
from stage_e_batching.llm import make_sampler
from stage_e_batching.options import BatchingOptions
from stage_e_batching.sampler import Sampler, SamplerInput
from stage_e_batching.sampler.sampler import Choose
from stage_e_batching.step import BatchSequence

MOST_THREADS = 8


class Constraints:
    """The grammars of the sequences in the batch slots: a part of the sampler.

    Args:
        grammars: compile what requests ask for.
        max_num_seqs: batch slots.
        vocab_size, device: of the logits.
    """

    def __init__(self, grammars: Grammars, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.grammars = grammars
        self._device, self._words = device, -(-vocab_size // 32)
        # By batch slot: a matcher, why there is none although the request wants a form, or None.
        self._matchers: list[Matcher | GrammarError | None] = [None] * max_num_seqs
        # The tokens chosen last, on their way to the host: whose they are, the copy, and when it has arrived.
        self._chosen: tuple[list[Matcher], Tensor, torch.cuda.Event | None] | None = None
        self._powers = 2 ** torch.arange(8, dtype=torch.uint8, device=device)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="masks")

    def admit(self, sequence: BatchSequence) -> bool:
        """Take over a sequence in its batch slot, with the tokens that it has; returns whether it wants a form.

        After a preemption and after a step that broke off, every sequence is admitted again: its matcher is made anew
        from the tokens that are certain.
        """
        form, matcher = sequence.request.params.structured_outputs, None
        if form is not None:
            try:
                matcher = self.grammars.start(form)
                matcher.accept(sequence.token_ids[sequence.num_prompt_tokens :])
            except GrammarError as error:
                matcher = error
        self._matchers[sequence.batch_slot] = matcher
        return form is not None

    def choose(
        self, logits: Tensor, ids: Tensor, rows: SamplerInput, batch_slots: np.ndarray, choose: Choose
    ) -> dict[int, Exception]:
        """Choose the tokens of rows with a grammar again, into `ids`.

        Args:
            logits: `[rows, vocab]`, of the model.
            ids: int64 `[rows]`.
            rows: what they ask of the sampler.
            batch_slots: of the rows, on the host.
            choose: the sampler, which counts nothing.

        Returns:
            why a row has no token, by row.
        """
        found = [(row, self._matchers[slot]) for row, slot in enumerate(batch_slots.tolist())]
        errors: dict[int, Exception] = {row: error for row, error in found if isinstance(error, GrammarError)}
        constrained = [(row, matcher) for row, matcher in found if isinstance(matcher, Matcher)]
        if not constrained:
            return errors
        self._accept_chosen()
        at, matchers = [row for row, _ in constrained], [matcher for _, matcher in constrained]
        masks = np.zeros((len(at), self._words), np.int32)
        fill = map if len(at) == 1 else self._threads.map
        errors |= {row: error for row, error in zip(at, fill(_fill, matchers, masks), strict=True) if error is not None}
        places, bits = upload([np.array(at), masks], self._device)
        chosen = choose(
            forbid(logits.index_select(0, places), bits, self._powers),
            SamplerInput(*(column.index_select(0, places) for column in rows)),
        )
        ids.index_copy_(0, places, chosen)
        self._keep(matchers, chosen)
        return errors

    def _keep(self, matchers: list[Matcher], chosen: Tensor) -> None:
        """Start the copy of the tokens that were chosen to the host."""
        if self._device.type != "cuda":
            self._chosen = matchers, chosen, None
            return
        host = torch.empty(len(chosen), dtype=torch.int64, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._chosen = matchers, host, arrived

    def _accept_chosen(self) -> None:
        """Wait for the tokens that were chosen last, and let the grammars go on by them."""
        if self._chosen is None:
            return
        (matchers, ids, arrived), self._chosen = self._chosen, None
        if arrived is not None:
            arrived.synchronize()
        for matcher, token_id in zip(matchers, ids.tolist(), strict=True):
            matcher.accept([token_id])


def _fill(matcher: Matcher, mask: np.ndarray) -> GrammarError | None:
    try:
        matcher.fill(mask)
    except GrammarError as error:
        return error
    return None


def forbid(logits: Tensor, bits: Tensor, powers: Tensor) -> Tensor:
    """Give the tokens whose bit is 0 the lowest score.

    Args:
        logits: `[rows, vocab]`.
        bits: int32 `[rows, ceil(vocab / 32)]`, as `Matcher.fill` writes them.
        powers: uint8 `[8]`, 1, 2, 4, …, 128.

    Returns:
        a new `[rows, vocab]`. The lowest score is not -inf: kernels subtract the highest score of a part of the row,
        which may be forbidden as a whole. That of float16 is not low enough: at a high temperature noise outdoes it.
    """
    if logits.dtype == torch.float16:
        logits = logits.float()
    allowed = bits.view(torch.uint8)[:, :, None] & powers  # [rows, bytes, 8]: the bytes of a word are little-endian
    forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
    return logits.masked_fill(forbidden, torch.finfo(logits.dtype).min)


def constrained_sampler(runtime: Runtime, options: BatchingOptions, source: ModelSource) -> Sampler:
    """Make a sampler whose requests may ask for a form."""
    vocab_size = runtime.config.vocab_size
    grammars = Grammars(source, vocab_size)
    return make_sampler(runtime, options, Constraints(grammars, options.max_num_seqs, vocab_size, runtime.device))
