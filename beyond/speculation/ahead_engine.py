"""Verifications launched one step ahead: the next one is on its way before the host knows what was right.

    CPU  [schedule 1][schedule 2][post 1][schedule 3][post 2]…
    GPU              [ guess, verify 1 ][ guess, verify 2   ][ guess, verify 3 …

This is stage F's overlap, where a step may give a sequence more than one token. While it is in flight the host counts
one token for it: it gives at least that one. The guesses that may be right are counted apart, as `num_unsure`. Blocks
are reserved for all of them, the device adds those that were right to every position (`token_table.py`), and what was
sampled behind a wrong guess arrives as `WRONG`.

Who guesses is the host's decision, from the tokens that it knows: one token less than the device.
"""

from __future__ import annotations

from dataclasses import replace

from beyond.speculation.engine import SpeculativeEngine
from beyond.speculation.sequence import SpeculativeSequence
from beyond.speculation.token_table import WRONG
from stage_e_batching.engine import Sampled
from stage_e_batching.step import ScheduledStep, State
from stage_f_graph_tp.overlap import OverlappedEngine, without_rows


class AheadEngine(SpeculativeEngine):
    """Stage F's engine, whose steps verify guesses that the device makes.

    Args:
        scheduler, runner, drafter, options: as in `SpeculativeEngine`; the drafter only tells who has a guess.
        draft_tokens: guesses per sequence.
    """

    def __init__(self, *args: object, draft_tokens: int, **options: object) -> None:
        super().__init__(*args, overlap=True, **options)
        self._draft_tokens = draft_tokens

    def run_step(self) -> None:
        """Launch the next step, with a row for each guess, then take in the tokens of the one before."""
        for sequence in self._promising():
            # A step gives one token more than guesses were right, and the last token of all needs no row.
            room = sequence.max_total_tokens - len(sequence) - 1
            sequence.draft = [WRONG] * min(self._draft_tokens, room)  # the device fills them in
        OverlappedEngine.run_step(self)

    def _count_in_flight(self, step: ScheduledStep) -> None:
        """Let every sequence that samples be longer by one token, and note how many more it may have got."""
        rows, rest = step.sequences[: step.num_decodes], step.sequences[step.num_decodes :]
        decoding = list(dict.fromkeys(rows))
        for sequence in decoding:
            sequence.num_unsure = len(sequence.draft)
            sequence.drop_draft()
        samples = [True] * len(decoding) + step.samples[step.num_decodes :]
        super()._count_in_flight(replace(step, sequences=decoding + rest, samples=samples))

    def _take_in(self, step: ScheduledStep, sampled: Sampled) -> None:
        """Take in the tokens that are certain. Those that guesses gained were in flight too, uncounted."""
        sequences, wrong = step.sequences, []
        verified: dict[SpeculativeSequence, int] = {}  # tokens before
        for row in range(1, step.num_decodes):
            sequence = sequences[row]
            if sequence is not sequences[row - 1] or sequence.state is State.FINISHED:
                continue
            verified.setdefault(sequence, len(sequence.token_ids))
            self.counters.num_draft_tokens += 1
            if sampled.token_ids[row] == WRONG:
                wrong.append(row)
                step.samples[row] = False
                continue
            sequence.num_in_flight += 1
            if sequence.block_table:  # it was not preempted meanwhile; its last token of all does not run
                sequence.num_computed_tokens = min(sequence.num_computed_tokens + 1, sequence.max_total_tokens - 1)
        super()._take_in(step, without_rows(wrong, sampled) if wrong else sampled)
        self.counters.num_verifications += len(verified)
        for sequence, before in verified.items():
            sequence.num_right = len(sequence.token_ids) - before - 1
            self.counters.num_accepted_tokens += sequence.num_right
            if sequence.state is State.DECODING:
                if not sequence.is_pausing:  # else it was launched before the loss that began the pause was known
                    sequence.settle()
                self.scheduler.settle(sequence)

    def _append(
        self, sequence: SpeculativeSequence, token_id: int, logprob: dict[int, float] | None, now: float
    ) -> bool:
        """Give a sequence its next token, unless it ended with an earlier one of this step."""
        if sequence.is_settled:
            self.counters.num_generated_tokens -= 1  # it was counted as sampled, and is dropped
            return False
        sequence.is_settled = OverlappedEngine._append(self, sequence, token_id, logprob, now)
        return sequence.is_settled
