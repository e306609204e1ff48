"""A decode step of stage D under `torch.profiler`: which operators take its time, and what one layer looks like.

The tutor on the CPU with one thread, one request past a prompt of 128 tokens. An operator's own time leaves out the
operators that it calls. What a step takes beside its operators is Python: the engine, and the model's `forward`.
Recording makes each operator slower, so shares mean more than microseconds.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.micro import caption
from benchmarks.pictures.picture import BLUE, GREEN, GREY, ORANGE, finish, new_panel
from benchmarks.recording import trace_events
from benchmarks.text import markdown
from stage_d_paged import LLM, SamplingParams

README, MARKERS = "stage_d_paged/figures", ("decode-profile",)
STEPS, PROMPT, SHOWN = 8, 128, 8
KINDS = (  # operators as a layer's picture groups them: the first kind whose word is in the name
    ("matrix products", ("linear", "mm")),
    ("attention itself", ("scaled_dot_product",)),
    ("finding keys and values", ("index", "gather", "nonzero", "arange", "clamp", "divide", "remainder")),
    ("element by element", ("",)),
)


def measure(repeats: int = 3) -> dict:
    """Operators by their own time, and the outermost operators of one layer; of several recordings the fastest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        llm = LLM("tutor", device="cpu")
        llm.add_request(list(range(1, PROMPT + 1)), SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
        for _ in range(STEPS):
            llm.step()
        return min((record(llm) for _ in range(repeats)), key=lambda found: found["step_us"])
    finally:
        torch.set_num_threads(threads)


def record(llm: LLM) -> dict:
    """A few decode steps under the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            with torch.profiler.record_function("step"):
                llm.step()
    events = trace_events(profiler)
    steps = [e for e in events if e["name"] == "step" and e["cat"] == "user_annotation"]
    averages = [a for a in profiler.key_averages() if a.key.startswith(("aten::", "six_engines::"))]
    averages.sort(key=lambda a: -a.self_cpu_time_total)
    return {
        "step_us": sum(e["dur"] for e in steps) / STEPS,
        "layer": layer_spans(events, steps[STEPS // 2], len(llm.runtime.model.layers)),
        "rows": [
            {"name": a.key.removeprefix("aten::"), "calls": a.count / STEPS, "self_us": a.self_cpu_time_total / STEPS}
            for a in averages
        ],
    }


def layer_spans(events: list[dict], step: dict, num_layers: int) -> list[tuple[str, float, float]]:
    """(name, start, length) in µs of the outermost operators of a step's second layer."""
    operators = [e for e in events if e.get("cat") == "cpu_op" and step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    outermost: list[dict] = []
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        if not outermost or event["ts"] >= outermost[-1]["ts"] + outermost[-1]["dur"]:
            outermost.append(event)
    norms = [i for i, e in enumerate(outermost) if e["name"] == "aten::rms_norm"]
    if len(norms) != 2 * num_layers + 1:
        raise RuntimeError(f"a step of {num_layers} layers has {len(norms)} norms, not {2 * num_layers + 1}")
    layer = outermost[norms[2] : norms[4]]
    zero = layer[0]["ts"]
    return [(e["name"].removeprefix("aten::"), round(e["ts"] - zero, 1), round(e["dur"], 1)) for e in layer]


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


def draw(results: list[dict]) -> dict[str, bytes]:
    """One layer on a time axis, outermost operators coloured by kind."""
    layer = results[0]["layer"]
    figure, axes = new_panel(11, 2.9, "µs since the layer began", grid="x")
    colours, lanes = (BLUE, GREEN, ORANGE, GREY), range(len(KINDS))
    for lane, (kind, _), colour in zip(lanes, KINDS, colours, strict=True):
        spans = [(start, length) for name, start, length in layer if kind_of(name) == kind]
        axes.broken_barh(spans, (lane - 0.35, 0.7), color=colour, linewidth=0)
        axes.annotate(f"{len(spans)} calls", (1.01, lane), xycoords=("axes fraction", "data"), va="center", fontsize=10)
    axes.set_yticks(lanes, [kind for kind, _ in KINDS])
    axes.invert_yaxis()
    whole = layer[-1][1] + layer[-1][2]
    axes.set_xlim(0, whole)
    busy = sum(length for _, _, length in layer)
    axes.set_title(
        f"One layer of a decode step: operators take {busy / whole:.0%} of its time, Python the rest", loc="left"
    )
    return {"profile.png": finish(figure, "the operators of one decoder layer on a time axis, by kind").png}


def kind_of(name: str) -> str:
    return next(kind for kind, words in KINDS if any(word in name for word in words))
