"""From token ids back to text, one token at a time.

A token is a sequence of bytes, not of characters: one Chinese character may be spread over three tokens, so the text of
the first ids is not always the beginning of the whole text. A piece of text is returned once no later token can change
it:

- Byte-level BPE (Qwen, Llama 3): the bytes of consecutive tokens are decoded together. An unfinished character appears
  as U+FFFD at the end; it is held back until it is complete.
- BPE with byte fallback (Llama 2): a run of byte tokens such as `<0xE4>` is decoded as a whole, and one wrong byte
  turns every byte of the run into U+FFFD. The run is held back until another kind of token ends it.

Some decoders (Llama 2's and other SentencePiece models') drop the space at the beginning of a text. An answer is not
the beginning of a text, so it is decoded after the prompt's last token.

A model can generate ids that its tokenizer does not know (embedding tables are padded, and random presets borrow a
small tokenizer). Such an id appears as a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast


def placeholder(token_id: int) -> str:
    """Return the text shown for an id that the tokenizer does not know."""
    return f"⟨{token_id}⟩"


def last_with_text(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> list[int]:
    """Return, as a list, the last id whose text does not depend on the ids after it; an empty list if there is none.

    Special tokens, bytes, parts of a character, and ids that the tokenizer does not know are skipped.
    """
    backend = tokenizer.backend_tokenizer
    for token_id in reversed(token_ids):
        token = backend.id_to_token(token_id)
        if token is not None and not is_byte(token):
            text = backend.decode([token_id], skip_special_tokens=True)
            if text and "\ufffd" not in text:
                return [token_id]
    return []


def is_byte(token: str) -> bool:
    """Return whether a token is a single byte, such as `<0xE4>`."""
    return token.startswith("<0x") and len(token) == 6


def is_special(tokenizer: PreTrainedTokenizerFast, token_id: int) -> bool:
    """Return whether an id is a special token, which gives no text at any position."""
    backend = tokenizer.backend_tokenizer
    shown = backend.decode([token_id], skip_special_tokens=False)
    return shown != "" and backend.decode([token_id], skip_special_tokens=True) == ""


class IncrementalDecoder:
    """Turns a stream of token ids into pieces of text; joined, the pieces are exactly the text of all the ids.

    Special tokens give no text, unless `skip_special_tokens` is False.

    Args:
        before: the ids before the stream, i.e. the prompt.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, before: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._before = last_with_text(tokenizer, before)
        self._length_before = len(self._backend.decode(self._before, skip_special_tokens=True))
        self._start()

    def _start(self) -> None:
        # Some decoders treat the first token of a text differently, so later tokens are decoded after the prompt's last
        # token, or after the first tokens that gave text.
        self._context, self._context_length = self._before, self._length_before  # ids, and the length of their text
        self._pending: list[int] = []  # ids whose text is not certain yet
        self._in_byte_run = False  # the last pending id is a byte token

    def append(self, token_id: int) -> str:
        """Add one id and return the text that became certain, possibly none."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return self.flush() + placeholder(token_id)
        if is_byte(token):
            self._pending.append(token_id)
            self._in_byte_run = True
            return ""
        text = self._text_of([*self._pending, token_id])
        if self._skip and (self._in_byte_run or not text) and is_special(self._tokenizer, token_id):
            return ""  # ignored entirely: it does not even end a run of bytes
        self._pending.append(token_id)
        self._in_byte_run = False
        if not text or text.endswith("\ufffd"):
            return ""
        if not self._context:
            self._context, self._context_length = self._pending, len(text)
        self._pending = []
        return text

    def flush(self) -> str:
        """End the stream and return the text held back so far (an unfinished character appears as U+FFFD)."""
        rest = self._text_of(self._pending)
        self._start()
        return rest

    def _text_of(self, ids: list[int]) -> str:
        return self._backend.decode(self._context + ids, skip_special_tokens=self._skip)[self._context_length :]
