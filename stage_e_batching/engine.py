"""The engine: every step is three lines, schedule -> run -> postprocess.

    schedule      who runs, and how much of each      (scheduler.py, plain Python)
    run           the model and the sampler           (model_runner.py, the device)
    postprocess   tokens to requests, ends to pages   (here)

Requests may arrive and be aborted between any two steps. A step that raises costs recomputation and nothing else: all
requests wait again, with the tokens they had, and the caller who sees the error decides which of them to abort.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from stage_a_naive.outputs import Completion, GenerationOutput, Request
from stage_d_paged.llm import output_of
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep, State
from stage_e_batching.trace import Trace


class Sampled(NamedTuple):
    """A step's result, on the host: one entry for each sequence that samples, in the step's order."""

    token_ids: list[int]
    logprobs: list[dict[int, float] | None] | None = None  # None where no request asks for any


class Runner(Protocol):
    """What the engine needs of a model."""

    def run(self, step: ScheduledStep) -> Sampled:
        """Compute the step and draw the tokens of the sequences that sample."""


class Event(NamedTuple):
    """Something to tell about a request: new text, or its end."""

    request_id: int
    text: str
    output: GenerationOutput | None  # the whole answer, when it is complete


@dataclass
class Counters:
    """Totals since the engine was made."""

    num_steps: int = 0
    # Prompt tokens computed (those out of the prefix cache are not), and one for each return from a preemption: the
    # token that was sampled last before it, which runs for the first time then.
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache had
    num_recomputed_tokens: int = 0  # tokens computed again after a preemption
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0


class Engine:
    """Requests in, events out.

    Args:
        scheduler: decides the steps.
        runner: computes them.
        tokenizer, eos_token_ids: to make text and to see its end.
        max_model_len: prompt and answer together are at most this long.
        trace: where to write a record of every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        trace: Trace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.counters = Counters()
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        # The last token generated takes no slot, so the pool may be outgrown by one. Past that a request ends with
        # "length", alone or in company: never because of what else happens to run.
        self._max_total_len = min(max_model_len, scheduler.capacity + 1)
        self.trace = trace

    def add_request(self, request: Request, mailbox: deque[Event] | None = None, streams: bool = True) -> int:
        """Queue a request; returns its id.

        Args:
            mailbox: gets the request's events as well.
            streams: False makes the text once, at the end, which is cheaper.

        Raises:
            ValueError: the prompt could never run; nothing was queued.
        """
        self.scheduler.check_prompt(len(request.prompt_token_ids))
        completion = Completion(request, self._tokenizer, self._eos_token_ids, self._max_total_len, not streams)
        sequence = BatchSequence(
            request,
            completion,
            max_total_tokens=len(request.prompt_token_ids) + completion.num_remaining_tokens,
            arrival_time=time.perf_counter(),
            mailbox=mailbox,
        )
        self.scheduler.add(sequence)
        return sequence.arrival

    def abort(self, request_id: int) -> bool:
        """Drop a request wherever it is, and free its pages. False if it was already gone."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return False
        self.scheduler.remove(sequence)
        self.counters.num_aborted += 1
        return True

    def abort_all(self, mailbox: deque[Event]) -> None:
        """Drop all requests whose events go to `mailbox`."""
        for sequence in self.scheduler.unfinished:
            if sequence.mailbox is mailbox:
                self.abort(sequence.arrival)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def knows(self, request_id: int) -> bool:
        """Whether a request still waits or runs."""
        return self.scheduler.find(request_id) is not None

    def step(self) -> list[Event]:
        """Run one step; returns what there is to tell about any request."""
        with self._recovery():
            step = self.scheduler.schedule()
            sampled = self.runner.run(step)
            return self.postprocess(step, sampled)

    @contextmanager
    def _recovery(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C as well
            self._recover()
            raise

    def _recover(self) -> None:
        self.scheduler.recover()
        for sequence in self.scheduler.unfinished:
            if sequence.is_finished:  # interrupted between its last token and its release
                self.scheduler.remove(sequence)

    def postprocess(self, step: ScheduledStep, sampled: Sampled) -> list[Event]:
        """Give each sequence its token and let go of those that are done.

        It may be called late, after the next step was scheduled: a token for a sequence that has ended since is
        dropped, and one for a sequence that was preempted since is kept.
        """
        now = time.perf_counter()
        pages = [len(sequence.block_table) for sequence in step.sequences] if self.trace else []
        self._count(step)
        self.scheduler.block_manager.confirm()
        events: list[Event] = []
        ended: list[BatchSequence] = []
        sampling = step.sequences if all(step.samples) else [entry.sequence for entry in step if entry.samples]
        logprobs = sampled.logprobs or [None] * len(sampling)
        num_surplus = 0  # tokens of sequences that had ended before
        for sequence, token_id, logprob in zip(sampling, sampled.token_ids, logprobs, strict=True):
            sequence.num_pending_tokens -= 1
            if sequence.state is State.FINISHED:
                num_surplus += 1
                continue
            completion = sequence.completion
            text = completion.append(token_id, logprob)
            sequence.token_ids.append(token_id)
            if sequence.first_token_time == 0.0:
                sequence.first_token_time = now
            if completion.finish_reason is not None:
                sequence.finish_time = now
                ended.append(sequence)
                events.append(Event(sequence.arrival, text, output_of(sequence, sequence.arrival_time)))
            elif text:
                events.append(Event(sequence.arrival, text, None))
            else:
                continue
            if sequence.mailbox is not None:
                sequence.mailbox.append(events[-1])
        for sequence in ended:
            self.scheduler.remove(sequence)
        self.counters.num_finished += len(ended)
        self.counters.num_generated_tokens += len(sampling) - num_surplus
        if self.trace:
            self.trace.write(step, pages, ended, self.scheduler, now)
        if not self.has_unfinished():
            self._check_idle()
        return events

    def _count(self, step: ScheduledStep) -> None:
        counters = self.counters
        counters.num_steps += len(step) > 0
        counters.num_prefill_tokens += step.total_tokens - step.num_decodes - step.num_recomputed
        counters.num_recomputed_tokens += step.num_recomputed
        counters.num_preemptions += len(step.preempted)
        counters.num_cached_tokens += sum(s.num_cached_tokens for s in step.admitted if s.num_preemptions == 0)

    def _check_idle(self) -> None:
        """Nothing runs and nothing waits, so every page must be free: a leak is found where it happened."""
        used = self.scheduler.block_manager.num_used
        if used:
            raise RuntimeError(f"the engine is idle but {used} pages of KV cache are in use")

    def stats(self) -> dict[str, int]:
        """The counters, and how full the engine is now."""
        manager = self.scheduler.block_manager
        return asdict(self.counters) | {
            "num_waiting": len(self.scheduler.waiting),
            "num_running": self.scheduler.num_running,
            "num_used_pages": manager.num_used,
            "num_pages": manager.num_blocks,
        }
