"""Score the tokens of a prompt, for tools that evaluate models.

    "The capital of France is" + " Paris"     log-probability of each token after those before it: -0.2
    "The capital of France is" + " Rome"      …                                                   -7.1

A multiple-choice question needs no sampling: the likeliest answer is the model's answer. All these log-probabilities
come from one prefill, because each final state gives the scores of the next token. The engine's normal prefill keeps
only the last final state of each prompt, and a token from the prefix cache has keys and values but no final state. So
prompts are scored in a separate prefill, between two steps of the engine. It takes free blocks of the pool, shares none
with the prefix cache, and gives them back. A prompt that is also continued runs twice.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from stage_a_naive.contract.logprobs import PromptLogprobs, score_tokens
from stage_a_naive.contract.outputs import Completion, Request
from stage_a_naive.contract.params import SamplingParams
from stage_d_paged.batch import Chunk, flat_batch
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.model import DecoderModel
from stage_d_paged.sequence import Sequence

MOST_TOKENS = 2048  # in one prefill; other requests wait that long
WHOLE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "hybrid_kv_cache": False}  # of these options
NO_BLOCK = (-1, b"")  # a key that matches no block of the prefix cache


def check_can_score(options: Any) -> None:
    """Raise `ValueError` for an engine whose model or pool is in several parts: only its own steps serve all of them."""
    for name, whole in WHOLE.items():
        if (value := getattr(options, name, whole)) != whole:
            raise ValueError(f"prompt_logprobs: an engine with {name}={value} cannot score prompts; use {name}={whole}")


@torch.inference_mode()
def score_prompts(
    prompts: list[list[int]], count: int, model: DecoderModel, kv_cache: KVCache, blocks: BlockManager
) -> list[PromptLogprobs] | None:
    """Score prompts together, or a single prompt that may be longer than one prefill.

    Args:
        prompts: their token ids.
        count: number of likeliest tokens to return at every position.
        blocks: the block manager of the KV cache.

    Returns:
        for each prompt, the log-probabilities at each position, None at the first; or None if there are not enough free
        blocks now.
    """
    sequences = [_sequence(prompt) for prompt in prompts]
    try:
        if not all(blocks.allocate(sequence, len(sequence)) for sequence in sequences):
            return None
        return _score(sequences, count, model, kv_cache)
    finally:
        for sequence in sequences:
            blocks.free(sequence)


def _sequence(prompt: list[int]) -> Sequence:
    no_tokenizer = cast("Any", None)  # no text is made
    request = Request(0, prompt, SamplingParams(), seed=0)
    return Sequence(Completion(request, no_tokenizer, frozenset(), len(prompt), True), block_keys=[NO_BLOCK])


def _score(sequences: list[Sequence], count: int, model: DecoderModel, kv_cache: KVCache) -> list[PromptLogprobs]:
    if len(sequences) == 1:  # it may be longer than a prefill
        length = len(sequences[0])
        steps = [[Chunk(sequences[0], at, min(MOST_TOKENS, length - at))] for at in range(0, length, MOST_TOKENS)]
    else:
        steps = [[Chunk(sequence, 0, len(sequence)) for sequence in sequences]]
    rows = [row for step in steps for row in _step(step, count, model, kv_cache)]  # one for every token
    scored: list[PromptLogprobs] = []
    for sequence in sequences:
        scored.append([None, *rows[: len(sequence) - 1]])  # a row has the scores of the next token
        del rows[: len(sequence)]
    return scored


def _step(chunks: list[Chunk], count: int, model: DecoderModel, kv_cache: KVCache) -> list[dict[int, float]]:
    """Run chunks of prompts; return the log-probabilities of the next token for every row."""
    batch = flat_batch(chunks, kv_cache.block_size, kv_cache.tensor.device)
    hidden = model(batch.input_ids, batch.positions, kv_cache, batch.metadata)  # [tokens, hidden]
    behind = [i for s, start, n in chunks for i in [*s.token_ids, 0][start + 1 : start + n + 1]]  # 0: after the last
    return score_tokens(behind, count, hidden, model.compute_logits)
