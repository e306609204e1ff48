"""How likely the model finds each token of a prompt, as tools that evaluate models ask.

    "The capital of France is" + " Paris"     log-probability of each token after those before it: -0.2
    "The capital of France is" + " Rome"      …                                                   -7.1

A question with given answers needs no sampling: the likeliest answer is the model's. All these log-probabilities come
out of one prefill, whose every final state has the scores of the next token. An engine's own prefill throws all final
states away but the last one of each prompt, and a token found in the prefix cache has keys and values, but no final
state at all. So prompts are scored in a prefill of their own, between two steps of the engine. It takes free blocks of
the pool, shares none with the prefix cache, and gives them back. A prompt that is also continued runs twice.

The scores of 2,048 rows of a vocabulary of 151,936 take 1.2 GB in float32, so they are made in pieces of `PIECE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from stage_a_naive.contract.outputs import Completion, Request
from stage_a_naive.contract.params import SamplingParams
from stage_d_paged.batch import Chunk, flat_batch
from stage_d_paged.sequence import Sequence
from stage_e_batching.calls import Calls
from stage_e_batching.options import BatchingOptions
from stage_e_batching.sampler.logprobs import row_logprobs

MOST_TOKENS = 2048  # in one prefill: what runs beside it waits that long
PIECE = 2**25  # scores at a time: 64 MiB in 16 bits; the log-softmax goes through them in smaller groups still
NO_BLOCK = (-1, b"")  # a key that no block of the prefix cache has
PromptLogprobs = list[dict[int, float] | None]  # by position: the likeliest tokens, then the prompt's own


def check_can_score(options: BatchingOptions) -> None:
    """Raise `ValueError` for an engine of several ranks: each holds a part of the model, and runs whole steps only."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(options, name, 1)) > 1:
            raise ValueError(f"an engine with {name}={size} cannot score prompts; start the server with {name}=1")


def groups(prompts: list[list[int]], most: int = MOST_TOKENS) -> Iterator[list[list[int]]]:
    """Group prompts, in their order, for one prefill each: at most `most` tokens, or one prompt that is longer."""
    group: list[list[int]] = []
    for prompt in prompts:
        if group and sum(map(len, group)) + len(prompt) > most:
            yield group
            group = []
        group.append(prompt)
    yield group


@torch.inference_mode()
def score_prompts(prompts: list[list[int]], count: int, calls: Calls) -> list[PromptLogprobs] | None:
    """Score a group of prompts between two steps of the engine.

    Args:
        prompts: their token ids.
        count: how many of the likeliest tokens are told at every position.

    Returns:
        for each prompt, the log-probabilities at each position, None at the first; or None if there are too few free
        blocks for all of them now.
    """
    with calls.lock:  # other threads of the program may run steps, too
        blocks = calls.engine.scheduler.block_manager
        sequences = [_sequence(prompt) for prompt in prompts]
        try:
            if not all(blocks.allocate(sequence, len(sequence)) for sequence in sequences):
                return None
            return _score(sequences, count, calls.engine.runner)
        finally:
            for sequence in sequences:
                blocks.free(sequence)


def _sequence(prompt: list[int]) -> Sequence:
    no_tokenizer = cast("Any", None)  # it makes no text
    request = Request(0, prompt, SamplingParams(), seed=0)
    return Sequence(Completion(request, no_tokenizer, frozenset(), len(prompt), True), block_keys=[NO_BLOCK])


def _score(sequences: list[Sequence], count: int, runner: Any) -> list[PromptLogprobs]:
    if len(sequences) == 1:  # it may be longer than a prefill
        length = len(sequences[0])
        steps = [[Chunk(sequences[0], at, min(MOST_TOKENS, length - at))] for at in range(0, length, MOST_TOKENS)]
    else:
        steps = [[Chunk(sequence, 0, len(sequence)) for sequence in sequences]]
    rows = [row for step in steps for row in _step(step, count, runner)]  # one for every token
    scored: list[PromptLogprobs] = []
    for sequence in sequences:
        scored.append([None, *rows[: len(sequence) - 1]])  # a row has the scores of the token behind it
        del rows[: len(sequence)]
    return scored


def _step(chunks: list[Chunk], count: int, runner: Any) -> PromptLogprobs:
    """Run chunks of prompts; returns for every row the log-probabilities of the token behind it."""
    model, cache = runner.model, runner.kv_cache
    device = cache.tensor.device
    batch = flat_batch(chunks, cache.block_size, device)
    hidden = model(batch.input_ids, batch.positions, cache, batch.metadata)  # [tokens, hidden]
    behind = [i for s, start, n in chunks for i in [*s.token_ids, 0][start + 1 : start + n + 1]]  # 0: behind the last
    found: PromptLogprobs = []
    most = max(1, PIECE // model.config.vocab_size)
    for at in range(0, len(behind), most):
        ids = behind[at : at + most]
        every, counts = range(len(ids)), [count] * len(ids)
        logits = model.compute_logits(hidden[at : at + most])
        asking = torch.arange(len(ids), dtype=torch.int32, device=device)
        told = row_logprobs(logits, torch.tensor(ids, device=device), asking, list(every), counts)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the copies to the host have arrived
        found += told.by_row(ids)
    return found
