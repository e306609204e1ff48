"""A server of `beyond/serving` in a process of its own, on a free port, for measurements and for figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import ROOT

END_SECONDS = 30


class LocalServer(NamedTuple):
    """A server that runs."""

    url: str  # its address, without a path
    pid: int  # of its process

    def cpu_seconds(self) -> float:
        """CPU time of it and the processes that it has started, as Linux counts it, in steps of 10 ms on most machines.

        That of processes which have ended is not in it.
        """
        return sum(map(_cpu_seconds, _family(self.pid)))


@contextmanager
def local_server(*options: str, threads: int = 1) -> Iterator[LocalServer]:
    """A server with the options of `python -m beyond.serving`; ended when the block is left.

    Args:
        threads: of the CPU that the engine computes on.

    Raises:
        RuntimeError: it did not start; its own message is on standard error.
    """
    with local_servers({"it": options}, threads) as servers:
        yield servers["it"]


@contextmanager
def local_servers(
    options: Mapping[str, Sequence[str]], threads: int = 1, module: str | Mapping[str, str] = "beyond.serving"
) -> Iterator[dict[str, LocalServer]]:
    """Several servers, as `local_server`, which start at the same time.

    Args:
        options: of each, by a name.
        module: the program, or the program of each.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:
        started = {}
        for name, words in options.items():
            program = module if isinstance(module, str) else module[name]
            command = [sys.executable, "-m", program, "--port", "0", *words]
            started[name] = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(started[name].kill)
        yield {name: _when_ready(server) for name, server in started.items()}
        for server in started.values():
            server.send_signal(signal.SIGTERM)
        for server in started.values():
            server.wait(END_SECONDS)


def _when_ready(server: subprocess.Popen) -> LocalServer:
    address = next((line.split()[-1] for line in server.stdout if line.startswith("[serving] API ")), None)
    if address is None:
        raise RuntimeError(f"the server did not start: {' '.join(server.args[1:])}")
    return LocalServer(address.removesuffix("/v1"), server.pid)


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def _cpu_seconds(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # user, system
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
