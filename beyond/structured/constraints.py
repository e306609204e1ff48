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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from beyond.structured.grammars import Grammars, Masks, Matcher
from stage_a_naive.checkpoints.loading import ModelSource
from stage_a_naive.contract.structured_outputs import GrammarError
from stage_d_paged.batch import upload
from stage_d_paged.runtime import Runtime
from stage_e_batching.llm import make_sampler
from stage_e_batching.options import BatchingOptions
from stage_e_batching.sampler import Sampler, SamplerInput
from stage_e_batching.sampler.sampler import Choose, Penalise
from stage_e_batching.step import BatchSequence

MOST_THREADS = 8
FARTHEST = 1e38  # of a score from 0, where penalties may have no bound: a forbidden token's is lower


@dataclass(eq=False)
class Answer:
    """The answer in a batch slot: its certain tokens, and its point in its grammar behind them."""

    sequence: BatchSequence
    token_ids: list[int]  # the prompt's too; one step ahead of those that the sequence has
    matcher: Matcher | GrammarError  # or why there is none
    memory: Any = None  # what guesses keep of it

    def go_on(self, token_ids: list[int]) -> None:
        """Accept tokens."""
        assert isinstance(self.matcher, Matcher)
        self.token_ids += token_ids[: self.matcher.accept(token_ids)]


Guess = Callable[[Answer, int], list[int]]  # the tokens of an answer's draft, from its number of rows for guesses


class Constraints:
    """The grammars of the sequences in the batch slots: a part of the sampler.

    Args:
        grammars: compile what requests ask for.
        max_num_seqs: batch slots.
        device: of the logits.
        guess: which tokens run in the rows of a draft.
    """

    def __init__(self, grammars: Grammars, max_num_seqs: int, device: torch.device, guess: Guess) -> None:
        self.grammars = grammars
        self._device, self._guess = device, guess
        self._masks = Masks(min(MOST_THREADS, os.cpu_count() or 1))
        self._answers: list[Answer | None] = [None] * max_num_seqs  # by batch slot; None where no form is asked for
        # What was chosen last, on its way to the host: whose rows they are, with their drafts; the copy; its arrival.
        self._chosen: tuple[list[tuple[Answer, int, list[int]]], Tensor, torch.cuda.Event | None] | None = None
        self._powers = 2 ** torch.arange(8, dtype=torch.uint8, device=device)

    def admit(self, sequence: BatchSequence) -> bool:
        """Take over a sequence in its batch slot, with the tokens that it has; returns whether it wants a form.

        After a preemption and after a step that broke off, every sequence is admitted again: its matcher is made anew
        from the tokens that are certain.
        """
        form, answer = sequence.request.params.structured_outputs, None
        if form is not None:
            try:
                matcher = self.grammars.start(form)
                matcher.accept(sequence.token_ids[sequence.num_prompt_tokens :])
                answer = Answer(sequence, list(sequence.token_ids), matcher)
            except GrammarError as error:
                answer = Answer(sequence, [], error)
        self._answers[sequence.batch_slot] = answer
        return form is not None

    def shorten(self, sequence: BatchSequence, draft: list[int]) -> None:
        """End the draft of a sequence where its grammar forbids it, when all tokens are on the host."""
        answer = self._answers[sequence.batch_slot]
        if answer is not None and isinstance(answer.matcher, Matcher):
            self._accept_chosen()
            del draft[answer.matcher.count_allowed(draft) :]

    def rewind(self, sequence: BatchSequence) -> None:
        """Go back to the tokens that a sequence has: those accepted behind them were guesses."""
        self._accept_chosen()
        answer = self._answers[sequence.batch_slot]
        if answer is None or answer.sequence is not sequence or not isinstance(answer.matcher, Matcher):
            return
        known, right = sequence.token_ids, min(len(sequence.token_ids), len(answer.token_ids))
        while answer.token_ids[:right] != known[:right]:
            right -= 1
        if not answer.matcher.roll_back(len(answer.token_ids) - right):
            self.admit(sequence)
            return
        del answer.token_ids[right:]
        answer.go_on(known[right:])

    def choose(
        self,
        logits: Tensor,
        ids: Tensor,
        rows: SamplerInput,
        batch_slots: np.ndarray,
        choose: Choose,
        penalise: Penalise | None,
    ) -> dict[int, Exception]:
        """Choose the tokens of rows with a grammar again, into `ids`.

        Args:
            logits: `[rows, vocab]`, of the model.
            ids: int64 `[rows]`.
            rows: what they ask of the sampler.
            batch_slots: of the rows, on the host; a sequence with a draft has a row more for each guess.
            choose: the sampler, which counts nothing.
            penalise: where a row has penalties. They come before the mask, so that none raises a forbidden token.

        Returns:
            why a sequence has no token, by its first row.
        """
        firsts = np.flatnonzero(np.diff(batch_slots, prepend=-1))
        counts = np.diff(firsts, append=len(batch_slots)).tolist()
        errors: dict[int, Exception] = {}
        constrained: list[tuple[Answer, range]] = []
        for first, count in zip(firsts.tolist(), counts, strict=True):
            answer = self._answers[batch_slots[first]]
            if answer is not None and isinstance(answer.matcher, GrammarError):
                errors[first] = answer.matcher
            elif answer is not None:
                constrained.append((answer, range(first, first + count)))
        if not constrained:
            return errors
        self._accept_chosen()
        at = [row for _, own in constrained for row in own]
        answers, masks, failed = self.fill_masks([(answer, len(own)) for answer, own in constrained])
        errors |= {at[row]: error for row, error in failed.items()}
        places, bits = upload([np.array(at), masks], self._device)
        scores, own_rows = logits.index_select(0, places), rows.at(places)
        if penalise is not None:
            scores = penalise(scores, own_rows.rules).clamp(-FARTHEST, FARTHEST)
            own_rows = own_rows.without_penalties()
        chosen = choose(forbid(scores, bits, self._powers), own_rows)
        ids.index_copy_(0, places, chosen)
        self._keep(answers, chosen)
        return errors

    def fill_masks(
        self, constrained: list[tuple[Answer, int]]
    ) -> tuple[list[tuple[Answer, int, list[int]]], np.ndarray, dict[int, GrammarError]]:
        """Fill the masks of answers with this many rows each, of which all but the first have run a guess.

        Returns:
            each answer with its first row and its draft; the masks, `[rows, words]`; errors by the first row.
        """
        answers, num_rows = [], 0
        for answer, count in constrained:
            draft = self._guess(answer, count - 1) if count > 1 else []
            answers.append((answer, num_rows, draft))
            num_rows += count
        masks = np.full((num_rows, self.grammars.num_words), -1, np.int32)
        errors = self._masks.fill([(answer.matcher, row, draft) for answer, row, draft in answers], masks)
        for (_, row, draft), (_, count) in zip(answers, constrained, strict=True):
            # Rows past the last token that a sequence may have repeat the row of that one.
            masks[row + 1 + len(draft) : row + count] = masks[row + len(draft)]
        return answers, masks, errors

    def _keep(self, answers: list[tuple[Answer, int, list[int]]], chosen: Tensor) -> None:
        """Start the copy of the tokens that were chosen to the host."""
        if self._device.type != "cuda":
            self._chosen = answers, chosen, None
            return
        host = torch.empty(len(chosen), dtype=torch.int64, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._chosen = answers, host, arrived

    def _accept_chosen(self) -> None:
        """Wait for the tokens that were chosen last, and let the grammars go on by them."""
        if self._chosen is None:
            return
        (answers, ids, arrived), self._chosen = self._chosen, None
        if arrived is not None:
            arrived.synchronize()
        self.accept(answers, ids.tolist())

    def accept(self, answers: list[tuple[Answer, int, list[int]]], token_ids: list[int]) -> None:
        """Let each grammar go on by the token of its answer's first row, and of rows behind right guesses."""
        for answer, row, draft in answers:
            tokens = [token_ids[row]]
            while len(tokens) <= len(draft) and draft[len(tokens) - 1] == tokens[-1]:
                tokens.append(token_ids[row + len(tokens)])
            answer.go_on(tokens)


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


def constrained_sampler(runtime: Runtime, options: BatchingOptions, source: ModelSource, guess: Guess) -> Sampler:
    """Make a sampler whose requests may ask for a form; `guess` as in `Constraints`."""
    grammars = Grammars(source, runtime.config.vocab_size)
    return make_sampler(runtime, options, Constraints(grammars, options.max_num_seqs, runtime.device, guess))


def constraints_of(sampler: Sampler) -> Constraints:
    """Return the part that `constrained_sampler` gave to a sampler."""
    assert isinstance(sampler.constraints, Constraints)
    return sampler.constraints
