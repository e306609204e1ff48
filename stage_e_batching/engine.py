"""The engine: every step is three lines, schedule -> run -> postprocess.

    schedule      which sequences run, how much of each   (scheduler.py, plain Python)
    run           the model and the sampler               (model_runner.py, the device)
    postprocess   add the tokens, free the blocks of ended sequences  (here)

Calls in several threads share the steps: one thread runs a step for all, the others wait for its end. What becomes of
requests that are aborted, or whose step breaks off, is the subject of `live_requests.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

from stage_a_naive.contract.outputs import Completion, Request
from stage_e_batching.live_requests import LiveRequests
from stage_e_batching.mailbox import Event, Mailbox
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep

INSIDE_STEP = (
    "the engine was called from inside one of its own steps (by a sampling_fn or a signal handler); "
    "call it between steps, as the on_text callback of generate does"
)


class Sampled(NamedTuple):
    """A step's result, on the host: one entry for each sequence that samples, in the step's order."""

    token_ids: list[int]
    logprobs: Sequence[dict[int, float] | None] | None = None  # None where no request asks for any
    errors: dict[int, Exception] | None = None  # of entries whose `sampling_fn` failed; their ids mean nothing


class Runner(Protocol):
    """What the engine needs of a model."""

    def run(self, step: ScheduledStep) -> Sampled:
        """Compute the step and sample the tokens of the sequences that sample."""
        ...


class Engine(LiveRequests):
    """Requests in, events out.

    Args:
        scheduler: decides the steps.
        runner: computes them.
        options: `tokenizer`, `eos_token_ids`, `max_model_len` and `trace`, as in `LiveRequests`.
    """

    longest_wait = 0.1  # seconds for the end of another thread's step; after that, for the lock itself

    def __init__(self, scheduler: Scheduler, runner: Runner, **options: Any) -> None:
        super().__init__(scheduler, **options)
        self.runner = runner

    def new_mailbox(self) -> Mailbox:
        """Make a mailbox for the requests of one call. They are dropped when it ceases to exist."""
        return Mailbox(self._gone)

    def add_request(self, request: Request, mailbox: Mailbox | None = None, streams: bool = True) -> int:
        """Queue a request; returns its id.

        Args:
            mailbox: gets the request's events; without one, `step` returns them.
            streams: False makes the text once, at the end, which is cheaper, and gives no event but the end.

        Raises:
            ValueError: the prompt could never run; nothing was queued.
            RuntimeError: called from inside a step.
        """
        self.scheduler.check_prompt(len(request.prompt_token_ids))
        completion = Completion(request, self._tokenizer, self._eos_token_ids, self._max_total_len, not streams)
        sequence = self.sequence_class(
            completion,
            arrival_time=time.perf_counter(),
            owner=(self._mailbox if mailbox is None else mailbox).owner,
            streams=streams,
        )
        if self._inside_step:
            raise RuntimeError(INSIDE_STEP)
        with self._lock:
            self._begin()
            sequence.owner.unfinished.add(sequence)
            self.scheduler.add(sequence)
            self._midway = False
        return sequence.request_id

    def step(self) -> list[Event]:
        """Run one step for all requests; returns the news of those that came without a mailbox."""
        self._step_unless_news(None)
        with self._lock:  # its mailbox is that of all threads that call `step`
            return self._mailbox.take()

    def is_finished(self) -> bool:
        """Tell whether `step` has returned the ends of all requests that came without a mailbox."""
        return not (self._mailbox.owner.unfinished or self._mailbox.has_news)

    def advance(self, mailbox: Mailbox) -> None:
        """Run a step, or wait while another thread runs one. Call it until there is news in `mailbox`."""
        if self._midway and not self._inside_step:
            self._waiting.append(mailbox)
            if self._midway and mailbox.wait(self.longest_wait):
                return
        self._step_unless_news(mailbox)

    def _step_unless_news(self, mailbox: Mailbox | None) -> None:
        """Run a step, unless another thread's has brought news while this one waited for the lock."""
        if self._inside_step:
            raise RuntimeError(INSIDE_STEP)
        try:
            with self._lock:
                if mailbox is not None and mailbox.has_news:
                    return
                self._begin()
                self.run_step()
                self._midway = False
        except BaseException:
            self.settle()
            raise
        finally:
            if self._waiting:
                self._wake_up()

    def _begin(self) -> None:
        """Begin a change, under the lock: first catch up on what is due, if anything is."""
        if self._midway or self._gone or self._aborted:
            self._catch_up()
        self._midway = True

    def run_step(self) -> None:
        """Decide a step, compute it, and add its tokens to their requests."""
        step = self.schedule()
        sampled = self.runner.run(step)
        self.postprocess(step, sampled)

    def schedule(self) -> ScheduledStep:
        """Decide the next step."""
        step = self.scheduler.schedule()
        for sequence in step.admitted:  # now: it may have been preempted when the step's tokens are there
            if sequence.is_new:
                self.counters.num_prompt_tokens += sequence.num_prompt_tokens
                self.counters.num_cached_tokens += sequence.num_cached_tokens
        if self.trace:
            self.trace.begin(step, self.scheduler)
        return step

    def postprocess(self, step: ScheduledStep, sampled: Sampled) -> None:
        """Give each sequence its token, and release those that are done."""
        now = time.perf_counter()
        self._count(step)
        ended: list[BatchSequence] = []
        sampling = step.sequences if all(step.samples) else [entry.sequence for entry in step if entry.samples]
        logprobs = sampled.logprobs or [None] * len(sampling)
        errors = sampled.errors
        for i, (sequence, token_id, logprob) in enumerate(zip(sampling, sampled.token_ids, logprobs, strict=True)):
            if errors and i in errors:
                sequence.error = errors[i]
                ended.append(sequence)
            elif self._append(sequence, token_id, logprob, now):
                ended.append(sequence)
        self._uncertain = None
        for sequence in ended:
            self._remove(sequence)
        self.counters.num_generated_tokens += len(sampling)
        if self.trace:
            self.trace.end(step, ended, now)
        if not self.scheduler.has_unfinished():
            self._check_idle()

    def _append(self, sequence: BatchSequence, token_id: int, logprob: dict[int, float] | None, now: float) -> bool:
        """Give a sequence its next token. Returns whether that ended it."""
        if sequence.first_token_time == 0.0:
            sequence.first_token_time = now
        self._uncertain = sequence
        completion = sequence.completion
        try:
            completion.append(token_id, logprob)
        except Exception:
            self._replay(sequence)
            if sequence.error is None:  # it came from outside, as a signal handler's does: not the text's own error
                raise
            return True
        if sequence.streams:
            self._tell(sequence)
        return completion.finish_reason is not None

    def _tell(self, sequence: BatchSequence) -> None:
        """Note in the mailbox of a request's call that there is something to read."""
        mailbox = sequence.owner()
        if mailbox is not None:
            mailbox.put(sequence)

    def _remove(self, sequence: BatchSequence) -> None:
        """Note the end of a request, if it has ended, and release what it holds."""
        if self.scheduler.find(sequence.request_id) is sequence:  # else an interrupt while it arrived kept it out
            if sequence.is_finished and sequence.error is None:
                sequence.finish_time = time.perf_counter()
                sequence.output = sequence.completion.to_output(
                    sequence.arrival_time, *sequence.times, sequence.num_cached_tokens
                )
                self.counters.num_finished += 1
            else:
                self.counters.num_aborted += 1
            self._tell(sequence)
            self.scheduler.remove(sequence)
        sequence.owner.unfinished.discard(sequence)

    def _count(self, step: ScheduledStep) -> None:
        counters = self.counters
        counters.num_steps += len(step) > 0
        counters.num_prefill_tokens += step.total_tokens - step.num_decodes - step.num_recomputed
        counters.num_recomputed_tokens += step.num_recomputed
        counters.num_preemptions += len(step.preempted)

    def _check_idle(self) -> None:
        """Check that every block is free when nothing runs and nothing waits: a leak is found where it happened."""
        used = self.scheduler.block_manager.num_used
        if used:
            raise RuntimeError(f"the engine is idle but {used} blocks of KV cache are in use")

    def stats(self) -> dict[str, int]:
        """Return the counters, and how full the engine is now."""
        self.settle()
        manager = self.scheduler.block_manager
        return asdict(self.counters) | {
            "num_waiting": len(self.scheduler.waiting),
            "num_running": self.scheduler.num_running,
            "num_used_blocks": manager.num_used,
            "num_blocks": manager.num_blocks,
        }
