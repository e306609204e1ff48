"""From timed calls to figures.

The name of a figure carries its unit: `_ms`, `_per_s`, `seconds`. Only `_per_s` is better when higher. TTFT is the time
to first token, waiting included; TPOT the time per output token after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.workloads import Call, Workload

PERCENTILES = (50, 99)


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
    whole = by_tag["all"]
    rate = whole.call.output_tokens / whole.seconds
    if workload.name == "single":
        step = step_ms(by_tag["first"], whole)
        return {"prefill_ms": 1e3 * by_tag["first"].seconds, "tpot_ms": step, "output_tokens_per_s": rate}
    found = {"seconds": whole.seconds, "output_tokens_per_s": rate}
    if workload.name == "decode32":
        found["step_ms"] = step_ms(by_tag["first"], whole)
    if whole.metrics:
        if workload.name == "prefix":
            cached = sum(m["num_cached_tokens"] for m in whole.metrics)
            found |= {"tokens_cached": cached, "tokens_computed": whole.call.prompt_tokens - cached}
        for name in ("ttft", "tpot"):
            values = [1e3 * m[name] for m in whole.metrics]
            found |= {f"{name}_p{p}_ms": float(np.percentile(values, p)) for p in PERCENTILES}
    return found


def step_ms(first: TimedCall, whole: TimedCall) -> float:
    """Time of one more token for every request of the call: (T(n) - T(1)) / (n - 1); what happens once cancels out."""
    return 1e3 * (whole.seconds - first.seconds) / (max(whole.call.max_tokens) - 1)
