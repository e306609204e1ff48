"""Server-sent events: how a server sends one message after another in one HTTP answer.

    data: {"choices": [{"text": "A KV"}]}
                                                  <- the empty line ends the event
    data: {"choices": [{"text": " cache"}]}

    data: [DONE]

Plain text, read line by line as it comes (https://html.spec.whatwg.org/multipage/server-sent-events.html). The OpenAI
API sends one JSON object per event and ends with the word `[DONE]`.
"""

from __future__ import annotations

import json


def event(data: str) -> bytes:
    """Frame `data` as one event: each of its lines behind `data: `, and an empty line at the end."""
    lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "".join(f"data: {line}\n" for line in lines).encode() + b"\n"


def json_event(message: object) -> bytes:
    """Frame a message as one event. JSON writes line breaks inside strings as \\n, so it is one line."""
    return event(json.dumps(message, ensure_ascii=False, separators=(",", ":")))


DONE = event("[DONE]")
