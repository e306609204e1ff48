"""Read prompts that are more than a plain text, and explain why a prompt is rejected.

A prompt is text, a list of token ids, or vLLM's dictionaries of either: `{"prompt": "…"}`, `{"prompt_token_ids": […]}`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerFast

from stage_a_naive.contract.errors import PromptTooLong, shown
from stage_a_naive.contract.params import as_integer

Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]

_KEYS = {"prompt", "prompt_token_ids"}


def text_or_ids(index: int, prompt: Any) -> str | list[int]:
    """Return the text or the token ids of prompt number `index`; `ValueError` if it is neither."""
    if isinstance(prompt, Mapping):
        if not prompt or set(prompt) - _KEYS:
            raise ValueError(
                f"prompt {index}: a dictionary has 'prompt' (text) or 'prompt_token_ids' and nothing else, "
                f"got {shown(list(prompt))}"
            )
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else token_ids(index, ids)
    return prompt if isinstance(prompt, str) else token_ids(index, prompt)


def token_ids(index: int, ids: Any) -> list[int]:
    """Turn a list, tuple, array or tensor of token ids into a list of Python integers."""
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) == 0:
        hint = "; decode bytes first: prompt.decode('utf-8')" if isinstance(ids, bytes) else ""
        raise ValueError(f"prompt {index}: a prompt is text or a list of token ids, got {shown(ids)}{hint}")
    to_list = getattr(ids, "tolist", None)
    listed = list(ids) if to_list is None else to_list()
    if set(map(type, listed)) <= {int}:  # the usual case, ten times faster than a check of each
        return listed
    plain: list[Any] = [as_integer(i) for i in listed]
    if None in plain:
        raise ValueError(f"prompt {index}: token ids are integers, got {shown(listed[plain.index(None)])}")
    return plain


def check_text(index: int, text: str) -> None:
    """Reject text that UTF-8 cannot encode: half of a surrogate pair, which undecodable bytes leave."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt {index} is not valid Unicode text: character {error.start} is {text[error.start]!a}, "
            "half of a surrogate pair; was it read from bytes that are not UTF-8?"
        ) from None


def check_text_length(
    index: int, text: str, tokenizer: PreTrainedTokenizerFast, longest_token: int, max_tokens: int
) -> None:
    """Reject text that is too long however it is tokenized, without tokenizing it.

    Args:
        longest_token: length of the vocabulary's longest token.
        max_tokens: how many tokens a prompt may have.
    """
    # A tokenizer's normalizer may compose up to four characters into one; composed text keeps its length.
    composed = tokenizer.backend_tokenizer.normalizer is None or unicodedata.is_normalized("NFC", text)
    at_least = len(text) // (longest_token * (1 if composed else 4))
    if at_least > max_tokens:
        raise PromptTooLong(
            f"prompt {index} has {len(text)} characters, which are at least {at_least} tokens; at most {max_tokens} fit"
        )


def refuse_ids(index: int, ids: list[int], max_model_len: int, vocab_size: int) -> NoReturn:
    """Raise the error that says what is wrong with the token ids of a prompt."""
    if not ids:
        raise ValueError(f"prompt {index} is empty; a model needs at least one token to continue from")
    if len(ids) > max_model_len - 1:
        raise PromptTooLong(
            f"prompt {index} has {len(ids)} tokens; with a maximum model length of {max_model_len} "
            f"at most {max_model_len - 1} fit, so that one can be generated"
        )
    outside = min(ids) if min(ids) < 0 else max(ids)
    raise ValueError(f"prompt {index}: token id {outside} is outside the vocabulary of {vocab_size}")
