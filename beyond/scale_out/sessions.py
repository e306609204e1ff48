"""Sessions: requests that a replica answers faster if it has answered the others before.

A replica's prefix cache has only what this replica has computed. So the router of `replicas.py` sends all requests of
one session to one replica.
"""

from __future__ import annotations

import hashlib
import json

PREFIX_CHARACTERS = 256  # requests that begin with the same ones go to the same replica


def session_of(body: bytes) -> str:
    """Return the name of the session that a request belongs to: a hash of the beginning of its prompt.

    The beginning of a conversation is everything up to and including the first question, so that its next turns go to
    the same replica. At most `PREFIX_CHARACTERS` count, so all conversations with one long system prompt are one
    session.

    Args:
        body: a request of the API, as JSON: `prompt` (a text, or token ids) or else `messages`.

    Returns:
        Hexadecimal digits, or "" for any other request, whose error any replica can report.
    """
    try:
        fields = json.loads(body)
        prompt = fields.get("prompt")
        if prompt is None:
            roles = [message["role"] for message in fields["messages"]]
            prompt = fields["messages"][: roles.index("user") + 1]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    return hashlib.sha256(text[:PREFIX_CHARACTERS].encode(errors="surrogatepass")).hexdigest()
