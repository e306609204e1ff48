"""Score the tokens of a prompt, for tools that evaluate models.

    "The capital of France is" + " Paris"     log-probability of each token after those before it: -0.2
    "The capital of France is" + " Rome"      …                                                   -7.1

A multiple-choice question needs no sampling: the likeliest answer is the model's answer. All these log-probabilities
come from one prefill, because each final state gives the scores of the next token. The engine's normal prefill keeps
only the last final state of each prompt, and a token from the prefix cache has keys and values but no final state. So
prompts are scored in separate prefills, in chunks between the engine's steps. A prompt takes free blocks of the pool,
shares none with the prefix cache, keeps them from chunk to chunk, and gives them back when it is scored. A prompt that
is also continued runs twice.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, cast

import torch

from stage_a_naive.contract.logprobs import PromptLogprobs, score_tokens
from stage_a_naive.contract.outputs import Completion, Request
from stage_a_naive.contract.params import SamplingParams
from stage_d_paged.batch import Chunk, flat_batch
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.model import DecoderModel
from stage_d_paged.sequence import Sequence

MOST_TOKENS = 512  # in one chunk; other requests wait that long
WHOLE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "hybrid_kv_cache": False}  # of these options
NO_BLOCK = (-1, b"")  # a key that matches no block of the prefix cache


def check_can_score(options: Any) -> None:
    """Raise `ValueError` for an engine whose model or pool is in several parts, which only its steps serve."""
    for name, whole in WHOLE.items():
        if (value := getattr(options, name, whole)) != whole:
            raise ValueError(f"prompt_logprobs: an engine with {name}={value} cannot score prompts; use {name}={whole}")


class Pool(Protocol):
    """Gives blocks to the prompts that are scored: a block manager, or a scheduler whose sequences need blocks too."""

    def allocate(self, sequence: Sequence, num_tokens: int, /) -> bool:
        """Give blocks for `num_tokens` tokens; False, and no change, if too few are free."""
        ...

    def free(self, sequence: Sequence, /) -> None:
        """Take the blocks back."""
        ...


class Scoring:
    """Prompts that are scored chunk by chunk. Other steps may run between two chunks.

    Args:
        prompts: their token ids.
        count: number of likeliest tokens to return at every position.
        model, kv_cache: the engine's.

    Attributes:
        scores: one entry per finished prompt, in order: the log-probabilities at each position, None at the first.
    """

    def __init__(self, prompts: list[list[int]], count: int, model: DecoderModel, kv_cache: KVCache) -> None:
        self.scores: list[PromptLogprobs] = []
        self._left = deque((_sequence(prompt), cast("list[dict[int, float]]", [])) for prompt in prompts)
        self._count, self._model, self._kv_cache = count, model, kv_cache

    @property
    def is_done(self) -> bool:
        """True when all prompts are scored."""
        return not self._left

    def step(self, pool: Pool) -> bool:
        """Run one chunk of one prompt, or of several short ones; False if too few blocks are free for any.

        A prompt starts again if its blocks were taken away because the engine started again with an empty pool.
        """
        chunks: list[Chunk] = []
        room = MOST_TOKENS
        for sequence, _ in self._left:
            if not room or not pool.allocate(sequence, len(sequence)):
                break
            start = sequence.num_computed_tokens
            chunks.append(Chunk(sequence, start, min(room, len(sequence) - start)))
            room -= chunks[-1].count
        if not chunks:
            return False
        found = self._run(chunks)
        for sequence, start, num_tokens in chunks:
            rows = self._left[0][1]
            rows[start:] = found[:num_tokens]
            del found[:num_tokens]
            sequence.num_computed_tokens += num_tokens
            if sequence.num_computed_tokens == len(sequence):  # only the last chunk's prompt may have more
                pool.free(sequence)
                self._left.popleft()
                self.scores.append([None, *rows[:-1]])  # a row has the scores of the token after it
        return True

    def end(self, pool: Pool) -> None:
        """Free the blocks of prompts that are not finished."""
        for sequence, _ in self._left:
            pool.free(sequence)

    @torch.inference_mode()
    def _run(self, chunks: list[Chunk]) -> list[dict[int, float]]:
        """Return the log-probabilities of the token after each token of the chunks."""
        batch = flat_batch(chunks, self._kv_cache.block_size, self._kv_cache.tensor.device)
        hidden = self._model(batch.input_ids, batch.positions, self._kv_cache, batch.metadata)  # [tokens, hidden]
        behind = [
            i for s, start, n in chunks for i in [*s.token_ids, 0][start + 1 : start + n + 1]
        ]  # 0: behind the last
        return score_tokens(behind, self._count, hidden, self._model.compute_logits)


def _sequence(prompt: list[int]) -> Sequence:
    no_tokenizer = cast("Any", None)  # it makes no text
    request = Request(0, prompt, SamplingParams(), seed=0)
    return Sequence(Completion(request, no_tokenizer, frozenset(), len(prompt), True), block_keys=[NO_BLOCK])
