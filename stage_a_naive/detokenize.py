"""From token ids back to text, one token at a time.

A token is a piece of bytes, not of characters: one Chinese character may be spread over three tokens, so the text of a
prefix of the ids is not always a prefix of the text. The tokenizer library's `DecodeStream` holds the bytes of an
unfinished character back until it is whole. What it does not know are ids outside the tokenizer's vocabulary, which
models have (embedding tables are padded, and random presets borrow a small tokenizer): those show as a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


def placeholder(token_id: int) -> str:
    """What stands in the text for an id that the tokenizer does not know."""
    return f"⟨{token_id}⟩"


class IncrementalDecoder:
    """Turns a stream of token ids into pieces of text that join to exactly the text of all the ids.

    Special tokens give no text. `text` is what has been returned so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._vocab_size = len(tokenizer)
        self._start_run()

    def _start_run(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=True)
        self._run_ids: list[int] = []  # ids since the stream started
        self._run_text = ""  # text returned for them

    def append(self, token_id: int) -> str:
        """Add one id; returns the text that became certain, possibly none."""
        if token_id >= self._vocab_size:
            return self.flush() + placeholder(token_id)
        self._run_ids.append(token_id)
        piece = self._stream.step(self._backend, token_id) or ""
        self._run_text += piece
        return piece

    def flush(self) -> str:
        """End the stream; returns what was held back (an unfinished character shows as U+FFFD)."""
        whole = self._backend.decode(self._run_ids, skip_special_tokens=True)
        rest = whole[len(self._run_text) :]
        self._start_run()
        return rest


def decode_all(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of all ids at once: exactly what the pieces of an `IncrementalDecoder` join to."""
    known = len(tokenizer)
    parts: list[str] = []
    for is_known, run in groupby(token_ids, known.__gt__):
        ids = list(run)
        decode = tokenizer.backend_tokenizer.decode
        parts += [decode(ids, skip_special_tokens=True)] if is_known else map(placeholder, ids)
    return "".join(parts)
