"""The engine's thread in its own process: an `EngineLoop` whose callers are at the other end of two pipes.

The thread reads the commands itself, between two steps. A second thread for reading would compete for the interpreter
while a step is planned, and every command would wait for its turn.
"""

from __future__ import annotations

import pickle
import select
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakValueDictionary

import torch

from beyond.serving.engine_loop import Call, EngineLoop, News
from beyond.serving.wire import pack_news, pack_result
from stage_a_naive.contract.errors import EngineBroken
from stage_e_batching.calls import Calls


class PipeInbox:
    """An inbox that another process fills through a pipe. One thread reads it.

    Args:
        pipe: carries pickled lists of tuples.
        do: called with each tuple, item by item; with `"close"` when the pipe has ended.
    """

    def __init__(self, pipe: Connection, do: Callable[..., None]) -> None:
        self._pipe, self._do = pipe, do
        self._is_open = True
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._items: deque[Callable[[], None]] = deque()

    def put(self, function: Callable[[], None]) -> None:
        """Add a command; called by the reading thread."""
        self._items.append(function)

    def empty(self) -> bool:
        """Tell whether nothing is there now."""
        return not self._items and not (self._is_open and self._poll.poll(0))

    def get(self) -> Callable[[], None]:
        """Wait for the next command and return it."""
        if not self._items:
            try:
                commands = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                self._is_open, commands = False, [("close",)]
            self._items.extend(partial(self._do, *command) for command in commands)
        return self._items.popleft()


class PipedLoop(EngineLoop):
    """Runs an engine in a thread, for another process.

    Args:
        calls: of an engine of stage E or later.
        commands: sent by `RemoteLoop`. A request's `index` is its number on the wire.
        news: the pipe that `RemoteLoop` reads.
    """

    def __init__(self, calls: Calls, commands: Connection, news: Connection) -> None:
        self._news = news
        self._callers: WeakValueDictionary[int, Call] = WeakValueDictionary()  # by requests that have not ended
        super().__init__(calls, self._write, PipeInbox(commands, self._do))

    @property
    def is_broken(self) -> bool:
        """Tell whether the last step failed in a way that no later step survives."""
        return isinstance(self.failure, (EngineBroken, torch.AcceleratorError))

    def _step(self) -> None:
        super()._step()
        if self.is_broken:  # end: a server that answers 500 for ever is worse than one that somebody starts again
            self.close()

    def _write(self, now: float, news: News) -> None:
        self._send(pack_news(now, self.failure, news))

    def _do(self, name: str, *arguments: Any) -> None:
        if name == "submit":
            call = Call(*arguments)
            self._callers.update(dict.fromkeys((request.index for request in call.requests), call))
            self.submit(call)
        elif name == "drop":
            if (call := self._callers.get(*arguments)) is not None:
                self.drop(call)
        elif name == "call":
            number, function = arguments
            self.call(function).add_done_callback(partial(self._answer, number))
        else:  # pause, resume, single_step, close
            getattr(self, name)()

    def _answer(self, number: int, done: Future) -> None:
        self._send(pack_result(number, done))

    def _send(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # the other process has ended; the inbox says so
            self._news.send_bytes(message)
