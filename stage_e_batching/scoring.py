"""Prompts that are scored while an engine serves others: one chunk between two steps, and no step waits longer."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Protocol, cast

from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.model import DecoderModel
from stage_d_paged.scoring import Scoring
from stage_e_batching.calls import Calls

WAIT_SECONDS = 0.005  # for blocks that no running request will free


class WholeModel(Protocol):
    """A runner whose model and cache are in one piece, as `check_can_score` makes sure."""

    model: DecoderModel
    kv_cache: KVCache


def score_prompts(
    prompts: list[list[int]], count: int, calls: Calls
) -> Generator[list[PromptLogprobs] | None, None, None]:
    """Score prompts; the caller lets steps run between two items. Close it to give the blocks back.

    Args:
        prompts: token ids that `LLM.requests` has checked.
        count: how many of the likeliest tokens to return at every position.
        calls: of the engine whose model and pool are used.

    Yields:
        None while prompts are left: one chunk of them has run, or too few blocks are free; at last their scores.
    """
    runner = cast("WholeModel", calls.engine.runner)
    scoring, scheduler = Scoring(prompts, count, runner.model, runner.kv_cache), calls.engine.scheduler
    try:
        while not scoring.is_done:
            yield None
            with calls.lock:  # no step runs
                must_wait = not scoring.step(scheduler) and not scheduler.num_running
            if must_wait:  # the blocks are those of a prompt that another thread scores
                time.sleep(WAIT_SECONDS)
        yield scoring.scores
    finally:
        with calls.lock:
            scoring.end(scheduler)
