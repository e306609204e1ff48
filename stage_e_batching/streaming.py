"""Between a call and the engine: a call's requests go in, its events come out, and none of them stays behind.

Several calls may be under way at the same time (a stream that is read now and then, a `generate` in between): they
share the engine, and every step runs requests of all of them. So each call has a mailbox of its own, and whichever call
steps the engine fills everybody's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from stage_a_naive.outputs import Request
from stage_e_batching.engine import Counters, Engine, Event


def serve(
    engine: Engine, requests: Sequence[Request], streams: bool, rates: Rates | None = None
) -> Iterator[tuple[Request, Event]]:
    """Drive the engine until all of `requests` are answered, yielding each one's events.

    However it ends, by an error, Ctrl-C, or a reader that stops reading, the requests that are not done are aborted.
    Close it (`contextlib.closing`) to have that happen at once.

    Args:
        streams: whether text is wanted as it comes, or only at the end.
        rates: told after every step.
    """
    mailbox: deque[Event] = deque()
    pending: dict[int, Request] = {}
    try:
        for request in requests:
            pending[engine.add_request(request, mailbox, streams)] = request
        while pending:
            while mailbox:
                event = mailbox.popleft()
                request = pending[event.request_id]
                if event.output is not None:
                    del pending[event.request_id]
                yield request, event
            lost = [i for i in pending if not engine.knows(i)] if not mailbox else []
            if lost:
                raise RuntimeError(f"{len(lost)} requests were aborted by somebody else")
            if pending:
                engine.step()
                if rates is not None:
                    rates.show()
    finally:
        engine.abort_all(mailbox)


class Rates:
    """Prefill and decode tokens a second, beside a progress bar; written at most ten times a second."""

    def __init__(self, progress: tqdm, counters: Counters) -> None:
        self._progress = progress
        self._counters = counters
        self._start = self._shown = time.perf_counter()
        self._prefill, self._decode = counters.num_prefill_tokens, counters.num_generated_tokens

    def show(self) -> None:
        now = time.perf_counter()
        if self._progress.disable or now - self._shown < 0.1:
            return
        self._shown = now
        seconds = now - self._start
        self._progress.set_postfix(
            prefill=f"{(self._counters.num_prefill_tokens - self._prefill) / seconds:.0f}tok/s",
            decode=f"{(self._counters.num_generated_tokens - self._decode) / seconds:.0f}tok/s",
        )
