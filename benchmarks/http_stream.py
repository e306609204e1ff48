"""A client that costs little: one streamed completion over HTTP/1.1, with the time at which each event arrived.

A load generator competes with the server for the machine, so this is written on asyncio's streams and parses nothing
that it need not. It speaks to any server with the OpenAI API that sends its events in chunks, vLLM and SGLang included.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Answer:
    """What came of one request. Times are seconds on the monotonic clock."""

    due: float  # when it was to be sent
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of the events that hold a token
    num_tokens: int = 0  # that the server says it generated
    error: str = ""  # why there is no answer: a status, or what went wrong


async def stream_completion(url: str, body: dict[str, object], answer: Answer, api_key: str | None = None) -> None:
    """Ask for a completion and note in `answer` what comes.

    Args:
        url: of the server, without a path, such as `http://127.0.0.1:8000`.
        body: of the request; streaming and usage are added.

    Raises:
        OSError, EOFError: the connection failed or broke off.
    """
    parts = urlsplit(url)
    text = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = ["POST /v1/completions HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    head += [f"Content-Length: {len(text)}", "Connection: close"] + [f"Authorization: Bearer {api_key}"] * bool(api_key)
    answer.sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 20)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + text)
        status = (await reader.readline()).split()
        while (await reader.readline()).strip():
            pass  # the headers
        if status[1:2] != [b"200"]:
            answer.error = f"status {status[1].decode() if status[1:] else 'missing'}"
            return
        pending = b""
        while size := int(await reader.readline(), 16):  # of a chunk, which may end within an event
            pending += (await reader.readexactly(size + 2))[:-2]
            *events, pending = pending.split(b"\n\n")
            for event in events:
                _note(event, answer)
    finally:
        writer.close()


def _note(event: bytes, answer: Answer) -> None:
    if not event.startswith(b"data: {"):
        return
    now = time.perf_counter()
    message = json.loads(event[6:])
    if "error" in message:
        answer.error = message["error"]["message"]
    elif message.get("choices"):
        answer.arrivals.append(now)
    if message.get("usage"):
        answer.num_tokens = message["usage"]["completion_tokens"]
