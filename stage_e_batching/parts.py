"""The interfaces of the parts that the engine uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stage_a_naive.contract.outputs import Completion
from stage_e_batching.step import BatchSequence, ScheduledStep


class Sampled(NamedTuple):
    """A step's result, on the host: one entry for each sequence that samples, in the step's order."""

    token_ids: list[int]
    logprobs: Sequence[dict[int, float] | None] | None = None  # None if no request asks for any
    errors: dict[int, Exception] | None = None  # of entries whose `sampling_fn` failed; their ids mean nothing


class InFlight(Protocol):
    """A step that was launched on the device."""

    def wait(self) -> Sampled:
        """Wait for the step's tokens."""
        ...


Launched = deque[tuple[ScheduledStep, InFlight]]  # oldest first


class Runner(Protocol):
    """A model: computes steps and samples their tokens."""

    def launch(self, step: ScheduledStep) -> InFlight:
        """Start a step and the sampling of its tokens, without waiting for the device."""
        ...

    def forget(self) -> None:
        """Drop all steps in flight, also a launch that broke off. May be called at any moment, and twice."""
        ...


# Called with a step that has run, the sequences that ended in it, and when its tokens were known (monotonic clock).
Report = Callable[[ScheduledStep, list[BatchSequence], float], None]


# Called with a complete answer; returns the error that it ends with, or None.
Check = Callable[[Completion], Exception | None]


class Drafts(Protocol):
    """Guesses of the next tokens; a step verifies each guess in one row."""

    @property
    def need_tokens(self) -> bool:
        """Whether the next step needs all tokens on the host, so that nothing may be in flight when it is scheduled."""
        ...

    def are_promising(self) -> bool:
        """Whether the known tokens promise guesses that are worth a step."""
        ...

    def propose(self) -> bool:
        """Give decoding sequences their drafts; returns whether any sequence has one."""
        ...

    def complete(self, step: ScheduledStep) -> None:
        """Fill in the drafts of a step that is scheduled and has its blocks."""
        ...

    def accept(self, step: ScheduledStep, sampled: Sampled) -> Sampled:
        """Return the accepted tokens. Rows after a wrong guess stop sampling (`step.samples`)."""
        ...

    def settle(self, step: ScheduledStep) -> None:
        """Account for the drafts of a step whose tokens have been added."""
        ...

    def forget(self) -> None:
        """Drop all drafts. May be called at any moment, and twice."""
        ...
