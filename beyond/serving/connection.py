"""One client's connection: limits on a request's head and on silence, and answers to invalid HTTP.

h11 parses HTTP/1.1, and uvicorn runs the application. The additions here keep one client from ending the server or
stalling the others:

* A connection is read in pieces of `PIECE_BYTES`, so no client holds the event loop for longer than one piece takes.
* A head has at most `HEAD_BYTES`, or one piece more if its end is in that piece.
* The connection of a client that neither sends a request nor reads its answer is closed after some time.
* `Upgrade` is ignored, and the request is answered in HTTP/1.1.

https://www.rfc-editor.org/rfc/rfc9112.html
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from beyond.serving.event_stream import SEND_SECONDS
from beyond.serving.http_errors import RETRY_SECONDS, error_body, error_response
from beyond.serving.protocol import RequestError

PIECE_BYTES = 8 << 10  # a body in the smallest of chunks takes h11 8 ms per piece on a slow CPU
HEAD_BYTES = 16 << 10


class Http(h11.Connection):
    """h11 for one connection, with a shortcut for streams: a piece of an answer changes no state."""

    def send(self, event: h11.Event) -> bytes | None:
        """Return the bytes of an event. Data skip h11's state machine, which takes more than half of its time."""
        if type(event) is h11.Data and self.our_state is h11.SEND_BODY and self._writer is not None:
            written: list[bytes] = []
            self._writer(event, written.append)
            return b"".join(written)
        return super().send(event)


class Connection(H11Protocol):
    """A connection of `uvicorn.Server`; the arguments are uvicorn's."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._most, self.limit_concurrency = self.limit_concurrency, None  # uvicorn's refusal is no JSON
        self.conn = Http(h11.SERVER, HEAD_BYTES)
        self._unread = b""
        self._seen: tuple[object, int] | None = None  # the last request, and the bytes of answers not yet taken in
        self._since = 0.0  # when that was seen first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection; above the limit it gets 503 for any request."""
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            full = f"{self._most} connections are open, and no more may; retry later"
            error = RequestError(full, 503, code="too_many_connections", retry_after=RETRY_SECONDS)
            refusal = error_response(error)
            refusal.headers["connection"] = "close"
            self.app = refusal  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Read the received bytes, piece by piece."""
        self._unread += data
        if len(self._unread) == len(data):  # else the pieces before it are still to be read
            self._read()

    def _read(self) -> None:
        piece, self._unread = self._unread[:PIECE_BYTES], self._unread[PIECE_BYTES:]
        super().data_received(piece)
        if self._unread and not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)  # after the others

    def _read_on(self) -> None:
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self._read()

    def send_400_response(self, msg: str) -> None:
        """Report invalid HTTP or a head that is too long, and close. uvicorn calls it in its `except`."""
        found = sys.exc_info()[1]
        status = getattr(found, "error_status_hint", 400)  # 431: a head that is too long
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer has begun, and is broken off
            error = RequestError(f"not a request of HTTP/1.1: {found or msg}", status, code="invalid_http")
            body = json.dumps(error_body(error)).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
            head = h11.Response(status_code=status, headers=[*headers, ("connection", "close")])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # its handler must not answer now
            self.cycle.message_event.set()
        self.transport.close()

    def close_if_silent(self, now: float, seconds: float) -> None:
        """Close if no request has arrived for `seconds`, or no part of an answer has been read for `SEND_SECONDS`.

        Args:
            now: seconds on the monotonic clock. It is called again and again.
        """
        is_asked = self.cycle is not None and not self.cycle.response_complete
        seen = self.cycle, self.transport.get_write_buffer_size()
        if seen != self._seen or (is_asked and not self.flow.write_paused):
            self._seen, self._since = seen, now
        elif now - self._since > (SEND_SECONDS if is_asked else seconds):
            if self.transport.is_closing() or is_asked:
                self.transport.abort()  # closing waits until the client has taken in everything
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return False
