"""A server in a thread of the test's process: real sockets, a real engine, and a look at it from outside."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from beyond.serving.protocol import Limits
from beyond.serving.server import Server, serve
from stage_e_batching.llm import LLM


@contextmanager
def running(llm: LLM, **options: object) -> Iterator[SimpleNamespace]:
    """A server on a free port, as `url`, `port`, `server` and `llm` (the `AsyncLLM`); ended when the block is left."""
    ready: list[tuple[Server, int]] = []
    options = {"host": "127.0.0.1", "port": 0, "model": "tutor", "limits": Limits()} | options

    def run() -> None:
        asyncio.run(serve(llm, on_ready=lambda *said: ready.append(said), **options))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: ready or not thread.is_alive())
    server, port = ready[0]
    wait_until(lambda: server.started)
    found = SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, server=server, llm=server._llm, thread=thread)
    try:
        yield found
    finally:
        if thread.is_alive():
            server.handle_exit(15, None)
        thread.join(60)
        assert not thread.is_alive()


def wait_until(happens: Callable[[], object], seconds: float = 30) -> None:
    """Wait for something that another thread does; an `AssertionError` if it does not happen."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def assert_idle(llm: LLM) -> None:
    """The engine has nothing to do, and comes to hold no block."""
    wait_until(lambda: not llm.engine.has_unfinished())
    llm.engine.scheduler.block_manager.check_invariants([])
    assert llm.engine.stats()["num_used_blocks"] == 0
