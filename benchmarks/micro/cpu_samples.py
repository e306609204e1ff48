"""Where the CPU spends a decode step: its Python stack, sampled every millisecond.

A profiler that records every call slows each of them down. A timer that interrupts a thousand times per second and
records one line does not. A line that calls PyTorch includes the call's work in C++: choosing the kernel, allocating
its result, launching it.
"""

from __future__ import annotations

import linecache
import signal
import time
from collections import Counter
from functools import partial
from types import FrameType

from benchmarks.engines import select
from benchmarks.micro import with_engine
from stage_a_naive.sampling import SamplingParams

SECONDS, PROMPT = 0.001, 128
# Part -> texts of which one is in the path of the line's file, the first part that fits. Below them: everything else.
WAITS = "waiting for the GPU"
PARTS = {
    "Triton": ("/site-packages/triton/",),
    "calls of modules": ("/nn/modules/module.py",),
    "operators of the layers": (
        "stage_d_paged/model.py",
        "stage_d_paged/layers.py",
        "/site-packages/torch/",
        "/attention/",
    ),
    "transformers": ("/site-packages/transformers/",),
    "input of the step": ("stage_d_paged/batch.py",),
    "sampling": ("/sampler/", "stage_a_naive/sampling.py"),
}
REST = "engine"


def in_ms(row: dict, part: str) -> float | None:
    """Return the milliseconds of a step that the samples found there; None if the engine has no such part."""
    found = row["parts"].get(part)
    return found and row["step_ms"] * found / sum(row["parts"].values())


def part_of(path: str, line: int | None) -> str:
    """Return the part of the engine that a line belongs to."""
    if line and any(word in linecache.getline(path, line) for word in (".tolist()", "synchronize", ".item()")):
        return WAITS
    return next((part for part, texts in PARTS.items() if any(text in path for text in texts)), REST)


def measure(
    engines: tuple = ("A", "D", "E"),
    model: str = "random:qwen2.5-0.5b",
    batches: tuple = (1, 32),
    runs: int = 2,
    tokens: int = 256,
) -> dict:
    """Sample each engine while it decodes several requests together."""
    rows = []
    for engine in select(engines):
        own = batches[:1] if engine.one_at_a_time else batches
        work = partial(sample_batches, batches=own, runs=runs, tokens=tokens)
        for row in with_engine(work, engine.build, model, "auto", "auto", 2048):
            rows.append({"engine": engine.name} | row)
            print(rows[-1], flush=True)
    return {"model": model, "tokens": tokens, "rows": rows}


def sample_batches(llm: object, batches: tuple, runs: int, tokens: int) -> list[dict]:
    """Measure milliseconds per step, and samples by part, for each number of requests."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    rows = []
    for requests in batches:
        firsts = [range(1 + 500 * run, 1 + 500 * run + requests) for run in range(runs + 1)]  # no prompt comes twice
        prompts = [[list(range(first, first + PROMPT)) for first in own] for own in firsts]
        llm.generate(prompts[0], params, use_tqdm=False)
        seen: Counter[tuple[str, int | None]] = Counter()

        def look(_: int, frame: FrameType, seen: Counter = seen) -> None:
            seen[frame.f_code.co_filename, frame.f_lineno] += 1

        before = signal.signal(signal.SIGALRM, look)
        start = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
        try:
            for batch in prompts[1:]:
                llm.generate(batch, params, use_tqdm=False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        step_ms = 1e3 * (time.perf_counter() - start) / (runs * tokens)
        parts: Counter[str] = Counter()
        for place, count in seen.items():
            parts[part_of(*place)] += count
        rows.append({"requests": requests, "step_ms": step_ms, "parts": dict(parts)})
    return rows
