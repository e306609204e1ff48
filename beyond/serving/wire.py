"""Messages between the engine's process and the HTTP process: one per step, cheap to write.

Nearly every event of a step is one token with its text. Such an event is a plain tuple of three, which `pickle` writes
in a small part of a microsecond. Rare events may cost more: ends, errors, log-probabilities. Commands of the same
moment share a message, too.

The two processes are one program, connected by two pipes that nobody else can open. Data from clients is never
unpickled. Every message begins with its length in four bytes, as in `multiprocessing`. The engine's process uses that
module's `Connection`. The HTTP process must not wait for a pipe, so it reads and writes partial messages if necessary.
"""

from __future__ import annotations

import pickle
import struct
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from beyond.serving.engine_loop import EngineClosed, News
from stage_a_naive.contract.structured_outputs import GrammarError
from stage_e_batching.calls.mailbox import Event, Token

if TYPE_CHECKING:
    from stage_e_batching.llm import LLM

HEAD = struct.Struct("!i")
READY, REFUSED, NEWS, RESULT = range(4)  # the first item of every message from the engine's process


@dataclass(frozen=True)
class About:
    """What the HTTP process must know about an engine to check requests.

    Attributes:
        longest_prompt: the longest prompt that fits in the KV pool and in a step, in tokens.
    """

    vocab_size: int
    max_model_len: int
    longest_prompt: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, llm: LLM) -> About:
        """Describe an engine."""
        scheduler = llm.engine.scheduler
        longest = scheduler.block_manager.capacity
        if not scheduler.enable_chunked_prefill:
            longest = min(longest, scheduler.max_num_batched_tokens)
        return cls(llm.vocab_size, llm.max_model_len, longest, llm.device, llm.dtype)


def pack_commands(commands: list[tuple]) -> bytes:
    """Write commands for the engine's process as one message, which begins with its length."""
    packed = pickle.dumps(commands, pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(packed)) + packed


def pack_news(now: float, failure: Exception | None, news: News) -> bytes:
    """Write the results of a step.

    Args:
        now: when they became known, in seconds on the monotonic clock, which both processes share.
        failure: the error that ended the last step.
        news: events of requests whose `index` is their number on the wire.
    """
    rows: list[tuple] = []
    broken = failure and portable(failure)  # of all requests of the step, so it crosses once
    for _, request, event in news:
        tokens, output, error = event.tokens, event.output, event.error
        if output is None and error is None and len(tokens) == 1 and tokens[0].logprobs is None:
            rows.append((request.index, tokens[0].token_id, tokens[0].text))
        else:
            error = broken if error is failure else error and portable(error)
            if output is not None and error is not None:
                output = output | {"error": error}
            rows.append((request.index, [tuple(token) for token in tokens], output, error))
    return pickle.dumps((NEWS, now, broken, rows), pickle.HIGHEST_PROTOCOL)


def take_messages(unread: bytearray) -> Iterator[tuple]:
    """Unpickle the complete messages, and remove them from the buffer."""
    while len(unread) >= HEAD.size and len(unread) >= (end := HEAD.size + HEAD.unpack_from(unread)[0]):
        message = pickle.loads(memoryview(unread)[HEAD.size : end])
        del unread[:end]
        yield message


def unpack_event(number: int, *said: Any) -> Event:
    """Read one row of `pack_news`."""
    if len(said) == 2:
        return Event(number, [Token(*said)], said[1])
    tokens, output, error = said
    tokens = [Token(*token) for token in tokens]
    return Event(number, tokens, "".join(token.text for token in tokens), output, error)


def pack_result(number: int, done: Future) -> bytes:
    """Write the result or the exception of the call with this number."""
    error = done.exception()
    result = (None, portable(error)) if error else (done.result(), None)
    return pickle.dumps((RESULT, number, *result), pickle.HIGHEST_PROTOCOL)


def portable(error: BaseException) -> BaseException:
    """Rebuild an error so that the other process can raise and log it, with its traceback as a note.

    Errors other than Python's built-in ones, `EngineClosed` and `GrammarError` are sent as text, because the other
    process might be unable to import their class and then could not read further messages.
    """
    copy: BaseException = RuntimeError(f"{type(error).__name__}: {error}")
    if type(error).__module__ == "builtins" or isinstance(error, (EngineClosed, GrammarError)):
        with suppress(Exception):  # it may hold what cannot be pickled
            copy = pickle.loads(pickle.dumps(error))
    copy.__notes__ = ["in the engine's process:\n" + "".join(traceback.format_exception(error))]
    return copy
