"""Break it, lab G: the second user waits until the first user's answer is complete.

Every test with one client passes, and every answer is right. The loop of the broken server differs from the reference
by a few words. Write a test that passes with the reference and fails with the broken one.
"""

import time
from types import SimpleNamespace

from beyond.serving.engine_loop import Call, EngineLoop
from labs.tests.support import request_of
from stage_e_batching.calls.mailbox import Mailbox


class TirelessEngine:
    """An engine whose answers run until they are aborted. `live` are the ids of the running requests."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.num_added = 0
        self.counters = SimpleNamespace(num_steps=0)
        self.engine = self  # whose steps are counted

    def new_mailbox(self) -> Mailbox:
        return SimpleNamespace(take=list, close=lambda: None)

    def add_request(self, request: object, mailbox: object) -> int:
        self.num_added += 1
        self.live.add(self.num_added)
        return self.num_added

    def abort(self, request_id: int) -> bool:
        self.live.discard(request_id)
        return True

    def advance(self, mailbox: object) -> None:
        time.sleep(0.001)
        self.counters.num_steps += 1

    def settle(self) -> None:
        pass


def in_time(happens, seconds: float = 5.0) -> bool:
    """Wait for something that another thread does; False if it does not happen in time."""
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(happens())


def a_call() -> Call:
    return Call([request_of([1, 2, 3])])


def test_a_request_that_comes_later_starts_while_another_runs():
    """`EngineLoop(engine, deliver)` runs in a separate thread; `submit` gives it a call."""
    engine = TirelessEngine()
    loop = EngineLoop(engine, lambda now, news: None)
    loop.submit(a_call())
    assert in_time(lambda: engine.counters.num_steps > 3)
    loop.submit(a_call())
    assert in_time(lambda: len(engine.live) == 2), "the second call waits although the first has no end"
    loop.close()
    loop.join(5)
