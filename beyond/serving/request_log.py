"""A log line for every answered request, with an id that client and operator share.

    [request] 3f0c… POST /v1/chat/completions 200 0.482 s
    [request] my-id-7 POST /v1/completions 400 0.001 s context_length_exceeded

A client may send an id in `x-request-id`; every answer has one in that header. The log contains neither prompts nor
answers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from starlette.types import Scope

from beyond.serving.metrics import RequestMetrics

ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # what is safe in a header and in a line


def request_id(given: str | None) -> str:
    """Return the id that a client gave its request, or a new one if it gave none that fits in a line."""
    return given if given and ID.fullmatch(given) else os.urandom(16).hex()


class RequestLog:
    """Counts every answered request, and writes a line about it.

    Args:
        metrics: count the requests.
        write: called with each line; None: no log.
    """

    def __init__(self, metrics: RequestMetrics, write: Callable[[str], None] | None = None) -> None:
        self._metrics, self._write = metrics, write

    def note(self, scope: Scope, status: int, code: str, seconds: float) -> None:
        """Record that a request has been answered.

        Args:
            scope: the request's ASGI scope, with its `request_id`.
            code: the error's; empty for an answer.
        """
        path = scope["path"] if code != "no_such_path" else "other"
        self._metrics.count_answer("/v1/models" if path.startswith("/v1/models/") else path, status, code)
        if self._write is not None:
            shown = ascii(scope["path"])[1:-1]  # on one line, whatever it has
            line = f"[request] {scope['request_id']} {scope['method']} {shown} {status} {seconds:.3f} s"
            self._write(f"{line} {code}".rstrip())
