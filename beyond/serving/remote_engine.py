"""An engine in another process, as seen from the HTTP process.

    RemoteLLM    checks prompts and turns them into token ids, here
    RemoteLoop   what `EngineLoop` is for an engine in this process: submit, drop, pause, call, close

All of it runs in the event loop's thread. A message from the engine wakes up the event loop, as a client's does.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from beyond.serving.engine_loop import CLOSED, Call, EngineClosed, News, T, new_future
from beyond.serving.engine_process import END_SECONDS, EngineProcess, load_class
from beyond.serving.wire import READY, RESULT, pack_commands, take_messages, unpack_event
from beyond.structured.checks import check_structured_outputs
from beyond.structured.grammars import Grammars
from stage_a_naive.contract.errors import PromptTooLong, one_line
from stage_a_naive.contract.outputs import Request
from stage_a_naive.entrypoints.frontend import Frontend
from stage_e_batching.calls import Calls
from stage_e_batching.calls.mailbox import Event

DYING_SECONDS = 1
READ_BYTES = 1 << 20


class EngineDied(EngineClosed):
    """The engine's process ended unexpectedly."""


class RemoteLLM(Frontend):
    """The front end of an engine in another process, for use by `AsyncLLM`; it generates nothing itself.

    Args:
        process: a started process that loads the engine.

    Raises:
        ValueError: the engine could not be loaded; the message is the engine's.
        EngineDied: the process ended while it loaded the engine.
    """

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        given = dict(process.options)
        engine_class = load_class(process.engine)
        self.resolve = engine_class.resolve
        super().__init__(given.pop("model"), "cpu", "auto", given.pop("seed"))
        del given["device"], given["dtype"]
        self.options = engine_class.options_class(**given)
        self.package = engine_class.__module__.removesuffix(".llm")
        try:
            kind, about = process.news.recv()
        except (EOFError, OSError):
            raise EngineDied(f"the engine's process ended while it was loading the model ({process.end()})") from None
        if kind != READY:
            raise ValueError(about)
        self.vocab_size, self.max_model_len = about.vocab_size, about.max_model_len
        self.device, self.dtype = about.device, about.dtype
        self._longest_prompt = about.longest_prompt
        self._grammars = Grammars(self.source, self.vocab_size)  # every engine in another process has that part

    def _request(self, *given: Any) -> Request:
        request = super()._request(*given)
        if (length := len(request.prompt_token_ids)) > self._longest_prompt:
            raise PromptTooLong(
                f"prompt {request.index} has {length} tokens, and this engine's KV pool and steps have room for "
                f"{self._longest_prompt}; shorten the prompt, or raise num_kvcache_blocks, gpu_memory_utilization or, "
                "without chunked prefill, max_num_batched_tokens"
            )
        return request

    def _check_structured_outputs(self, *given: Any) -> None:
        check_structured_outputs(self._grammars, *given)


class RemoteLoop:
    """Sends requests to an engine in another process and delivers its news, in the running event loop.

    Args:
        process: the engine's process.
        hand_out: called after every step with its news and the time when they became known.

    Attributes:
        paused, failure, closed: as in `EngineLoop`.
        on_death: called when the engine's process has ended unexpectedly.
    """

    def __init__(self, process: EngineProcess, hand_out: Callable[[float, News], None]) -> None:
        self.paused = self.closed = False
        self.failure: Exception | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._process, self._hand_out = process, hand_out
        self._calls: dict[int, Call] = {}  # by the numbers of their requests that have not ended
        self._results: dict[int, Future] = {}
        self._numbers = count()  # of requests and of calls of functions
        self._broken = threading.Event()  # the connection, as it does at the end
        self._loop = asyncio.get_running_loop()
        self._news, self._commands = process.news.fileno(), process.commands.fileno()
        self._unread, self._unsent = bytearray(), bytearray()
        self._unpacked: list[tuple] = []  # commands
        for pipe in (self._news, self._commands):
            os.set_blocking(pipe, False)
        self._loop.add_reader(self._news, self._read)

    # ---- what `EngineLoop` has too ------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Have the call's requests answered."""
        numbered = [replace(request, index=next(self._numbers)) for request in call.requests]
        call.live = {new.index: request for new, request in zip(numbered, call.requests, strict=True)}
        self._calls |= dict.fromkeys(call.live, call)
        self._send("submit", numbered)
        if self.closed:
            self._loop.call_soon(self._fail_all)

    def drop(self, call: Call) -> None:
        """Forget a call: those of its requests that have not ended are aborted and their blocks freed."""
        for number in call.live:
            del self._calls[number]
        if call.live:
            self._send("drop", min(call.live))
        call.live.clear()

    def pause(self) -> None:
        """Run no more steps until `resume`; requests may come and go meanwhile."""
        self.paused = True
        self._send("pause")

    def resume(self) -> None:
        """Run on after `pause`."""
        self.paused = False
        self._send("resume")

    def single_step(self) -> None:
        """Run one step although paused, if there is anything to do."""
        self._send("single_step")

    def call(self, function: Callable[[Calls], T]) -> Future[T]:
        """Call a function of a module in the engine's thread between two steps; the future gets the result."""
        future = new_future()
        if self.closed:
            future.set_exception(EngineClosed(CLOSED))
        else:
            number = next(self._numbers)
            self._results[number] = future
            self._send("call", number, function)
        return future

    def close(self) -> None:
        """End the engine after its current step; unfinished requests get an error."""
        if not self.closed:
            self.closed = True
            self._loop.remove_writer(self._commands)
            self._process.commands.close()

    def join(self, timeout: float = END_SECONDS) -> None:
        """Wait until the engine's process has ended; kill it after a time limit. Not for the event loop's thread."""
        self._process.end(timeout)
        self._broken.wait(timeout)

    # ---- the two pipes ------------------------------------------------------------------------------------------

    def _send(self, *command: Any) -> None:
        """Send a command, in one message with others of the same moment."""
        if not self._unpacked:
            self._loop.call_soon(self._write)
        self._unpacked.append(command)

    def _write(self) -> None:
        """Write as much as the pipe takes now, and the rest later: an event loop must not wait."""
        if self.closed:
            return
        if self._unpacked:
            self._unsent += pack_commands(self._unpacked)
            self._unpacked.clear()
        with suppress(BlockingIOError):
            try:
                del self._unsent[: os.write(self._commands, self._unsent)]
            except BrokenPipeError:  # the engine's process has ended; reading its news says so
                self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._commands, self._write)
        else:
            self._loop.remove_writer(self._commands)

    def _read(self) -> None:
        """Read the received bytes: part of a message, or several messages."""
        try:
            came = os.read(self._news, READ_BYTES)
        except BlockingIOError:
            return
        self._unread += came
        for kind, *message in take_messages(self._unread):
            if kind == RESULT:
                number, value, error = message
                future = self._results.pop(number)
                future.set_exception(error) if error else future.set_result(value)
            else:
                now, self.failure, rows = message
                self._hand_out(now, list(self._events(rows)))
        if not came:
            self._end()

    def _events(self, rows: list[tuple]) -> Iterator[tuple[Call, Request, Event]]:
        for row in rows:
            number = row[0]
            call = self._calls.get(number)
            if call is None:  # the caller has given up
                continue
            request, event = call.live[number], unpack_event(*row)
            if event.output is not None or event.error is not None:
                del self._calls[number], call.live[number]
            yield call, request, event

    def _end(self) -> None:
        """Tell all waiting callers that the connection to the engine has broken."""
        self._loop.remove_reader(self._news)
        died = not self.closed
        if died:
            why = f" after a step that failed: {one_line(self.failure)}" if self.failure else ""
            self.failure = EngineDied(f"the engine's process died ({self._process.end(DYING_SECONDS)}){why}")
            self.close()
        self._fail_all()
        self._broken.set()
        if died:
            self.on_death()

    def _fail_all(self) -> None:
        error = self.failure if isinstance(self.failure, EngineDied) else EngineClosed(CLOSED)
        for future in self._results.values():
            future.set_exception(error)
        calls, self._calls, self._results = self._calls, {}, {}
        news = [(call, call.live.pop(number), Event(number, [], "", error=error)) for number, call in calls.items()]
        self._hand_out(time.perf_counter(), news)
