"""From timed calls to figures.

The name of a figure carries its unit: `_ms`, `_per_s`, `seconds`. Only `_per_s` is better when higher. TTFT is the time
to first token, waiting included; TPOT the time per output token after the first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.workloads import Call, Workload

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class TimedCall:
    """A call, the time it took from outside, and what each request said about itself (`Metrics`, or nothing)."""

    call: Call
    seconds: float
    metrics: list[dict[str, float]]


def figures(workload: Workload, timed: Sequence[TimedCall]) -> dict[str, float]:
    """One round's figures."""
    by_tag = {t.call.tag: t for t in timed}
    if workload.name == "ttft":
        return {f"ttft_{tag}_ms": 1e3 * t.seconds for tag, t in by_tag.items()}
    if workload.name == "context":
        lengths = [tag.removesuffix(":all") for tag in by_tag if tag.endswith(":all")]
        return {f"tpot_{n}_ms": _pace_ms(by_tag[f"{n}:first"], by_tag[f"{n}:all"]) for n in lengths}
    whole = by_tag["all"]
    rate = whole.call.output_tokens / whole.seconds
    if workload.name == "single":
        step = _step_ms(by_tag["first"], whole)
        return {"prefill_ms": 1e3 * by_tag["first"].seconds, "tpot_ms": step, "output_tokens_per_s": rate}
    found = {"seconds": whole.seconds, "output_tokens_per_s": rate}
    if workload.name == "decode32":
        found["step_ms"] = _step_ms(by_tag["first"], whole)
    if whole.metrics:
        if workload.name == "prefix":
            cached = sum(m["num_cached_tokens"] for m in whole.metrics)
            found |= {"tokens_cached": cached, "tokens_computed": whole.call.prompt_tokens - cached}
        for name in ("ttft", "tpot"):
            values = [1e3 * m[name] for m in whole.metrics]
            found |= {f"{name}_p{p}_ms": float(np.percentile(values, p)) for p in PERCENTILES}
    return found


def _step_ms(first: TimedCall, whole: TimedCall) -> float:
    """Time of one more token for every request of the call: (T(n) - T(1)) / (n - 1)."""
    return 1e3 * (whole.seconds - first.seconds) / (max(whole.call.max_tokens) - 1)


def _pace_ms(first: TimedCall, whole: TimedCall) -> float:
    """TPOT as the engine saw it. After a long prompt the difference of two calls would be all prefill's noise."""
    return 1e3 * whole.metrics[0]["tpot"] if whole.metrics else _step_ms(first, whole)


def summarise(samples: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and spread of each figure over all samples."""
    return {
        name: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "samples": len(values),
        }
        for name in samples[0]
        if (values := [sample[name] for sample in samples if name in sample])
    }
