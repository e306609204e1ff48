"""A server in a thread of the test's process: real sockets, a real engine, and a look at it from outside."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

httpx = pytest.importorskip("httpx")
for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="the server of beyond/serving: pip install -e .[serve]")

from beyond.serving.protocol import Limits  # noqa: E402
from beyond.serving.remote_engine import EngineDied, RemoteLLM  # noqa: E402
from beyond.serving.server import Server, serve  # noqa: E402
from stage_e_batching.llm import LLM  # noqa: E402

QUESTION = "What is a KV cache?"
CHAT = [{"role": "user", "content": QUESTION}]
LONG = {"prompt": QUESTION, "temperature": 0, "max_tokens": 2000, "ignore_eos": True, "stream": True}


def engine(**options: object):
    """A module's fixture: stage E's engine with the tutor, idle again at the end."""

    @pytest.fixture(scope="module")
    def llm() -> Iterator[LLM]:
        with closing(LLM("tutor", device="cpu", **options)) as llm:
            yield llm
            assert_idle(llm)

    return llm


@contextmanager
def running(llm: LLM | RemoteLLM, **options: object) -> Iterator[SimpleNamespace]:
    """A server on a free port, ended when the block is left.

    It has `url`, `port`, `server`, `llm` (the `AsyncLLM`), `loop` (the event loop), `thread`, and `errors`, where
    the death of an engine in another process comes.
    """
    ready: list[tuple[Server, int, asyncio.AbstractEventLoop]] = []
    errors: list[EngineDied] = []
    options = {"host": "127.0.0.1", "port": 0, "model": "tutor", "limits": Limits()} | options

    def run() -> None:
        def tell(*said: object) -> None:
            ready.append((*said, asyncio.get_running_loop()))

        try:
            asyncio.run(serve(llm, on_ready=tell, **options))
        except EngineDied as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: ready or not thread.is_alive())
    server, port, loop = ready[0]
    wait_until(lambda: server.started)
    [health] = [route.endpoint for route in server.config.app.routes if route.path == "/health"]
    async_llm, url = health.__self__.llm, f"http://127.0.0.1:{port}"
    try:
        yield SimpleNamespace(url=url, port=port, server=server, llm=async_llm, loop=loop, thread=thread, errors=errors)
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
    wait_until(lambda: not llm.calls.has_unfinished())
    llm.engine.scheduler.block_manager.check_invariants([])
    assert llm.calls.stats()["num_used_blocks"] == 0


def messages(text: str) -> list[dict]:
    """The messages of a stream's text, without the `[DONE]` that must end it."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
