"""Between a call and the engine: a call's requests go in, its events come out, and none of them stays behind.

Several calls may be under way at the same time, in one thread (a stream that is read now and then, a `generate` in
between, another in a callback) or in several. They share the engine, and every step runs requests of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from stage_a_naive.outputs import Request
from stage_e_batching.engine import Engine
from stage_e_batching.live_requests import Counters
from stage_e_batching.mailbox import Event


def serve(
    engine: Engine, requests: Sequence[Request], streams: bool, rates: Rates | None = None
) -> Iterator[tuple[Request, Event]]:
    """Drive the engine until all of `requests` are answered, yielding each one's events.

    However it ends, by an error, Ctrl-C, or a reader that stops reading, the requests that are not done are dropped.
    Close it (`contextlib.closing`) to have that happen at once.

    Args:
        streams: whether text is wanted as it comes, or only at the end.
        rates: told after every step.

    Raises:
        Exception: what ended one of the requests.
    """
    mailbox = engine.new_mailbox()
    pending: dict[int, Request] = {}
    try:
        for request in requests:
            pending[engine.add_request(request, mailbox, streams)] = request
        while pending:
            for event in mailbox.take():
                if event.error is not None:
                    raise event.error
                request = pending[event.request_id]
                if event.output is not None:
                    del pending[event.request_id]
                yield request, event
            if pending:
                engine.advance(mailbox)
                if rates is not None:
                    rates.show()
    finally:
        if mailbox.owner.unfinished:
            mailbox.close()
            engine.settle()


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
