"""Describe a model's tokens to the grammar library: constraints consist of text, never of special tokens.

A tokenizer has two kinds of tokens. Vocabulary tokens are pieces of text. *Added tokens* such as `<|im_end|>` are
special: a tokenizer writes their single id wherever their text appears. In a constraint, `<|im_end|>` is text that the
answer should contain. Written as the special token, it would end the answer or vanish from its text. So the library
gets other names for added tokens, which no constraint contains, and spells their text with ordinary tokens. A grammar
can still ask for an added token by its number, as in `<[2]>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from stage_a_naive.contract.structured_outputs import GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}  # of Unicode; a normalizer would change the constraint's bytes
UNUSED = "\U0010fffd"  # a character of private use


def library_tokens(tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """Describe a tokenizer to the library. It takes about a second for a large vocabulary.

    Args:
        vocab_size: of the model's logits. Ids past it are left out, ids past the tokenizer's are never allowed.
        eos_ids: that end an answer; those outside the model's vocabulary are left out.

    Raises:
        GrammarError: the library is missing, or no id can end an answer.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise GrammarError("structured_outputs needs the package llguidance: pip install llguidance") from None

    ends = sorted(i for i in eos_ids if 0 <= i < vocab_size)
    if not ends:
        given = f"eos_token_id is {sorted(eos_ids) or None}, and the model's vocabulary has {vocab_size} tokens"
        raise GrammarError(
            f"structured_outputs: no token can end an answer: {given}; give one in generation_config.json"
        )
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described |= {"padding": None, "truncation": None, "normalizer": _without_normal_forms(described["normalizer"])}
    _keep(described, vocab_size)
    names = {token["content"]: f"{UNUSED}{token['id']}{UNUSED}" for token in described["added_tokens"]}
    for token in described["added_tokens"]:
        token |= {"content": names[token["content"]], "special": True}
    model = described["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    else:  # Unigram: pairs of a text and its score
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    return LLTokenizer(json.dumps(described), n_vocab=vocab_size, eos_token=ends)


def _without_normal_forms(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] in NORMAL_FORMS:
        return None
    if normalizer["type"] == "Sequence":
        kept = filter(None, map(_without_normal_forms, normalizer["normalizers"]))
        return normalizer | {"normalizers": list(kept)}
    return normalizer


def _keep(described: dict[str, Any], vocab_size: int) -> None:
    """Remove the tokens that the model has no logits for."""
    model = described["model"]
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < vocab_size]
    if not isinstance(model["vocab"], dict):
        model["vocab"] = model["vocab"][:vocab_size]
        return
    kept = {text: i for text, i in model["vocab"].items() if i < vocab_size}
    if "merges" in model and len(kept) < len(model["vocab"]):
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [[a, b] for a, b in pairs if {a, b, a + b} <= kept.keys()]
    model["vocab"] = kept


@cache
def byte_tokens() -> LLTokenizer:
    """Make a vocabulary of the 256 bytes and an end token, to spell texts."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


class _Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [bytes([i]) for i in range(256)] + [b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
