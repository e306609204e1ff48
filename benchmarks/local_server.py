"""A server of `beyond/serving` in a process of its own, on a free port, for measurements and for figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import ROOT

END_SECONDS = 30


class LocalServer(NamedTuple):
    """A server that runs."""

    url: str  # its address, without a path
    pid: int  # of its process

    def cpu_seconds(self) -> float:
        """CPU time of all its threads since it started, as Linux counts it, in steps of 10 ms on most machines."""
        ticks = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # user, system
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def local_server(*options: str, threads: int = 1) -> Iterator[LocalServer]:
    """A server with the options of `python -m beyond.serving`; ended when the block is left.

    Args:
        threads: of the CPU that the engine computes on.

    Raises:
        RuntimeError: it did not start; its own message is on standard error.
    """
    command = [sys.executable, "-m", "beyond.serving", "--port", "0", *options]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = next((line.split()[-1] for line in server.stdout if line.startswith("[serving] API ")), None)
            if address is None:
                raise RuntimeError(f"the server did not start: {' '.join(command[1:])}")
            yield LocalServer(address.removesuffix("/v1"), server.pid)
            server.send_signal(signal.SIGTERM)
            server.wait(END_SECONDS)
        finally:
            server.kill()
