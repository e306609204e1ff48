"""A server of `beyond/serving` in a separate process, on a free port, for measurements and figures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.results import ROOT

END_SECONDS = 30


class LocalServer(NamedTuple):
    """A running server."""

    url: str  # its address, without a path
    pid: int  # of its process

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server and of its running child processes."""
        import psutil  # only needed to measure a server

        server = psutil.Process(self.pid)
        times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
        return sum(time.user + time.system for time in times)


@contextmanager
def local_server(*options: str, threads: int = 1, module: str = "beyond.serving") -> Iterator[LocalServer]:
    """Start a server with the options of `python -m beyond.serving`; it ends when the block is left.

    It ignores the model's sampling defaults, so that only the requests decide what is measured.

    Args:
        threads: CPU threads of the engine.
        module: another program with the same options.

    Raises:
        RuntimeError: it did not start; its message is on standard error.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", module, "--port", "0", "--generation-config", "vllm", *options]
    command.append("--no-request-log")  # its output is not read while it serves
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = next((line.split()[-1] for line in server.stdout if line.startswith("[serving] API ")), None)
            if address is None:
                raise RuntimeError(f"the server did not start: {' '.join(command[1:])}")
            yield LocalServer(address.removesuffix("/v1"), server.pid)
            server.terminate()
            server.wait(END_SECONDS)
        finally:
            server.kill()
