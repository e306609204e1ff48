"""The engine's process, separate from the HTTP process: how it is started, and its program.

    HTTP's process ── pipe: commands ──► inbox of the engine's thread (piped_loop.py)
                   ◄── pipe: one message per step ──┘

Python runs one thread of a process at a time. In one process, planning a step and writing the last step's events to the
clients would take turns; two processes do both at once. The engine's process knows nothing of HTTP.

It ends whenever the HTTP process ends, because then the pipes break. Ctrl-C and SIGTERM may reach all processes of a
server at once. The HTTP process handles them, so this one ignores them.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stage_e_batching.llm import LLM

END_SECONDS = 20  # for the step that runs, and for what an engine does at its end


# ---- in HTTP's process ----------------------------------------------------------------------------------------------


class EngineProcess:
    """Start an engine in a new process, without fork and without the caller's main module.

    Args:
        engine: `module:class`.
        options: the engine's arguments, `model` among them.

    Attributes:
        commands, news: this process's ends of the two pipes.
    """

    def __init__(self, engine: str, options: Mapping[str, Any]) -> None:
        self.engine, self.options = engine, dict(options)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.news, news_end = Pipe(duplex=False)
        commands_end, self.commands = Pipe(duplex=False)
        with news_end, commands_end:
            ends = commands_end.fileno(), news_end.fileno()
            command = [sys.executable, "-P", __file__, *map(str, ends)]
            self._process = subprocess.Popen(command, env=environment, pass_fds=ends)
            self.commands.send((engine, self.options))
        self.pid = self._process.pid

    def end(self, seconds: float = END_SECONDS) -> str:
        """Wait for the process to end, and kill it after `seconds`; returns how it ended."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process. A second call is a no-op."""
        self.commands.close()
        self.end()


# ---- in the engine's process ----------------------------------------------------------------------------------------


def serve_engine(commands: Connection, news: Connection, ready: threading.Event) -> int:
    """Load the engine named by the first message, and run it until the pipe ends; returns the exit code.

    Args:
        ready: set when the engine has been loaded.
    """
    engine, options = commands.recv()
    from beyond.serving.piped_loop import PipedLoop  # here: PyTorch takes seconds, in which the other process may end
    from beyond.serving.wire import READY, REFUSED, About
    from beyond.structured.compose import constrain
    from stage_a_naive.contract.errors import one_line

    try:
        llm = load_class(engine)(**options)
        constrain(llm)
    except (ValueError, OSError, MemoryError, ImportError) as error:  # what a user can cause
        news.send((REFUSED, one_line(error)))
        return 2
    news.send((READY, About.of(llm)))
    ready.set()
    freeze_heap()
    loop = PipedLoop(llm.calls, commands, news)
    loop.join()
    if loop.is_broken:
        os._exit(1)  # the engine's own end might wait for what has died
    llm.close()
    return 0


def freeze_heap() -> None:
    """Exclude all loaded objects from garbage collection: they are permanent, and a scan would stop the server."""
    gc.collect()
    gc.freeze()


def load_class(engine: str) -> type[LLM]:
    """Import an engine.

    Raises:
        ImportError: the module or class does not exist.
        ValueError: it cannot be served.
    """
    from stage_e_batching.llm import LLM

    module, _, name = engine.partition(":")
    found = getattr(importlib.import_module(module), name or "LLM", None)
    if found is None:
        raise ImportError(f"{module} has no {name}")
    if not (isinstance(found, type) and issubclass(found, LLM)):
        raise ValueError(f"{engine} has no continuous batching; serve stage E, F or an engine built on them")
    return found


def end_if_left(commands: Connection, ready: threading.Event) -> None:
    """Wait until the other process closes its end of the pipe; end this process if it is still loading the model."""
    poll = select.poll()
    poll.register(commands, 0)  # for its end, and not for what can be read
    poll.poll()
    if not ready.is_set():
        os._exit(1)


def end_at_once(failed: threading.ExceptHookArgs) -> None:
    """Print the error that ended a thread, and end the process, because other threads would wait for ever."""
    try:
        threading.__excepthook__(failed)
    finally:  # also where nobody reads what is printed
        os._exit(1)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.excepthook = end_at_once
    (commands, news), ready = [Connection(int(end)) for end in sys.argv[1:]], threading.Event()
    threading.Thread(target=end_if_left, args=(commands, ready), daemon=True).start()
    raise SystemExit(serve_engine(commands, news, ready))
