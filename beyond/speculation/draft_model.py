"""Drafts from a small model: it generates a few tokens, and the large one checks them.

The small model has a separate KV cache with the same number of blocks, so one block table serves both: position 70 of a
sequence is stored in the same slot of both pools. It needs no scheduler and no block manager: it runs the tokens
that it has not seen yet, then one token after the other, on stage F's runner. A guess is sampled with the noise
that the large model's sampler will use for the same token, so the two agree as often as their scores do, also at
temperature 1. With structured output, the small model's tokens are constrained too, starting from the certain
tokens each time. Errors in its KV cache can make a guess wrong, but never an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from beyond.options import Options
from stage_e_batching.parts import InFlight
from stage_e_batching.step import BatchSequence, ScheduledStep
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.runner import StepRunner
from stage_f_graph_tp.step_input import StepInput


@dataclass
class Followed:
    """The small model's progress in a sequence."""

    block_table: list[int]  # the sequence's list; a different list means that its blocks were taken away
    num_computed_tokens: int = 0  # certain tokens whose keys and values are in the small model's pool
    guesses: list[int] = field(default_factory=list)  # run after those tokens, at the next positions

    def catch_up(self, token_ids: list[int]) -> None:
        """Count the guesses that were accepted: their keys and values in the small model's pool are valid."""
        for guess in self.guesses:
            if token_ids[self.num_computed_tokens : self.num_computed_tokens + 1] != [guess]:
                break
            self.num_computed_tokens += 1
        self.guesses = []


class FollowingBatch(InputBatch):
    """Builds the small model's input.

    Args:
        vocab_size: the small model's. It replaces padding tokens that it lacks by its last token.
        limits: as of `InputBatch`.
    """

    def __init__(self, vocab_size: int, *limits: int) -> None:
        super().__init__(*limits)
        self._vocab_size = vocab_size

    def fill(self, step: ScheduledStep, out: StepInput) -> np.ndarray:
        generated = super().fill(step, out)
        np.minimum(out.input_ids, self._vocab_size - 1, out=out.input_ids)
        return generated


class ModelDrafter:
    """Guesses with a small model.

    Args:
        runner: the small model's, with a `FollowingBatch` and the large model's block size.
        options: the limits of a step, and the longest draft.
        rewind: rolls the small model's grammars back to a sequence's certain tokens.
    """

    def __init__(self, runner: StepRunner, options: Options, rewind: Callable[[BatchSequence], None]) -> None:
        self._runner, self._rewind = runner, rewind
        self._max_num_batched_tokens = options.max_num_batched_tokens
        self._num_tokens = options.num_speculative_tokens

    def has_draft(self, sequence: BatchSequence) -> bool:
        """Return True: a model always has a guess."""
        return True

    def draft(self, sequence: BatchSequence) -> list[int]:
        """Return zeros as placeholders, so that blocks are reserved; `complete` fills in the guesses."""
        return [0] * self._num_tokens

    def complete(self, sequences: list[BatchSequence]) -> None:
        """Fill in the drafts: one step on the tokens that are new to the small model, then one per further guess."""
        new = [s for s in sequences if s.guesses.memory is None or s.guesses.memory.block_table is not s.block_table]
        for sequence in new:
            sequence.guesses.memory = Followed(sequence.block_table)
        for sequence in sequences:
            sequence.guesses.memory.catch_up(sequence.token_ids)
            self._rewind(sequence)
        # Guess i is launched before guess i - 1 is fetched, because guess i - 1 is on the device.
        guessing, launched = sequences, self._launch_known(sequences, new)
        for i in range(1, 1 + max(len(sequence.guesses.draft) for sequence in sequences)):
            waiting, guessing = guessing, [sequence for sequence in guessing if len(sequence.guesses.draft) > i]
            following = self._launch_guess(guessing, i)
            for sequence, token_id in zip(waiting, launched.wait().token_ids, strict=True):
                sequence.guesses.draft[i - 1] = token_id
            launched = following
        for sequence in sequences:
            sequence.guesses.memory.num_computed_tokens = len(sequence.token_ids)
            sequence.guesses.memory.guesses = sequence.guesses.draft[:-1]  # the last one was sampled but not run

    def _launch_known(self, sequences: list[BatchSequence], new: list[BatchSequence]) -> InFlight:
        """Run the tokens that the small model has not seen, in chunks if there are many; sample after the last one."""
        self._runner.launch(ScheduledStep(0, 0.0, admitted=new, grown=sequences))  # runs nothing yet
        share = self._max_num_batched_tokens // len(sequences)
        while behind := [s for s in sequences if _num_unseen(s) > share]:
            step = self._step(behind)
            step.num_tokens, step.samples = [share] * len(behind), [False] * len(behind)
            self._runner.launch(step)
            for sequence in behind:
                sequence.guesses.memory.num_computed_tokens += share
        step = self._step(sequences)
        step.num_tokens = list(map(_num_unseen, sequences))
        return self._runner.launch(step)

    def _launch_guess(self, sequences: list[BatchSequence], number: int) -> InFlight:
        """Run guess `number` of each draft, which is on the device, to sample the next guess."""
        step = self._step(sequences)
        step.starts = [len(sequence.token_ids) + number - 1 for sequence in sequences]
        step.num_tokens, step.num_decodes = [1] * len(sequences), len(sequences)
        return self._runner.launch(step)

    def _step(self, sequences: list[BatchSequence]) -> ScheduledStep:
        starts = [sequence.guesses.memory.num_computed_tokens for sequence in sequences]
        return ScheduledStep(0, 0.0, sequences, starts, samples=[True] * len(sequences))


def _num_unseen(sequence: BatchSequence) -> int:
    return len(sequence.token_ids) - sequence.guesses.memory.num_computed_tokens
