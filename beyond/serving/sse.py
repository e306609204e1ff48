"""Server-sent events: how a server sends one message after another in one HTTP answer.

    data: {"choices": [{"text": "A KV"}]}
                                                  <- the empty line ends the event
    data: {"choices": [{"text": " cache"}]}

    data: [DONE]

The events are plain text, read line by line as they arrive
(https://html.spec.whatwg.org/multipage/server-sent-events.html). The OpenAI API sends one JSON object per event and
ends with the word `[DONE]`.
"""

from __future__ import annotations


def frame(data: str) -> bytes:
    """Frame `data` as one event: prefix each line with `data: `, and end with an empty line."""
    lines = data.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\ndata: ")
    return f"data: {lines}\n\n".encode()


DONE = frame("[DONE]")
START = {  # the message of ASGI with which an answer made of events begins
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),  # else nginx, as a proxy, collects events
    ],
}
