"""Who may call an engine, and when: one call at a time, in the process that made it, until it is closed.

An engine works on one set of buffers. Two calls that run at the same time would write into each other's, so calls from
several threads wait for one another. A call from inside the engine's own callback or sampler cannot wait: the call that
it would wait for is the one that it was made from. It is refused by name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CallGuard:
    """Refuses what would mix two calls, and serves calls from several threads one after another."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._calling_thread: int | None = None

    def close(self) -> None:
        """Refuse all later calls. Closing twice is harmless."""
        self._closed = True

    def check_usable(self) -> None:
        """Raise `RuntimeError` if the engine is closed, or belongs to another process."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this engine belongs to process {self._pid} and cannot be used in its forked child {os.getpid()} "
                "(locks, threads and GPU contexts do not survive a fork); make a new LLM in the child"
            )
        if self._closed:
            raise RuntimeError("this engine is closed; make a new LLM")

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Hold the engine for one call; other threads' calls wait. So a callback must not wait for one of them.

        Raises:
            RuntimeError: the calling thread is inside a call of this engine already.
        """
        if self._calling_thread == threading.get_ident():
            raise RuntimeError(
                "generate or chat was called from inside a callback or sampler of the same engine, which serves one "
                "call at a time; make the call after the first has returned, or use a second LLM"
            )
        with self._lock:
            self.check_usable()  # it may have been closed while this call waited
            try:
                self._calling_thread = threading.get_ident()
                yield
            finally:
                self._calling_thread = None
