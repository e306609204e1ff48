"""The thread that owns the engine: it runs the steps, and executes commands between two steps.

    callers, in other threads  --- inbox --->  [execute its commands] -> [run a step] -> [deliver its news] -> …

An engine step takes milliseconds, and a web server must never wait that long, because it has other clients. So in the
server only this thread calls the engine. A caller puts a small function into the inbox ("add these requests", "drop
those") and continues. The thread empties the inbox before every step, so a request dropped during a step leaves the
engine before the next one begins. All results of a step are delivered at once: one hand-over per step, for any number
of clients.

A slow reader costs the engine nothing. Its tokens wait outside the engine, and they are few: an answer has at most
`max_model_len` tokens. No step ever waits for a reader.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from stage_a_naive.contract.outputs import Request
from stage_e_batching.calls import Calls, Event

CLOSED = "the engine was closed before the answer was complete"


class EngineClosed(RuntimeError):
    """The server is shutting down."""


class Call:
    """One caller's requests, from submission until the last one has ended or the caller cancels.

    Args:
        requests: checked requests of the caller.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.last_token_times: dict[int, float] = {}  # by the requests' indexes
        self.live: dict[int, Request] = {}  # those that have not ended, by their ids; the engine loop's alone


News = list[tuple[Call, Request, Event]]
T = TypeVar("T")


class Inbox(Protocol):
    """The commands of an `EngineLoop`; a `SimpleQueue` is an inbox."""

    def put(self, item: Callable[[], None], /) -> None:
        """Add a command."""
        ...

    def empty(self) -> bool:
        """Tell whether the inbox is empty."""
        ...

    def get(self) -> Callable[[], None]:
        """Wait for the next command and return it."""
        ...


class EngineLoop:
    """Run an engine in its own thread.

    Args:
        calls: of an engine of stage E or later.
        deliver: called in the engine's thread after every step with its results, and with the time (seconds on the
            monotonic clock) at which they were known. It must not wait.
        inbox: commands of other threads; a queue by default.
    """

    def __init__(self, calls: Calls, deliver: Callable[[float, News], None], inbox: Inbox | None = None) -> None:
        self.paused = False
        self.failure: Exception | None = None  # what broke the last step off
        self._shared = calls
        self._deliver = deliver
        self._mailbox = calls.new_mailbox()
        self._calls: dict[int, Call] = {}  # by request id
        self._tasks: deque[tuple[Future, Generator]] = deque()  # the first of them goes on behind every step
        self._inbox: Inbox = inbox or SimpleQueue()
        self._single_step = False  # run one step although paused
        self.closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- called by others; none of these waits ------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Add the call's requests to the engine."""
        self._inbox.put(partial(self._add, call))

    def drop(self, call: Call) -> None:
        """Drop a call: abort its unfinished requests and free their blocks."""
        self._inbox.put(partial(self._remove, call))

    def pause(self) -> None:
        """Run no more steps until `resume`; requests may still be added and dropped."""
        self._inbox.put(partial(setattr, self, "paused", True))

    def resume(self) -> None:
        """Continue after `pause`."""
        self._inbox.put(partial(setattr, self, "paused", False))

    def single_step(self) -> None:
        """Run one step while paused, if there is work."""
        self._inbox.put(self._allow_step)

    def call(self, function: Callable[[Calls], T]) -> Future[T]:
        """Call `function` with the engine's calls, in its thread between two steps; the future gets the result.

        A function that takes longer than a step must be a generator that yields None wherever a step may run, and
        finally its result.
        """
        future = new_future()
        if self.closed:
            future.set_exception(EngineClosed(CLOSED))
        else:
            self._inbox.put(partial(self._begin, future, function))
        return future

    def close(self) -> None:
        """End the thread after its current step; unfinished requests get an error."""
        self.closed = True
        self._inbox.put(lambda: None)  # wakes the thread up

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(timeout)

    # ---- the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.closed:
            if self._inbox.empty() and self._may_step:
                self._step()
            else:
                self._inbox.get()()  # waits where there is nothing to do
        while not self._inbox.empty():  # what came before `close`
            self._inbox.get()()
        self._fail_all(EngineClosed(CLOSED))

    @property
    def _may_step(self) -> bool:
        return bool(self._calls or self._tasks) and (not self.paused or self._single_step)

    def _step(self) -> None:
        if self._calls or self._shared.has_unfinished():  # else there are tasks alone
            self._engine_step()
        else:
            self._single_step = False
        if self._tasks:
            self._go_on(*self._tasks[0])

    def _begin(self, future: Future[T], function: Callable[[Calls], T]) -> None:
        try:
            found = function(self._shared)
        except Exception as error:
            future.set_exception(error)
            return
        if isinstance(found, Generator):
            self._tasks.append((future, found))
        else:
            future.set_result(found)

    def _go_on(self, future: Future, task: Generator) -> None:
        try:
            found = next(task)
        except Exception as error:
            future.set_exception(error)
        else:
            if found is None:
                return
            future.set_result(found)
        task.close()
        self._tasks.popleft()

    def _engine_step(self) -> None:
        steps = self._shared.engine.counters.num_steps
        try:
            self._shared.advance(self._mailbox)  # or wait for another thread's step
            self._single_step = self._single_step and self._shared.engine.counters.num_steps == steps
            self.failure = None
        except Exception as error:  # of the device: what a request raises ends that request alone, inside the engine
            self.failure, self._single_step = error, False
        self._hand_out(self._mailbox.take())
        if self.failure is not None:
            self.failure.add_note(f"requests that this ended: {len(self._calls)}")  # for the log
            self._fail_all(self.failure)

    def _hand_out(self, events: list[Event]) -> None:
        news: News = []
        for event in events:
            call = self._calls.get(event.request_id)
            if call is None:  # the caller has given up
                continue
            request = call.live[event.request_id]
            if event.output is not None or event.error is not None:
                del self._calls[event.request_id], call.live[event.request_id]
            news.append((call, request, event))
        if news:
            self._deliver(time.perf_counter(), news)

    def _allow_step(self) -> None:
        self._single_step = bool(self._calls or self._tasks)

    def _add(self, call: Call) -> None:
        for request in call.requests:
            try:
                request_id = self._shared.add_request(request, self._mailbox)
            except Exception as error:
                self._deliver(time.perf_counter(), [(call, request, Event(-1, [], "", error=error))])
                continue
            self._calls[request_id] = call
            call.live[request_id] = request

    def _remove(self, call: Call) -> None:
        for request_id in call.live:
            del self._calls[request_id]
            self._shared.abort(request_id)
        call.live.clear()

    def _fail_all(self, error: Exception) -> None:
        """End every request with `error`, and free its blocks."""
        news = [
            (call, call.live.pop(request_id), Event(request_id, [], "", error=error))
            for request_id, call in self._calls.items()
        ]
        self._calls.clear()
        self._mailbox.close()
        self._mailbox = self._shared.new_mailbox()
        self._shared.settle()
        if news:
            self._deliver(time.perf_counter(), news)
        while self._tasks:
            future, task = self._tasks.popleft()
            task.close()
            future.set_exception(error)


def new_future() -> Future:
    """Make a future that cannot be cancelled, because its work happens anyway."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future
