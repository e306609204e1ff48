"""Time to first token by request rate, over HTTP, for two engines.

An open loop: requests arrive as a Poisson process, whether or not the earlier ones are answered. Answers differ in
length. `E` is compared with `static`, which is stage E with one rule changed: it admits requests only when all of the
last batch have ended, as stage D does; or with `F`, on a GPU. Rates are shares of E's rate when all requests arrive at
once, which is measured first, so that a share means the same on every machine. Both engines take turns, at every rate,
with the same requests.
"""

from __future__ import annotations

import asyncio
import random

from benchmarks.local_server import local_server
from benchmarks.serve import latencies, make_prompts, offer, percentile, schedule

ENGINES = {
    "E": ("--stage", "e"),
    "static": ("--engine", "benchmarks.micro.batching:StaticStageE"),
    "F": ("--stage", "f"),
}
NAMES = {"E": "E, continuous", "static": "E, static admission", "F": "F"}
REPEATS = 3


def measure(
    model: str = "tutor",
    device: str = "cpu",
    other: str = "static",
    slots: int = 8,
    requests: int = 48,
    input_len: int = 32,
    longest: int = 64,
    shares: tuple[float, ...] = (0.25, 0.5, 0.75),
) -> dict:
    """Measure TTFT and TPOT of every request, by engine and rate.

    Args:
        other: the engine to compare with E, `static` or `F`.
        slots: batch slots of every engine.
        longest: answers have 1 to this many tokens.
        shares: the rates, as shares of E's highest.
    """
    words = ["--model", model, "--device", device, "--max-num-seqs", str(slots), "--no-prefix-caching", "--no-page"]
    words += ["--max-queue", str(requests), "--gpu-memory-utilization", "0.25"]
    work, rows = (requests, input_len, longest), []
    with local_server(*ENGINES["E"], *words) as ours, local_server(*ENGINES[other], *words) as others:
        urls = {"E": ours.url, other: others.url}
        for url in urls.values():
            load(url, *work, float("inf"), -1)  # a warm-up
        capacity = load(urls["E"], *work, float("inf"), 0)["requests_per_s"]
        for repeat in range(REPEATS):
            for share in shares:
                for name, url in urls.items():
                    row = {"engine": name, "share": share, "rate": share * capacity, "repeat": repeat}
                    rows.append(row | load(url, *work, share * capacity, repeat))
    what = {"slots": slots, "requests": requests, "input_len": input_len, "longest": longest, "capacity": capacity}
    return {"model": model, **what, "rows": rows}


def load(url: str, count: int, input_len: int, longest: int, rate: float, seed: int) -> dict:
    """Offer `count` requests with answers of 1 to `longest` tokens; returns the times of each, in ms.

    Raises:
        RuntimeError: a request failed.
    """
    chance = random.Random(f"lengths {seed}")
    fixed = {"temperature": 0, "ignore_eos": True}
    prompts = make_prompts(count, input_len, 0, seed)
    bodies = [fixed | {"prompt": prompt, "max_tokens": chance.randint(1, longest)} for prompt in prompts]
    answers, seconds = asyncio.run(offer(url, bodies, schedule(count, rate, 1.0, seed)))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} requests failed: {failed[0]}")
    each = [latencies(answer) for answer in answers]
    return {
        "requests_per_s": count / seconds,
        "ttft_ms": [ms for one in each for ms in one["ttft"]],
        "tpot_ms": [ms for one in each for ms in one["tpot"]],
    }


def waits(result: dict) -> list[dict]:
    """Return the times of all requests of all repeats, by rate and engine: E, then the other one."""
    found: dict[tuple[float, str], dict] = {}
    for row in result["rows"]:
        rate, engine = row["rate"], row["engine"]
        own = found.setdefault((rate, engine), {"rate": rate, "engine": engine, "ttft": [], "tpot": []})
        own["ttft"] += row["ttft_ms"]
        own["tpot"] += row["tpot_ms"]
    return list(found.values())


def percentiles(result: dict) -> list[dict]:
    """Return the p99 and the median of TTFT, by engine and rate."""
    found = waits(result)
    return [
        {"engine": first["engine"], "share": name, "rate": row["rate"], "ms": percentile(row["ttft"], of)}
        for first in found[:2]
        for of, name in ((99, "p99"), (50, "median"))
        for row in found
        if row["engine"] == first["engine"]
    ]


def title(result: dict) -> str:
    """State the finding: the ratio of the two engines' p99 over the rates."""
    p99 = [percentile(row["ttft"], 99) for row in waits(result)]
    ratios = [other / ours for ours, other in zip(p99[::2], p99[1::2], strict=True)]
    if waits(result)[1]["engine"] == "F":
        return f"With stage E TTFT's p99 is {1 / max(ratios):.1f} to {1 / min(ratios):.1f} × as long as with F"
    return f"With static admission TTFT's p99 is {min(ratios):.1f} to {max(ratios):.1f} × as long"
