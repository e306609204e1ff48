"""A server in a thread of the test's process: real sockets, a real engine, and helpers that observe it."""

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

from beyond.serving.metrics import RequestMetrics  # noqa: E402
from beyond.serving.remote_engine import EngineDied, RemoteLLM  # noqa: E402
from beyond.serving.server import serve  # noqa: E402
from stage_e_batching.llm import LLM  # noqa: E402

QUESTION = "What is a KV cache?"
CHAT = [{"role": "user", "content": QUESTION}]
LONG = {"prompt": QUESTION, "temperature": 0, "max_tokens": 2000, "ignore_eos": True, "stream": True}


def engine(kind: type[LLM] = LLM, **options: object):
    """A module's fixture: stage E's engine, or another, with the tutor, idle again at the end."""

    @pytest.fixture(scope="module")
    def llm() -> Iterator[LLM]:
        with closing(kind("tutor", device="cpu", **options)) as llm:
            yield llm
            assert_idle(llm)

    return llm


@contextmanager
def running(
    llm: LLM | RemoteLLM, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None, **options: object
) -> Iterator[SimpleNamespace]:
    """A server on a free port, ended when the block is left.

    It has `url`, `port`, `server`, `llm` (the `AsyncLLM`), `loop` (the event loop), `thread`, and `errors`, where
    the death of an engine in another process comes.
    """
    told = SimpleNamespace(errors=[])
    options = {"host": "127.0.0.1", "port": 0, "model": "tutor"} | options

    def run() -> None:
        def tell(server: object, port: int) -> None:
            told.loop, told.port, told.server = asyncio.get_running_loop(), port, server

        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(serve(llm, on_ready=tell, **options))
        except EngineDied as error:
            told.errors.append(error)

    told.thread = threading.Thread(target=run)
    told.thread.start()
    wait_until(lambda: hasattr(told, "server") and told.server.started)
    [health] = [route.endpoint for route in told.server.config.app.routes if route.path == "/health"]
    told.llm, told.url = health.__self__.llm, f"http://127.0.0.1:{told.port}"
    try:
        yield told
    finally:
        if told.thread.is_alive():
            told.server.handle_exit(15, None)
        told.thread.join(60)
        assert not told.thread.is_alive()


def served(**options: object):
    """A module's fixture: a server of the module's engine, `llm`; the options are `running`'s."""

    @pytest.fixture(scope="module")
    def server(llm: LLM) -> Iterator[SimpleNamespace]:
        with running(llm, **options) as server:
            yield server

    return server


def ask(server: SimpleNamespace, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": QUESTION} | body, timeout=60)


def streamed(server: SimpleNamespace, **body: object):
    return httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | body, timeout=60)


def get(server: SimpleNamespace, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", timeout=60)


def num_ended(metrics: RequestMetrics, reason: str) -> float:
    """How many requests have ended for this reason."""
    return metrics.registry.get_sample_value("vllm:request_success_total", {"finished_reason": reason})


def wait_until(happens: Callable[[], object], seconds: float = 30) -> None:
    """Wait for something that another thread does; an `AssertionError` if it does not happen."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


async def until(happens: Callable[[], object]) -> None:
    """Wait for something that another coroutine or thread does."""
    while not happens():
        await asyncio.sleep(0.001)


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
