"""Mailboxes: how a call gets the results of its requests.

Several calls share one engine, and a call that runs a step runs it for all of them. So each call has a `Mailbox`. The
engine puts only *which* requests have news into it; the reader takes the tokens that it has not read yet from the
request. Putting a request in twice is harmless, which makes recovery from an interrupted step simple: put every request
in again.

A call owns its requests through its mailbox. When the call ends it closes the mailbox, and the engine drops what is not
done. If a second Ctrl-C prevents that, the mailbox is deleted with the call. The engine holds only a weak reference to
the mailbox, so the interpreter reports the deletion to the engine.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from stage_a_naive.contract.outputs import GenerationOutput
from stage_e_batching.step import BatchSequence


class Token(NamedTuple):
    """One generated token."""

    token_id: int
    text: str  # that became certain with it: without unfinished characters and possible beginnings of stop strings
    logprobs: dict[int, float] | None = None  # if the request asked for them


class Event(NamedTuple):
    """New tokens of a request, or its end."""

    request_id: int
    tokens: list[Token]  # empty if the request does not stream
    text: str  # of these tokens
    output: GenerationOutput | None = None  # the whole answer, once it is complete or has failed
    error: Exception | None = None  # what ended the request before its answer was complete


class Owner(weakref.ref):
    """The engine's weak reference to a mailbox, with the requests that are dropped together with it."""

    unfinished: Any = frozenset()  # of sequences; the default serves if an interrupt comes before `__init__` sets it


class Mailbox:
    """The events of one call's requests.

    Args:
        gone: receives `owner` when this mailbox is closed or deleted.

    Attributes:
        news: requests with something to read; one may be in it twice.
    """

    def __init__(self, gone: deque[Owner]) -> None:
        self._gone = gone
        self.owner = Owner(self, gone.append)
        self.owner.unfinished = set()
        self.news: deque[BatchSequence] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()

    @property
    def has_news(self) -> bool:
        return bool(self.news)

    def close(self) -> None:
        """Abandon the requests that have not ended; the engine drops them before its next step."""
        self._gone.append(self.owner)

    def put(self, sequence: BatchSequence) -> None:
        """Note that there is news of a request."""
        self.news.append(sequence)

    def take(self) -> list[Event]:
        """Read all news."""
        events: list[Event] = []
        while self.news:
            event = unread(self.news.popleft())
            if event is not None:
                events.append(event)
        return events

    def ring(self) -> None:
        """Wake up the thread that waits here now, or the next one that does."""
        self._bell.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for `ring`; returns whether it came."""
        with suppress(Empty):
            self._bell.get(timeout=seconds)
            return True
        return False


def unread(sequence: BatchSequence) -> Event | None:
    """Return the tokens, and the end, that a request's call has not read yet; None if there is nothing."""
    if sequence.end_was_read:
        return None
    # Read the end first: once a request has ended, its text does not grow, whichever thread runs the steps.
    output = sequence.output
    tokens = unread_tokens(sequence) if sequence.streams else []
    sequence.end_was_read = output is not None
    text, error = "".join(token.text for token in tokens), output and output.get("error")
    return Event(sequence.request_id, tokens, text, output, error) if tokens or output is not None else None


def unread_tokens(sequence: BatchSequence) -> list[Token]:
    """Return the tokens that the call has not read yet, and count them as read."""
    completion, num_prompt_tokens = sequence.completion, sequence.num_prompt_tokens
    ends, logprobs = completion.text_ends, completion.logprobs
    start, sequence.num_read = sequence.num_read, len(ends)
    text = completion.text  # after the count: another thread may be adding the next token
    return [
        Token(
            completion.all_token_ids[num_prompt_tokens + i],
            text[ends[i - 1] if i else 0 : ends[i]],
            logprobs[i] if logprobs else None,
        )
        for i in range(start, sequence.num_read)
    ]
