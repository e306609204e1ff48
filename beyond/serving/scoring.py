"""Prompts that are scored between two steps of an engine that others use: see `stage_d_paged/scoring.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_d_paged import scoring
from stage_e_batching.calls import Calls


def groups(prompts: list[list[int]], most: int = scoring.MOST_TOKENS) -> Iterator[list[list[int]]]:
    """Group prompts, in their order, for one prefill each: at most `most` tokens, or one prompt that is longer."""
    group: list[list[int]] = []
    for prompt in prompts:
        if group and sum(map(len, group)) + len(prompt) > most:
            yield group
            group = []
        group.append(prompt)
    yield group


def score_prompts(prompts: list[list[int]], count: int, calls: Calls) -> list[PromptLogprobs] | None:
    """Score a group of prompts as soon as no step runs; None if there are too few free blocks for all of them now."""
    with calls.lock:  # other threads of the program may run steps, too
        runner: Any = calls.engine.runner  # each has a model and a cache
        blocks = calls.engine.scheduler.block_manager
        return scoring.score_prompts(prompts, count, runner.model, runner.kv_cache, blocks)
