"""What the ring asks of the parts that are handed to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stage_a_naive.contract.outputs import Completion
from stage_e_batching.step import BatchSequence, ScheduledStep


class Sampled(NamedTuple):
    """A step's result, on the host: one entry for each sequence that samples, in the step's order."""

    token_ids: list[int]
    logprobs: Sequence[dict[int, float] | None] | None = None  # None where no request asks for any
    errors: dict[int, Exception] | None = None  # of entries whose `sampling_fn` failed; their ids mean nothing


class InFlight(Protocol):
    """A step that the device has been told to run."""

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
        """Drop what is under way, also of a launch that broke off; at any moment, and twice."""
        ...


# Called with a step that has run, the sequences that ended in it, and when its tokens were known (monotonic clock).
Report = Callable[[ScheduledStep, list[BatchSequence], float], None]


# Called with an answer that is complete; returns the error that it ends with, or None.
Check = Callable[[Completion], Exception | None]


class Drafts(Protocol):
    """Guesses of the next tokens, which a step verifies with a row each."""

    @property
    def need_tokens(self) -> bool:
        """Whether the next step needs all tokens on the host: then nothing is in flight when it is decided."""
        ...

    def are_promising(self) -> bool:
        """Whether there seem to be guesses worth a step, from the tokens that are known."""
        ...

    def propose(self) -> bool:
        """Give decoding sequences a draft; returns whether there is any."""
        ...

    def complete(self, step: ScheduledStep) -> None:
        """Fill in the drafts of a step that is decided and has its blocks."""
        ...

    def accept(self, step: ScheduledStep, sampled: Sampled) -> Sampled:
        """Return the tokens that are certain. Rows behind a wrong guess do not sample any more (`step.samples`)."""
        ...

    def settle(self, step: ScheduledStep) -> None:
        """Account for the drafts of a step whose tokens have been added."""
        ...

    def forget(self) -> None:
        """Drop all drafts; at any moment, and twice."""
        ...
