"""Concurrent calls of one engine: they share its steps, may end at any moment, and survive a step that breaks off.

Requests may arrive and leave between any two steps, from any thread. One lock is held during a step and during a change
of the queues. One thread runs a step for all calls, and the other threads wait for its end. A step or a change of a
queue may break off anywhere: the device may fail, or Ctrl-C may come between any two lines, and a second Ctrl-C may
come while the first is handled. So recovery does not depend on cleanup code. A flag says that a change has begun and
not ended. The next thread that takes the lock and finds the flag set restarts the engine from what is certain: the
tokens of each request. That costs recomputation and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict

from transformers import PreTrainedTokenizerFast

from stage_a_naive.contract.outputs import Completion, Request
from stage_e_batching.calls.mailbox import Event, Mailbox, Owner
from stage_e_batching.engine import Engine
from stage_e_batching.step import BatchSequence, State

INSIDE_STEP = (
    "the engine was called from inside one of its steps (by a sampling_fn or a signal handler); "
    "call it between steps, as the on_text callback of generate does"
)


class Calls:
    """Requests in, events out.

    Args:
        engine: runs the steps. Only this object calls it.
        tokenizer, eos_token_ids: decode the text and recognise its end.
        max_model_len: prompt and answer together are at most this long.
    """

    longest_wait = 0.1  # seconds to wait for another thread's step before waiting for the lock itself

    def __init__(
        self, engine: Engine, *, tokenizer: PreTrainedTokenizerFast, eos_token_ids: frozenset[int], max_model_len: int
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        # The last generated token needs no slot, so a sequence may be one token longer than the pool. Beyond that a
        # request ends with "length", whether it runs alone or in a batch.
        self._max_total_len = min(max_model_len, engine.scheduler.capacity + 1)
        self.lock = threading.RLock()  # held during a step; a reader of the engine's state holds it too
        self._midway = False  # a step or a change of the queues has begun and has not ended
        self._gone: deque[Owner] = deque()  # mailboxes that were closed or deleted
        self._aborted: deque[int] = deque()  # requests to drop
        self._waiting: deque[Mailbox] = deque()  # of threads that wait for another thread's step
        self.mailbox = Mailbox(self._gone)  # of requests without a mailbox

    def new_mailbox(self) -> Mailbox:
        """Make a mailbox for the requests of one call. Deleting the mailbox drops its requests."""
        return Mailbox(self._gone)

    def add_request(self, request: Request, mailbox: Mailbox | None = None, streams: bool = True) -> int:
        """Queue a request; returns its id.

        Args:
            mailbox: gets the request's events; without one, `step` returns them.
            streams: False decodes the text once, at the end, which is cheaper; the only event is then the end.

        Raises:
            ValueError: the prompt can never run; nothing was queued.
            RuntimeError: called from inside a step.
        """
        scheduler = self.engine.scheduler
        scheduler.check_prompt(len(request.prompt_token_ids))
        completion = Completion(request, self._tokenizer, self._eos_token_ids, self._max_total_len, not streams)
        owner = (self.mailbox if mailbox is None else mailbox).owner
        sequence = scheduler.new_sequence(completion, owner=owner, streams=streams)
        if self._inside_step:
            raise RuntimeError(INSIDE_STEP)
        with self.lock:
            self._begin()
            owner.unfinished.add(sequence)
            scheduler.add(sequence)
            self._midway = False
        return sequence.request_id

    def step(self) -> list[Event]:
        """Run one step for all requests; returns the events of requests without a mailbox."""
        self.run_step()
        with self.lock:  # all threads that call `step` share this mailbox
            return self.mailbox.take()

    def run_step(self) -> None:
        """Run one step for all requests."""
        self._step_unless_news(None)

    def is_finished(self) -> bool:
        """Tell whether `step` has returned the end of every request without a mailbox."""
        return not (self.mailbox.owner.unfinished or self.mailbox.has_news)

    def advance(self, mailbox: Mailbox) -> None:
        """Run a step, or wait while another thread runs one. Call it until `mailbox` has news."""
        if self._midway and not self._inside_step:
            self._waiting.append(mailbox)
            if self._midway and mailbox.wait(self.longest_wait):
                return
        self._step_unless_news(mailbox)

    def abort(self, request_id: int) -> bool:
        """Drop a request, waiting or running, and free its blocks. Returns False if it was already gone.

        A call that still waits for the request gets an error. From inside a step, it takes effect after the step.
        """
        known = self.knows(request_id)
        if known:
            self._aborted.append(request_id)
            self.settle()
        return known

    def knows(self, request_id: int) -> bool:
        """Tell whether a request is waiting or running."""
        return self.engine.scheduler.find(request_id) is not None

    def has_unfinished(self) -> bool:
        """Tell whether any request is waiting or running."""
        self.settle()
        return self.engine.scheduler.has_unfinished()

    def stats(self) -> dict[str, int]:
        """Return the engine's counters and its current load."""
        self.settle()
        scheduler = self.engine.scheduler
        return asdict(self.engine.counters) | {
            "num_waiting": len(scheduler.waiting),
            "num_running": scheduler.num_running,
            "num_used_blocks": scheduler.block_manager.num_used,
            "num_blocks": scheduler.block_manager.num_blocks,
        }

    def settle(self) -> None:
        """Do the work due between two steps. Inside a step: no-op; the next thread that takes the lock does it."""
        self._wake_up()
        if (self._midway or self._gone or self._aborted) and not self._inside_step:
            with self.lock:
                self._begin()
                self._midway = False

    @property
    def _inside_step(self) -> bool:
        """Whether this thread holds the lock: in a `sampling_fn`, a signal handler or the garbage collector."""
        return self.lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue] (an RLock has it since Python 2)

    def _step_unless_news(self, mailbox: Mailbox | None) -> None:
        """Run a step, unless another thread's step has brought news while this thread waited for the lock."""
        if self._inside_step:
            raise RuntimeError(INSIDE_STEP)
        try:
            with self.lock:
                if mailbox is not None and mailbox.has_news:
                    return
                self._begin()
                self.engine.run_step()
                if self.engine.news:
                    self._deliver()
                self._midway = False
        except BaseException:
            self.settle()
            raise
        finally:
            if self._waiting:
                self._wake_up()

    def _wake_up(self) -> None:
        """Wake the threads that wait for the end of a step."""
        with suppress(IndexError):  # another thread may wake them up too
            for _ in range(len(self._waiting)):
                self._waiting.popleft().ring()

    # ---- under the lock: any of this may break off, and is then repeated ---------------------------------------

    def _begin(self) -> None:
        """Begin a change: first do the work that is due."""
        if self._midway or self._gone or self._aborted:
            self._catch_up()
        self._midway = True

    def _catch_up(self) -> None:
        """Recover if the last change broke off, and drop aborted requests and those of closed mailboxes."""
        if self._midway:
            self.engine.forget()
            self._deliver()
            self.mailbox.owner.unfinished.intersection_update(self.engine.scheduler.unfinished)
        self._midway = True
        while self._gone:
            owner = self._gone[0]
            for sequence in list(owner.unfinished):
                self.engine.remove(sequence)
                owner.unfinished.discard(sequence)  # also one that an interrupt kept out of the queue as it arrived
            self._gone.popleft()
        while self._aborted:
            sequence = self.engine.scheduler.find(self._aborted[0])
            if sequence is not None:
                if sequence.owner is not self.mailbox.owner:
                    error = RuntimeError(f"request {sequence.request_id} was aborted by another call")
                    sequence.completion.fail(error)
                self.engine.remove(sequence)
            self._aborted.popleft()
        self._deliver()

    def _deliver(self) -> None:
        """Tell the mailbox of each request's call that there is something to read."""
        news = self.engine.news
        while news:
            sequence: BatchSequence = news[0]
            mailbox = sequence.owner()
            if mailbox is not None:
                mailbox.put(sequence)
            if sequence.state is State.FINISHED:
                sequence.owner.unfinished.discard(sequence)
            news.popleft()
