"""Tensor parallelism or replicas: the time of a decode step for 1 to 512 requests, on one GPU and on two.

Two replicas share the requests of one address: of N requests each gets N / 2, so a step takes as long as on one GPU
with N / 2 requests. Two ranks of tensor parallelism run all N in one step. Both ways use two GPUs; the faster step
wins.
"""

from __future__ import annotations

from functools import partial

from benchmarks.micro import answer, step_seconds, timed, with_engine
from stage_f_graph_tp import LLM

NEEDS_GPU = True
REQUESTS = [2**n for n in range(10)]
PROMPT, STEPS, REPEATS = 128, 32, 3


def measure(model: str = "random:qwen2.5-7b") -> dict:
    """Measure the seconds of a step with one rank and with two; needs two GPUs."""
    rows = []
    for ranks in (1, 2):
        options = {"tensor_parallel_size": ranks, "max_num_seqs": REQUESTS[-1], "max_model_len": 2 * (PROMPT + STEPS)}
        rows += with_engine(partial(step_rows, ranks), LLM, model, enable_prefix_caching=False, **options)
    return {"rows": rows, "model": model}


def step_rows(ranks: int, llm: LLM) -> list[dict[str, object]]:
    return [timed(samples_of(llm, count), ranks=ranks, requests=count) for count in REQUESTS]


def samples_of(llm: LLM, count: int) -> list[float]:
    """Return samples of the seconds per decode step of `count` requests."""

    def generate(num_tokens: int) -> float:
        start, end = answer(llm, count, PROMPT, num_tokens)
        return end - start

    return [step_seconds(generate, STEPS) for _ in range(1 + REPEATS)][1:]  # the first is a warm-up


def at_equal_totals(rows: list[dict]) -> list[dict]:
    """Return a row per total of requests: samples of tensor parallelism, and of two replicas with half of them."""
    samples = {(row["ranks"], row["requests"]): row["samples"] for row in rows}
    return [{"requests": n, "sharded": samples[2, n], "replicas": samples[1, max(n // 2, 1)]} for n in REQUESTS]
