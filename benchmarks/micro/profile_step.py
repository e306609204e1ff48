"""A decode step of stage D under `torch.profiler`: which operators take its time.

The tutor on the CPU with one thread, one request past its prompt. An operator's own time leaves out the operators that
it calls. What a step takes beside its operators is Python: the engine, and the model's `forward`. Recording makes each
operator slower, so shares mean more than microseconds.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.micro import one_thread
from stage_d_paged import LLM, SamplingParams

STEPS, PROMPT, SHOWN, REPEATS = 8, 128, 8, 3


@one_thread()
def measure() -> dict:
    """Operators by their own time; of several recordings the fastest."""
    llm = LLM("tutor", device="cpu")
    llm.add_request(list(range(1, PROMPT + 1)), SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    for _ in range(STEPS):
        llm.step()
    return min((record(llm) for _ in range(REPEATS)), key=lambda found: found["step_us"])


def record(llm: LLM) -> dict:
    """A few decode steps under the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            with torch.profiler.record_function("step"):
                llm.step()
    averages = sorted(profiler.key_averages(), key=lambda average: -average.self_cpu_time_total)
    [steps] = [a for a in averages if a.key == "step"]
    rows = [
        {"name": a.key.removeprefix("aten::"), "calls": a.count / STEPS, "self_us": a.self_cpu_time_total / STEPS}
        for a in averages
        if a.key.startswith(("aten::", "six_engines::"))
    ]
    return {"step_us": steps.cpu_time_total / STEPS, "rows": rows}


TABLES = """
[decode-profile]
rows = "operators"
corner = "operator"
line = "{line}"
columns."calls per step" = "{calls}"
columns."own time per step, µs" = "{us:.0f}"
columns.share = "{us / step_us:.0%}"
note = "{step_us:.0f} µs per step under the profiler"
"""


def operators(result: dict) -> list[dict]:
    """The operators that take most, all others, and what is no operator."""
    rows, rest = result["rows"], result["rows"][SHOWN:]
    shown = [(f"`{row['name']}`", f"{row['calls']:.0f}", row["self_us"]) for row in rows[:SHOWN]]
    shown.append((f"{len(rest)} others", f"{sum(r['calls'] for r in rest):.0f}", sum(r["self_us"] for r in rest)))
    shown.append(("Python between operators", "", result["step_us"] - sum(r["self_us"] for r in rows)))
    return [dict(zip(("line", "calls", "us"), own, strict=True)) for own in shown]
