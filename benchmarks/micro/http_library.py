"""Which library should parse HTTP: streams per second of CPU time with h11 and with httptools, and what each refuses.

h11 is written in Python, httptools in C. Both servers run the same engine in a separate process. Only the HTTP process
is measured: its CPU time from the first request until the last answer has ended. The servers take turns, so that other
work on the machine slows both. The course's server does not need httptools: pip install httptools.
"""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from urllib.parse import urlsplit

from benchmarks.local_server import LocalServer, local_server
from benchmarks.micro import one_thread
from benchmarks.micro.http_cost import over_http
from benchmarks.serve import make_prompts

LIBRARIES = {"h11": "beyond.serving", "httptools": "benchmarks.micro.http_library"}
MOST_BYTES = 1 << 20  # of a head that is tried
BODY = json.dumps({"prompt": "What is a KV cache?", "max_tokens": 2}).encode()
STREAM = BODY[:-1] + b', "stream": true}'


class Front(LocalServer):
    """A server of which only the HTTP process is measured."""

    def cpu_seconds(self) -> float:
        """Return this process's CPU time by Linux's clock. psutil's has steps of 10 ms, too coarse here."""
        return time.clock_gettime(~self.pid << 3 | 2)


@one_thread()
def measure(streams: tuple[int, ...] = (64, 256), output_len: int = 32, repeats: int = 5) -> dict:
    """Measure streams per second of CPU time by the number of streams, and the request heads that are accepted."""
    words = ["--max-num-seqs", str(max(streams)), "--no-prefix-caching", "--no-page", "--device", "cpu"]
    rates: dict[str, dict[int, list[float]]] = {library: {n: [] for n in streams} for library in LIBRARIES}
    with ExitStack() as stack, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        fronts = {
            library: Front(*stack.enter_context(local_server(*words, module=module)))
            for library, module in LIBRARIES.items()
        }
        for repeat in range(repeats + 1):  # the first is a warm-up
            for n in streams:
                prompts = make_prompts(n, 16, 0, repeat)
                for library, front in fronts.items():
                    took = over_http(pool, 2, front, prompts, [output_len] * n)
                    rates[library][n] += [n / took.of_cpu] if repeat else []
        rows = [
            {"library": library, "streams": n, "streams_per_s": rates[library][n], **probed(front.url)}
            for library, front in fronts.items()
            for n in streams
        ]
    return {"model": "tutor", "output_len": output_len, "load": os.getloadavg()[2], "rows": rows}


def probed(url: str) -> dict:
    """Send an endless head, an upgrade to HTTP/2, and an HTTP/1.0 request; returns the server's answers."""
    head = b"POST /v1/completions HTTP/1.%d\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: %b\r\n"
    upgrade = b"Upgrade, close\r\nUpgrade: h2c"
    return {
        "head_bytes": longest_head(url),
        "keeps_body": exchanged(url, head % (1, upgrade), BODY).startswith(b"HTTP/1.1 200 "),
        "old_in_chunks": b"transfer-encoding" in exchanged(url, head % (0, b"close"), STREAM).lower(),
    }


def connected(url: str) -> socket.socket:
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=30)


def exchanged(url: str, head: bytes, body: bytes) -> bytes:
    """Return everything that a server answers until it closes."""
    with connected(url) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return b"".join(iter(lambda: client.recv(4096), b""))


def longest_head(url: str) -> int:
    """Return how many bytes of a head a server reads, in steps of a thousand; `MOST_BYTES` if it reads all."""
    with connected(url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        client.settimeout(0.01)  # to be told, or closed
        for sent in range(1000, MOST_BYTES, 1000):
            with suppress(TimeoutError):
                try:
                    client.sendall(b"X: " + b"x" * 995 + b"\r\n")
                    client.recv(1)
                except ConnectionError:
                    pass
                return sent
    return MOST_BYTES


def kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.0f}" if num_bytes < MOST_BYTES else "no limit"


def main() -> int:
    """Run the server with httptools instead of h11, and without its limits."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from beyond.serving import __main__, server

    class Connection(HttpToolsProtocol):
        def close_if_silent(self, now: float, seconds: float) -> None:
            """Do nothing."""

    server.Connection = Connection
    return __main__.main()


if __name__ == "__main__":
    raise SystemExit(main())
