"""A decode step of stage D under `torch.profiler`: which operators take its time.

The tutor on the CPU with one thread, one request past its prompt. An operator's own time leaves out the operators that
it calls. What a step takes beside its operators is Python: the engine, and the model's `forward`. Recording makes each
operator slower, so shares mean more than microseconds.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.micro import caption, one_thread
from benchmarks.text import markdown
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


def table(results: list[dict]) -> dict[str, list[str]]:
    result = results[0]
    rows, step = result["rows"], result["step_us"]
    shown = [(f"`{r['name']}`", f"{r['calls']:.0f}", r["self_us"]) for r in rows[:SHOWN]]
    rest = rows[SHOWN:]
    shown.append((f"{len(rest)} others", f"{sum(r['calls'] for r in rest):.0f}", sum(r["self_us"] for r in rest)))
    shown.append(("Python between operators", "", step - sum(r["self_us"] for r in rows)))
    body = [[name, calls, f"{micros:.0f}", f"{micros / step:.0%}"] for name, calls, micros in shown]
    lines = markdown(["operator", "calls per step", "own time per step, µs", "share"], body)
    return {"decode-profile": [*lines, "", caption(result, f"{step:.0f} µs per step under the profiler")]}
