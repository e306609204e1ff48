"""The engine: every step is four operations.

    schedule      which sequences run, how much of each            (scheduler.py, plain Python)
    launch        the model and the sampler, without waiting       (runner.py, the device)
    collect       wait for the tokens
    postprocess   add them, free the blocks of sequences that have ended

The engine's *depth* is the number of steps that stay in flight after a launch. With depth 0 the engine waits for the
tokens of each step at once: schedule, run, postprocess. With depth 1 it launches the next step before it fetches the
tokens of the last one.

The engine has no lock and does not know its callers: see `calls/` for those, and `parts.py` for the interfaces of its
parts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from stage_e_batching.parts import Check, Drafts, Launched, Report, Runner, Sampled
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, Counters, ScheduledStep, State
from stage_e_batching.trace import Trace


@dataclass(eq=False)
class Engine:
    """Run every sequence that is added to the scheduler to its end."""

    scheduler: Scheduler  # decides the steps
    runner: Runner  # computes them
    depth: int | Callable[[Launched], int] = 0  # steps that stay in flight after a launch
    drafts: Drafts | None = None  # tokens guessed ahead, which a step verifies
    trace: Trace | None = None  # a record of every step
    counters: Counters = field(default_factory=Counters)
    check: Check | None = None  # looks for an error in a complete answer
    reports: list[Report] = field(default_factory=list)  # called after every step that has run
    news: deque[BatchSequence] = field(default_factory=deque)  # have a token or an end to read; the reader empties it
    _launched: Launched = field(default_factory=deque, init=False)
    _uncertain: BatchSequence | None = field(default=None, init=False)  # a token is being added to it

    def run_step(self) -> None:
        """Launch the next step, then collect all steps but the latest `depth`."""
        depth = self._next_depth()
        step = self.schedule()
        if step.sequences:
            self._launched.append((step, self.runner.launch(step)))
            if depth:
                self.scheduler.count_in_flight(step)
        else:  # nothing can run until the tokens of the oldest step are known
            self.postprocess(step, Sampled([]))
            depth = max(0, len(self._launched) - 1)
        self._collect(depth)

    def _next_depth(self) -> int:
        """Return how many steps may stay in flight: 0 if a draft needs their tokens."""
        drafts = self.drafts
        if drafts is not None:
            are_promising = drafts.are_promising()
            if drafts.need_tokens:
                self._collect(0)
            if are_promising and drafts.propose() and drafts.need_tokens:
                return 0
        return self.depth(self._launched) if callable(self.depth) else self.depth

    def _collect(self, depth: int) -> None:
        """Wait for the tokens of the oldest steps until only `depth` steps are in flight."""
        while len(self._launched) > depth:
            step, in_flight = self._launched.popleft()
            self.postprocess(step, in_flight.wait())

    def schedule(self) -> ScheduledStep:
        """Decide what the next step runs."""
        step = self.scheduler.schedule()
        if step.admitted:
            self.counters.count_admitted(step)
        if self.drafts is not None:
            self.drafts.complete(step)
        if self.trace is not None:
            self.trace.begin(step, self.scheduler)
        return step

    def postprocess(self, step: ScheduledStep, sampled: Sampled) -> None:
        """Give each sequence its token, and release those that are done."""
        now = time.perf_counter()
        self.counters.count_step(step)
        if self.drafts is not None:
            sampled = self.drafts.accept(step, sampled)
        ended: list[BatchSequence] = []
        sampling = step.sampling
        logprobs = sampled.logprobs or [None] * len(sampling)
        errors, num_late = sampled.errors, 0  # late: sampled after their sequence had ended
        for i, (sequence, token_id, logprob) in enumerate(zip(sampling, sampled.token_ids, logprobs, strict=True)):
            if sequence.num_in_flight:
                sequence.num_in_flight -= 1
                if sequence.state is State.FINISHED:  # since this step was launched
                    num_late += 1
                    continue
            if ended and ended[-1] is sequence:  # in an earlier row
                num_late += 1
            elif errors and i in errors:
                sequence.completion.fail(errors[i])
                ended.append(sequence)
            else:
                self._uncertain = sequence
                is_last = sequence.append(token_id, logprob, now)
                if sequence.streams:
                    self.news.append(sequence)
                if is_last:
                    ended.append(sequence)
        self._uncertain = None
        for sequence in ended:
            self.remove(sequence)
        self.counters.num_generated_tokens += len(sampling) - num_late
        if self.drafts is not None:
            self.drafts.settle(step)
        if self.trace is not None:
            self.trace.end(step, ended, now)
        for report in self.reports:
            report(step, ended, now)
        if not self.scheduler.has_unfinished():
            self.scheduler.check_idle()

    def remove(self, sequence: BatchSequence) -> None:
        """Record the end of a sequence, done or not, and release what it holds. A second call is a no-op."""
        if self.scheduler.find(sequence.request_id) is not sequence:
            return
        if sequence.is_finished:
            error = self.check(sequence.completion) if self.check is not None and sequence.error is None else None
            if error is not None:
                sequence.completion.fail(error)
            sequence.end(time.perf_counter())
        if sequence.is_finished and sequence.error is None:
            self.counters.num_finished += 1
        else:
            self.counters.num_aborted += 1
        self.news.append(sequence)
        self.scheduler.remove(sequence)

    def forget(self) -> None:
        """Restart from what is certain, the tokens of each request. May be called at any moment, and twice."""
        if self._uncertain is not None:
            self._uncertain.completion.replay()
            self._uncertain = None
        while self._launched:
            with suppress(Exception):  # the device may have failed too; its error is reported already
                self._launched.popleft()[1].wait()
        for part in filter(None, (self.runner, self.drafts, self.scheduler, self.trace)):
            part.forget()
        for sequence in self.scheduler.unfinished:
            if sequence.is_finished:
                self.remove(sequence)
            else:
                self.news.append(sequence)
