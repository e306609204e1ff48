"""Token masks in a step: choose the tokens of structured-output requests among those that their grammars allow.

The mask of step n + 1 needs token n, and stage F launches step n + 1 before the host knows token n. So a step is cut in
two, and only the second part waits:

    CPU  [launch forward n + 1]……[token n arrives][fill masks][launch: copy masks, choose again]
    GPU  …forward n, choose n   ][ forward n + 1                               ][ choose n + 1 ]

The step chooses a token for every row as usual, in its CUDA graph or megakernel if it has one. After it, the tokens of
rows with a grammar are chosen again from the same logits, with the lowest possible score for every token that the mask
forbids. So rows without a grammar keep their tokens bit for bit, and recorded steps need not know about masks.

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
FARTHEST = 1e38  # clamp for scores with penalties, which may be unbounded: a forbidden token scores lower


@dataclass(eq=False)
class Answer:
    """The answer in a batch slot: its certain tokens, and the state of its grammar after them."""

    sequence: BatchSequence
    token_ids: list[int]  # with the prompt; one step ahead of the sequence's tokens
    matcher: Matcher | GrammarError  # or the error if there is none
    guesses: Any = None  # the drafter's `Guesses`

    def go_on(self, token_ids: list[int]) -> None:
        """Accept tokens."""
        assert isinstance(self.matcher, Matcher)
        self.token_ids += token_ids[: self.matcher.accept(token_ids)]


Guess = Callable[[Answer, int], list[int]]  # (answer, number of its rows for guesses) -> its draft


class Constraints:
    """The part of the sampler that holds the grammars of the sequences in the batch slots.

    Args:
        grammars: compile the requests' constraints.
        max_num_seqs: batch slots.
        device: of the logits.
        guess: returns the tokens that run in the rows of a draft.
    """

    def __init__(self, grammars: Grammars, max_num_seqs: int, device: torch.device, guess: Guess) -> None:
        self.grammars = grammars
        self._device, self._guess = device, guess
        self._masks = Masks(min(MOST_THREADS, os.cpu_count() or 1))
        self._answers: list[Answer | None] = [None] * max_num_seqs  # by batch slot; None without structured output
        # The tokens chosen last, on their way to the host: their answers, rows and drafts; the copy; its event.
        self._chosen: tuple[list[tuple[Answer, int, list[int]]], Tensor, torch.cuda.Event | None] | None = None
        self._powers = 2 ** torch.arange(8, dtype=torch.uint8, device=device)

    def admit(self, sequence: BatchSequence) -> bool:
        """Register a sequence under its batch slot, with its tokens so far; returns whether it has structured output.

        After a preemption or a broken step every sequence is admitted again, and gets a new matcher from its certain
        tokens.
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
        """Cut the draft of a sequence before its first forbidden token; all tokens must be on the host."""
        answer = self._answers[sequence.batch_slot]
        if answer is not None and isinstance(answer.matcher, Matcher):
            self._accept_chosen()
            del draft[answer.matcher.count_allowed(draft) :]

    def rewind(self, sequence: BatchSequence) -> None:
        """Roll the grammar back to a sequence's certain tokens: the tokens accepted after them were guesses."""
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
            rows: the rows' sampling parameters.
            batch_slots: of the rows, on the host; a sequence with a draft has one more row per guess.
            choose: the sampler, without updating counts.
            penalise: given if a row has penalties. They come before the mask, so that none can raise a forbidden token.

        Returns:
            the error of each sequence that has no token, by its first row.
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
        """Fill the masks of answers with the given numbers of rows; all rows but an answer's first have run a guess.

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
            # Rows past a sequence's last possible token repeat the row of that token.
            masks[row + 1 + len(draft) : row + count] = masks[row + len(draft)]
        return answers, masks, errors

    def _keep(self, answers: list[tuple[Answer, int, list[int]]], chosen: Tensor) -> None:
        """Start the copy of the chosen tokens to the host."""
        if self._device.type != "cuda":
            self._chosen = answers, chosen, None
            return
        host = torch.empty(len(chosen), dtype=torch.int64, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._chosen = answers, host, arrived

    def _accept_chosen(self) -> None:
        """Wait for the tokens that were chosen last, and advance the grammars by them."""
        if self._chosen is None:
            return
        (answers, ids, arrived), self._chosen = self._chosen, None
        if arrived is not None:
            arrived.synchronize()
        self.accept(answers, ids.tolist())

    def accept(self, answers: list[tuple[Answer, int, list[int]]], token_ids: list[int]) -> None:
        """Advance each grammar by the token of its answer's first row, and of the rows after right guesses."""
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
        a new `[rows, vocab]`. The lowest score is not -inf, because kernels subtract the highest score of a part of the
        row, and a whole part may be forbidden. float16's lowest number is not low enough: at a high temperature the
        noise exceeds it.
    """
    if logits.dtype == torch.float16:
        logits = logits.float()
    allowed = bits.view(torch.uint8)[:, :, None] & powers  # [rows, bytes, 8]: the bytes of a word are little-endian
    forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
    return logits.masked_fill(forbidden, torch.finfo(logits.dtype).min)


def constrained_sampler(runtime: Runtime, options: BatchingOptions, source: ModelSource, guess: Guess) -> Sampler:
    """Make a sampler with structured output; `guess` as in `Constraints`."""
    grammars = Grammars(source, runtime.config.vocab_size)
    return make_sampler(runtime, options, Constraints(grammars, options.max_num_seqs, runtime.device, guess))


def constraints_of(sampler: Sampler) -> Constraints:
    """Return the constraints of a sampler that `constrained_sampler` made."""
    assert isinstance(sampler.constraints, Constraints)
    return sampler.constraints
