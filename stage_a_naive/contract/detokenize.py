"""From token ids back to text, one token at a time.

A token is a piece of bytes, not of characters: one Chinese character may be spread over three tokens, so the text of a
prefix of the ids is not always a prefix of the text. A piece is handed out once no later token can change it:

- Byte-level BPE (Qwen, Llama 3): the bytes of all tokens in a row are decoded. An unfinished character shows as U+FFFD
  at the end; it is held back until it is finished.
- BPE with byte fallback (Llama 2): a run of byte tokens such as `<0xE4>` is decoded as a whole, and one wrong byte
  makes every byte of the run a U+FFFD. The run is held back until a token of another kind ends it.

Some decoders (Llama 2's, those of SentencePiece models) drop the space at the beginning of a text. An answer is no such
beginning: it is decoded behind the prompt's last token.

Ids that the tokenizer does not know, which models have (embedding tables are padded, and random presets borrow a small
tokenizer), show as a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast


def placeholder(token_id: int) -> str:
    """Return the text that is shown for an id that the tokenizer does not know."""
    return f"⟨{token_id}⟩"


def last_with_text(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> list[int]:
    """Return the last of some ids that has a text whatever comes behind it, as a list; an empty one if there is none.

    Left out are special tokens, bytes, parts of a character, and ids that the tokenizer does not know.
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
    """Tell whether a token is one byte of a character, as `<0xE4>`."""
    return token.startswith("<0x") and len(token) == 6


def is_special(tokenizer: PreTrainedTokenizerFast, token_id: int) -> bool:
    """Tell whether an id gives no text wherever it is."""
    backend = tokenizer.backend_tokenizer
    shown = backend.decode([token_id], skip_special_tokens=False)
    return shown != "" and backend.decode([token_id], skip_special_tokens=True) == ""


class IncrementalDecoder:
    """Turns a stream of token ids into pieces of text that join to exactly the text of all the ids.

    Special tokens give no text, unless `skip_special_tokens` is False.

    Args:
        before: the ids that the stream continues.
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
        # Some decoders treat the first token of a text differently, so later ones are decoded behind the prompt's last,
        # or behind the first tokens that gave text.
        self._context, self._context_length = self._before, self._length_before  # of its text
        self._pending: list[int] = []  # ids whose text is not certain yet
        self._in_byte_run = False  # the last of them is a byte token

    def append(self, token_id: int) -> str:
        """Add one id; returns the text that became certain, possibly none."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return self.flush() + placeholder(token_id)
        if is_byte(token):
            self._pending.append(token_id)
            self._in_byte_run = True
            return ""
        text = self._text_of([*self._pending, token_id])
        if self._skip and (self._in_byte_run or not text) and is_special(self._tokenizer, token_id):
            return ""  # as if it were not there: it does not even end a run of bytes
        self._pending.append(token_id)
        self._in_byte_run = False
        if not text or text.endswith("\ufffd"):
            return ""
        if not self._context:
            self._context, self._context_length = self._pending, len(text)
        self._pending = []
        return text

    def flush(self) -> str:
        """End the stream; returns what was held back (an unfinished character shows as U+FFFD)."""
        rest = self._text_of(self._pending)
        self._start()
        return rest

    def _text_of(self, ids: list[int]) -> str:
        return self._backend.decode(self._context + ids, skip_special_tokens=self._skip)[self._context_length :]
