"""Rules about single tokens: what a request adds to their logits before a token is chosen.

    logit_bias          a number from -100 to 100
    min_tokens          -inf for the ids that end an answer, until the answer has this many tokens
    bad_words           -inf for the last token of a word, if the answer ends with the word's other tokens
    allowed_token_ids   -inf for every other id

The first three become a list of (row, token id, number) that is added to the logits. A row with allowed ids keeps only
the logits of these ids. For rows with rules, a step copies the logits in float32, and copies the lists to the device.
Other rows cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stage_a_naive.contract.errors import shown
from stage_a_naive.contract.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORBIDDEN = -math.inf
FOREVER = 2**62  # tokens
ANY = -1  # matches any token id


class Addition(NamedTuple):
    """A number to add to a token's logit if the row's last token is `after`."""

    token_id: int
    number: float
    after: int = ANY


@dataclass(frozen=True)
class TokenRules:
    """The rules of one request.

    Attributes:
        biases: pairs of a token id and a number.
        min_tokens: the least number of tokens before one of `end_ids`.
        end_ids: the ids that end an answer.
        bad_words: the tokens of each word, at least one.
        allowed: the only ids that may be chosen; an empty tuple allows all.
    """

    biases: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        index: int,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerFast,
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> TokenRules:
        """Make the rules for prompt `index`.

        Raises:
            ValueError: an id is outside the vocabulary, a word has no tokens, or an answer could run out of allowed
                tokens.
        """
        allowed = tuple(params.allowed_token_ids or ())
        for name, ids in (("logit_bias", dict(params.logit_bias)), ("allowed_token_ids", allowed)):
            if ids and max(ids) >= vocab_size:
                raise ValueError(
                    f"{name} of prompt {index}: token id {max(ids)} is outside the vocabulary of {vocab_size}"
                )
        end_ids = eos_token_ids.union(params.stop_token_ids or ()) if params.min_tokens else ()
        words = dict.fromkeys(spelling for word in params.bad_words for spelling in _spellings(word, tokenizer))
        if () in words:
            raise ValueError(f"bad_words of prompt {index} has a word without tokens: {shown(params.bad_words)}")
        # Ids that the model cannot choose need no rule.
        end_ids = frozenset(token_id for token_id in end_ids if token_id < vocab_size)
        words = tuple(word for word in words if max(word) < vocab_size)
        forbidden = end_ids.union(word[-1] for word in words)
        if len(forbidden) == vocab_size or allowed and forbidden.issuperset(allowed):  # all, at some point of an answer
            raise ValueError(
                f"allowed_token_ids of prompt {index} has only tokens that min_tokens or bad_words may forbid; "
                "allow one more"
            )
        return cls(params.logit_bias, params.min_tokens, end_ids, words, allowed)

    @property
    def until(self) -> int:
        """The number of generated tokens from which on the rules no longer apply."""
        return FOREVER if self.biases or self.bad_words or self.allowed else self.min_tokens

    def additions(self, num_generated: int, known: Sequence[int]) -> Iterable[Addition]:
        """Yield everything that is added to the logits; `allowed` is handled separately.

        Args:
            num_generated: number of tokens in the answer.
            known: these tokens, all of them or all but the last, which is then only on the device.
        """
        for token_id, number in self.biases:
            yield Addition(token_id, number)
        if num_generated < self.min_tokens:
            for token_id in self.end_ids:
                yield Addition(token_id, FORBIDDEN)
        for *before, last in self.bad_words:
            if len(before) <= num_generated:
                after = before.pop() if before and len(known) < num_generated else ANY
                if before == list(known[len(known) - len(before) :]):
                    yield Addition(last, FORBIDDEN, after)


def _spellings(word: str, tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, ...]]:
    """Return the tokens of a word at the beginning of a text, and after a space."""
    texts = word.lstrip(), " " + word.lstrip()
    return [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def apply_rules(
    logits: Tensor,
    rules: Sequence[TokenRules | None],
    steps: Sequence[int],
    known: Sequence[Sequence[int]],
    last: Tensor | None = None,
) -> Tensor:
    """Apply each row's rules to a float32 copy of its logits, without waiting for the device.

    Args:
        logits: `[rows, vocab]`.
        rules: one per row; None means no rules.
        steps: how many tokens each row has generated.
        known: these tokens, as in `additions`.
        last: each row's last token, `[rows]`, on the device; needed if the host does not know it.
    """
    asking = [(row, own) for row, own in enumerate(rules) if own is not None]
    scores, device = logits.to(torch.float32, copy=True), logits.device
    if allowed := [(row, token_id) for row, own in asking for token_id in own.allowed]:
        rows, ids = _to_device(allowed, torch.int64, device)
        kept = scores[rows, ids]
        scores.index_fill_(0, rows, FORBIDDEN).index_put_((rows, ids), kept)
    if added := [(row, *one) for row, own in asking for one in own.additions(steps[row], known[row])]:
        rows, ids, after = _to_device([(row, i, after) for row, i, _, after in added], torch.int64, device)
        [numbers] = _to_device([(number,) for _, _, number, _ in added], torch.float32, device)
        if last is not None:
            numbers = torch.where((after == ANY) | (after == last[rows]), numbers, 0)
        scores.index_put_((rows, ids), numbers, accumulate=True)
    return scores


def _to_device(entries: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy a list of tuples to the device, as a tensor with one row per tuple position."""
    columns = torch.tensor(entries, dtype=dtype, pin_memory=device.type == "cuda")
    return columns.to(device, non_blocking=True).T
