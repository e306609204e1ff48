"""Stage F's engine, which waits for its tokens where a guess is worth it.

Guessing needs the last token, and stage F is a step ahead of it. So there are two kinds of steps:

    nothing to guess    stage F's: launch step n + 1, then fetch the tokens of step n
    a draft             stage E's: fetch what is in flight, guess, run the step, take in the tokens that were right

The second kind leaves the GPU idle while the CPU works. On text that repeats nothing there are none of them. Where the
device guesses there are none at all (`ahead_engine.py`).

A step verifies guesses g1, g2, … behind the last token t with rows t, g1, g2, …. Each row samples the token that
follows it, by the same noise as ever. The token sampled in row t is certain; if it equals g1, then row g1 was computed
from the right tokens, and what it sampled is certain too; and so on. So each step gains the guesses that were right and
one token more, and every token is the one that the engine would have sampled without guessing. (In 16 bits, up to the
rounding of a step with another number of rows.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from beyond.speculation.options import MAX_SPECULATING
from beyond.speculation.scheduler import DraftScheduler
from beyond.speculation.sequence import SpeculativeSequence
from stage_e_batching.engine import Engine, Runner
from stage_e_batching.live_requests import Counters
from stage_f_graph_tp.overlap import OverlappedEngine

SHARE = 4  # one in this many decoding sequences must have a draft, or waiting costs the others more than it gains


class Drafter(Protocol):
    """What the engine needs of something that guesses."""

    def has_draft(self, sequence: SpeculativeSequence) -> bool:
        """Whether there seems to be a guess, from the tokens on the host."""
        ...

    def draft(self, sequence: SpeculativeSequence) -> list[int]:
        """Return the guess, when all tokens are on the host, or a list of its length."""
        ...

    def complete(self, sequences: list[SpeculativeSequence]) -> None:
        """Fill in the drafts, when they are scheduled and have their blocks."""
        ...


@dataclass
class SpeculationCounters(Counters):
    """Totals since the engine was made."""

    num_verifications: int = 0  # drafts verified: a step may verify several
    num_draft_tokens: int = 0  # tokens of these drafts
    num_accepted_tokens: int = 0  # of these, those that were right


class DraftingEngine(OverlappedEngine):
    """Stage F's engine, which counts guesses and decides who makes some.

    Args:
        scheduler, runner, options: as in `Engine`.
        drafter: knows who has a guess; None for nobody.
    """

    sequence_class = SpeculativeSequence
    scheduler: DraftScheduler

    def __init__(self, scheduler: DraftScheduler, runner: Runner, *, drafter: Drafter | None, **options: Any) -> None:
        super().__init__(scheduler, runner, **options)
        self.counters = SpeculationCounters()
        self.drafter = drafter

    def _promising(self) -> list[SpeculativeSequence]:
        """Return the sequences that seem to have a guess; none where they are too few, or too many run."""
        decoding = self.scheduler.decoding
        if self.drafter is None or len(decoding) > MAX_SPECULATING:
            return []
        has_draft = self.drafter.has_draft
        promising = [s for s in decoding if not s.is_pausing and has_draft(s) and s.longest_draft > 0]
        return promising if len(promising) * SHARE >= len(decoding) else []


class SpeculativeEngine(DraftingEngine):
    """Stage F's engine with drafts that are on the host.

    Args:
        scheduler, runner, drafter, options: as in `DraftingEngine`.
        overlap: whether steps without drafts are launched ahead.
    """

    def __init__(self, *args: Any, overlap: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._overlap = overlap

    def run_step(self) -> None:
        """Verify drafts if there are any worth waiting for; else launch a step ahead, as stage F does."""
        if self._promising():
            self._fetch_in_flight()
            if self._make_drafts():
                self._verify()
                return
        if self._overlap:
            super().run_step()
        else:
            Engine.run_step(self)

    def _fetch_in_flight(self) -> None:
        """Take in the step that is under way, so that all tokens are on the host."""
        running, self._running = self._running, None
        if running:
            self._take_in(running[0], running[1].wait())

    def _make_drafts(self) -> bool:
        """Guess for every sequence that may. Returns whether there is a guess."""
        assert self.drafter is not None
        for sequence in self.scheduler.decoding:
            sequence.draft = [] if sequence.is_pausing else self.drafter.draft(sequence)
            del sequence.draft[sequence.longest_draft :]
        return any(sequence.draft for sequence in self.scheduler.decoding)

    def _verify(self) -> None:
        """Run a step with drafts, and account for what was right."""
        step = self.schedule()
        verified = [sequence for sequence in dict.fromkeys(step.sequences[: step.num_decodes]) if sequence.draft]
        self.counters.num_verifications += len(verified)
        self.counters.num_draft_tokens += sum(len(sequence.draft) for sequence in verified)
        if verified:
            assert self.drafter is not None
            self.drafter.complete(verified)
        self.postprocess(step, self.runner.run(step))
        for sequence in verified:
            sequence.settle()
            self.scheduler.trim(sequence)
        for sequence in self.scheduler.decoding:  # where prompts have steps of their own, drafts may not have run
            sequence.drop_draft()

    def _append(
        self, sequence: SpeculativeSequence, token_id: int, logprob: dict[int, float] | None, now: float
    ) -> bool:
        """Give a sequence its next token, unless an earlier row of this step found a guess before it wrong."""
        if not sequence.draft:
            return super()._append(sequence, token_id, logprob, now)
        if sequence.is_settled:
            self.counters.num_generated_tokens -= 1  # it was counted as sampled, and is dropped
            return False
        ended = super()._append(sequence, token_id, logprob, now)
        self._check_guess(sequence, token_id)
        sequence.is_settled |= ended
        return ended

    def _check_guess(self, sequence: SpeculativeSequence, token_id: int) -> None:
        """Compare a certain token with the guess for it. If it was right, its row is certain too."""
        if self.accepts(sequence, token_id):
            sequence.num_right += 1
            sequence.num_computed_tokens += 1
            self.counters.num_accepted_tokens += 1
        else:
            sequence.is_settled = True

    def accepts(self, sequence: SpeculativeSequence, token_id: int) -> bool:
        """Whether a sampled token is the next guess of the draft."""
        return sequence.draft[sequence.num_right : sequence.num_right + 1] == [token_id]
