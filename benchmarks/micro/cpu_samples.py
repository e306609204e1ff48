"""Where the CPU is during a decode step: its Python stack, looked at every millisecond.

A profiler that notes every call makes each of them slower. A timer interrupts a thousand times a second and notes one
line, so the step stays as long as it is. A line that calls PyTorch counts with what that call does in C++: choosing the
kernel, allocating its result, launching it.
"""

from __future__ import annotations

import linecache
import signal
import time
from collections import Counter
from types import FrameType

from benchmarks.engines import select
from benchmarks.micro import caption, with_engine
from benchmarks.text import markdown
from stage_a_naive.sampling import SamplingParams

SECONDS, PROMPT = 0.001, 128
# Part -> texts of which one is in the path of the line's file, the first part that fits. Below them: everything else.
WAITS = "waiting for the GPU"
PARTS = {
    "Triton's launcher": ("/site-packages/triton/",),
    "calls of modules": ("/nn/modules/module.py",),
    "operators of the layers": (
        "stage_d_paged/model.py",
        "stage_d_paged/layers.py",
        "/site-packages/torch/",
        "/attention/",
    ),
    "transformers' model and cache": ("/site-packages/transformers/",),
    "input of the step": ("stage_d_paged/batch.py",),
    "sampling": ("/sampler/", "stage_a_naive/sampling.py"),
}
REST = "engine"


def part_of(path: str, line: int | None) -> str:
    """What a line belongs to."""
    if line and any(word in linecache.getline(path, line) for word in (".tolist()", "synchronize", ".item()")):
        return WAITS
    return next((part for part, texts in PARTS.items() if any(text in path for text in texts)), REST)


def measure(
    engines: tuple = ("A", "D", "E"), model: str = "random:qwen2.5-0.5b", runs: int = 5, tokens: int = 512
) -> dict:
    """Samples of each engine, while it decodes one request."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [list(range(run + 1, run + 1 + PROMPT)) for run in range(runs + 1)]
    rows = []

    def sample(llm: object) -> dict:
        seen: Counter[tuple[str, int | None]] = Counter()
        llm.generate([prompts[0]], params, use_tqdm=False)

        def look(_: int, frame: FrameType) -> None:
            seen[frame.f_code.co_filename, frame.f_lineno] += 1

        before = signal.signal(signal.SIGALRM, look)
        start = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
        try:
            for prompt in prompts[1:]:
                llm.generate([prompt], params, use_tqdm=False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        step_ms = 1e3 * (time.perf_counter() - start) / (runs * tokens)
        parts: Counter[str] = Counter()
        for place, count in seen.items():
            parts[part_of(*place)] += count
        return {"step_ms": step_ms, "samples": dict(parts)}

    for engine in select(engines):
        rows.append({"engine": engine.name} | with_engine(sample, engine.build, model, "auto", "auto", 2048))
        print(rows[-1], flush=True)
    return {"model": model, "tokens": tokens, "rows": rows}


def table(results: list[dict]) -> dict[str, list[str]]:
    result = results[0]
    parts = [part for part in (*PARTS, REST, WAITS) if any(part in row["samples"] for row in result["rows"])]
    body = []
    for row in result["rows"]:
        per = row["step_ms"] / sum(row["samples"].values())
        body.append([row["engine"], f"{row['step_ms']:.2f}", *(f"{per * row['samples'].get(p, 0):.2f}" for p in parts)])
    lines = markdown(["engine", "ms per step", *parts], body)
    return {
        "cpu-samples": [
            *lines,
            "",
            caption(result, f"{result['model']}, one request, {PROMPT} in, {result['tokens']} out"),
        ]
    }
