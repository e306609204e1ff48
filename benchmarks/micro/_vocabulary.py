"""A tokenizer as large as a real model's, made from the tutor's, so that grammars on it need no download."""

from __future__ import annotations

import json
import random

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from beyond.engine import LLM
from beyond.structured.constraints import Constraints, constraints_of
from beyond.structured.tokens import library_tokens

PADDING = 256  # ids of a large vocabulary that its tokenizer has not


def widened(tokenizer: PreTrainedTokenizerFast, num_tokens: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer with more merges of two existing tokens each, up to this many tokens."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    parts = sorted(set(vocabulary) - {token["content"] for token in described["added_tokens"]})
    parts += ['"'] * (len(parts) // 100)  # else few tokens could end a string of JSON
    chance = random.Random(0)
    while len(vocabulary) < num_tokens:
        pair = chance.choices(parts, k=2)
        if (joined := "".join(pair)) not in vocabulary:
            vocabulary[joined] = len(vocabulary)
            merges.append(pair)
    wide = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=wide, eos_token=tokenizer.eos_token)


def widen(llm: LLM) -> Constraints:
    """Give the grammars of a `random:` model a tokenizer as large as its vocabulary."""
    constraints = constraints_of(llm.runner.sampler)
    wide = widened(llm.tokenizer, llm.vocab_size - PADDING)
    constraints.grammars._tokens = library_tokens(wide, llm.vocab_size, llm.eos_token_ids)
    return constraints
