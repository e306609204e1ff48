"""A decode step in a profiler's trace: the kernels and the gaps between them, or the operators.

    python -m benchmarks.micro trace part=kernels      # stages E and F on a GPU; ranks=2,4: on several
    python -m benchmarks.micro trace part=operators    # stage D on one thread of a CPU

In a gap the GPU's multipliers are idle; `benchmarks/trace.py` says what is recorded. An operator's own time excludes
the operators that it calls; the rest of a step is Python. Recording slows down each operator, so there shares mean more
than microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from itertools import count

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.micro import chosen, device_name, one_thread, with_engine
from benchmarks.pictures.picture import Picture
from benchmarks.render import Record
from benchmarks.trace import Recording, Span, draw_gaps, from_rows, record, to_rows
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_d_paged import LLM as StageD
from stage_e_batching import LLM as StageE
from stage_f_graph_tp import LLM as StageF

STEPS, REQUESTS, PROMPTS = 4, (1, 32, 256), (128, 1024)  # steps of a recording; requests at once; tokens


def record_engine(
    name: str, llm: StageE, num_requests: int = 1, prompt_tokens: int = 128, steps: int = STEPS
) -> Recording:
    """Record decode steps of an engine of stage E or F, with all requests past their prefill."""
    params = SamplingParams(temperature=0.0, max_tokens=8 * steps + 16, ignore_eos=True)
    ids = [
        llm.calls.add_request(Request(i, [(7 * i + j) % 1000 for j in range(prompt_tokens)], params, seed=i))
        for i in range(num_requests)
    ]

    def run() -> None:
        for _ in range(steps):
            llm.calls.step()

    try:
        while llm.engine.scheduler.waiting or llm.engine.scheduler.prefilling:
            llm.calls.step()
        run()  # the first steps of a batch load kernels
        return record(name, run, llm.device, steps)
    finally:
        for request_id in ids:
            llm.calls.abort(request_id)
        while llm.calls.has_unfinished():  # an overlapped engine still has a step in flight
            llm.calls.step()
        llm.calls.step()


def record_prefill(name: str, llm: StageE, prompt_tokens: int) -> Recording:
    """Record the prefill of one prompt and its first token. Each recording has another prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    first = count(1)

    def run() -> None:
        start = next(first)
        llm.generate([[(start + 7 * i) % 1000 for i in range(prompt_tokens)]], params, use_tqdm=False)

    run()
    return record(name, run, llm.device, 1)


PARTS = ("QKV", "attention", "output", "gate-up", "down", "norm, rotation, SiLU", "all-reduce", "LM head", "sampling")
PARTS += ("copies", "megakernel", "between kernels", "waiting for the CPU")
# How the figure groups them; the last group is time in which no kernel runs.
GROUPS = {
    "attention, its products": ("QKV", "attention", "output"),
    "products of the MLP": ("gate-up", "down"),
    "LM head": ("LM head",),
    "norms, rotation, SiLU": ("norm, rotation, SiLU", "all-reduce"),
    "sampling, copies": ("sampling", "copies"),
    "megakernel": ("megakernel",),
    "idle": ("between kernels", "waiting for the CPU"),
}
DRAWN = {
    "stage F, graphs only": "1 request, stage\nD's, C's MLP",
    "stage F": "1 request,\nmegakernel",
    "stage F, graphs only, 32 requests": "32 requests,\nstage D's layers",
    "stage F, 32 requests": "32 requests,\nskinny GEMM",
}
# What a kernel is, by the first words that its name has; anything else is a norm, a rotation or a SiLU.
KERNELS = {
    "megakernel": ("decode_step_kernel",),
    "attention": ("_prefill_kernel", "decode_kernel", "flash", "fmha"),
    "MLP": ("::fused_kernel",),  # stage C's operator: gate-up, down and the work around them
    "product": ("qkv_rotate", "product_add", "gate_up_silu", "nvjet", "gemm", "gemv", "cutlass"),
    "its sum": ("splitkreduce",),
    "all-reduce": ("all_reduce", "nccl"),
    "sampling": ("_best_of", "argmax", "reduce_kernel<512"),
    "norm, rotation, SiLU": ("flip",),  # of the rotation, although it is a gather
    "copies": ("memcpy", "index", "gather", "scatter"),
}


def account(recording: Recording) -> dict[str, float]:
    """Break a step of stage F down into parts, in microseconds; their sum is the whole step.

    A kernel that begins before the previous one has ended (a dependent launch) counts from that end on, because until
    then it waits. Products are identified by their order: QKV, attention, output, gate-up, down, and finally the LM
    head.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    end, after_copy = recording.spans[0].start, True
    for part, span in zip(_parts(recording.spans), recording.spans, strict=True):
        stop = span.start + span.length
        parts["waiting for the CPU" if after_copy else "between kernels"] += max(0.0, span.start - end)
        after_copy = part == "copies"  # copies are not in the graph: what follows is launched by the CPU
        parts[part] += max(0.0, stop - max(end, span.start))
        end = max(end, stop)
    return {part: micros / recording.steps for part, micros in parts.items()}


def between_steps(recording: Recording) -> dict[str, float]:
    """Return the median µs of a step of stage F from its last product to the next step's first layer, by kind of work.

    Only steps after the first of a recording count: they are launched while the GPU still runs the previous one.
    """
    spans, parts = recording.spans, _parts(recording.spans)
    inner = [part in ("sampling", "copies") for part in parts]
    found: list[tuple[float, float, float]] = []
    for i in [i for i, span in enumerate(spans) if "HtoD" in span.name][1:]:
        first = max(k for k in range(i) if not inner[k])
        last = min(k for k in range(i, len(spans)) if not inner[k])
        copies = sum(s.length for s in spans[first + 1 : last] if "Memcpy" in s.name)
        kernels = sum(s.length for s in spans[first + 1 : last]) - copies
        whole = spans[last].start - spans[first].start - spans[first].length
        found.append((kernels, copies, whole - kernels - copies))
    return dict(zip(("kernels", "copies", "idle"), map(statistics.median, zip(*found, strict=True)), strict=True))


def _parts(spans: list[Span]) -> list[str]:
    """Return the part that each kernel belongs to."""
    found: list[str] = []
    products: list[int] = []  # since the last attention
    for i, span in enumerate(spans):
        matches = (kind for kind, words in KERNELS.items() if any(word in span.name.lower() for word in words))
        part = next(matches, "norm, rotation, SiLU")
        if part == "attention":
            if products:
                found[products[-1]] = "QKV"  # the last product before attention
            products = []
        elif part == "MLP":
            products += [i, i]
            part = "gate-up"
        elif part == "product":
            products.append(i)
            part = ("output", "gate-up", "down", "LM head")[min(len(products), 4) - 1]
        elif part == "its sum":
            part = found[-1]
        found.append(part)
    return found


# Name, engine, options, and which recordings are made of it.
ENGINES = (
    ("stage E: kernel by kernel", StageE, {}, ("decode",)),
    ("stage F, graphs only", StageF, {"without": "fused_layers,skinny_gemm,megakernel"}, ("decode",)),
    ("stage F, eager prefill", StageF, {"without": "prefill_graphs"}, ("prefill",)),
    ("stage F", StageF, {}, ("decode", "prefill")),
)


def measure(part: str = "kernels", model: str = "random:qwen2.5-0.5b", ranks: tuple[int, ...] = ()) -> dict:
    """Record the kernels of decode steps and prefills, or the operators of decode steps.

    Args:
        part: kernels or operators.
        ranks: also record decode steps of stage F on this many GPUs, on rank 0 (several: `ranks=2,4`).

    Raises:
        ValueError: the part does not exist, or needs a GPU that is missing.
    """
    parts = {"kernels": partial(record_kernels, model, ranks), "operators": profile_operators}
    return {"part": part} | chosen(parts, part, on_gpu=("kernels",))()


def record_kernels(model: str, ranks: tuple[int, ...]) -> dict:
    """Make every recording of every engine."""
    recordings = []
    several = [(f"stage F, {size} ranks", StageF, {"tensor_parallel_size": size}, ("decode",)) for size in ranks]
    options = {"device": "cuda", "max_num_seqs": max(REQUESTS), "num_kvcache_blocks": 16 * max(REQUESTS) + 64}
    options |= {"max_model_len": 2048, "enable_prefix_caching": False}
    for name, engine, switches, kinds in (*ENGINES, *several):
        recordings += with_engine(partial(record_all, name, kinds), engine, model, **options, **switches)
    return {"model": model, "rows": to_rows(recordings)}


def record_all(name: str, kinds: tuple[str, ...], llm: StageE) -> list[Recording]:
    """Record decode steps of `REQUESTS`, or prefills of `PROMPTS`, or both."""
    found = []
    if "decode" in kinds:
        found += [record_engine(name + (f", {rows} requests" if rows > 1 else ""), llm, rows) for rows in REQUESTS]
    if "prefill" in kinds:
        found += [record_prefill(f"{name}, prompt of {length} tokens", llm, length) for length in PROMPTS]
    return found


PROFILED_STEPS, PROMPT, SHOWN, REPEATS = 8, 128, 8, 3  # of the part `operators`


@one_thread()
def profile_operators() -> dict:
    """Return the tutor's operators by their own time, for one request past its prompt, from the fastest recording."""
    llm = StageD("tutor", device="cpu")
    llm.add_request(list(range(1, PROMPT + 1)), SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    for _ in range(PROFILED_STEPS):
        llm.step()
    return min((profiled(llm) for _ in range(REPEATS)), key=lambda found: found["step_us"])


def profiled(llm: StageD) -> dict:
    """Run a few decode steps under the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            with torch.profiler.record_function("step"):
                llm.step()
    averages = sorted(profiler.key_averages(), key=lambda average: -average.self_cpu_time_total)
    [steps] = [a for a in averages if a.key == "step"]
    rows = []
    for a in (a for a in averages if a.key.startswith(("aten::", "six_engines::"))):
        times = {"calls": a.count / PROFILED_STEPS, "self_us": a.self_cpu_time_total / PROFILED_STEPS}
        rows.append({"name": a.key.removeprefix("aten::"), **times})
    return {"step_us": steps.cpu_time_total / PROFILED_STEPS, "rows": rows}


def by_part(found: Mapping[str, dict[str, float]], total: str, form: str, total_form: str) -> list[Record]:
    """Return a record for each part of each column, and one for its sum."""
    parts = dict.fromkeys(part for column in found.values() for part, micros in column.items() if micros)
    rows = [{"part": p, "name": n, "cell": form.format(of[p])} for p in parts for n, of in found.items()]
    return rows + [{"part": total, "name": n, "cell": total_form.format(sum(of.values()))} for n, of in found.items()]


def accounts(result: dict) -> list[Record]:
    """Return the microseconds of stage F's steps by part."""
    own = {r.name.removeprefix("stage F, "): r for r in from_rows(result["rows"]) if r.name.startswith("stage F, ")}
    found = {name: account(r) for name, r in own.items() if name[0].isdigit() or name.startswith("prompt")}
    return by_part(found, "**whole step**", "{:.0f}", "**{:.0f}**")


def gaps(result: dict) -> list[Record]:
    heads = {"stage F, graphs only": "stage D's layers in a graph", "stage F": "megakernel"}
    found = {heads[r.name]: between_steps(r) for r in from_rows(result["rows"]) if r.name in heads}
    return by_part(found, "together", "{:.1f}", "{:.1f}")


def operators(result: dict) -> list[dict]:
    """Return the slowest operators, the sum of all others, and the rest of the step."""
    rows, rest = result["rows"], result["rows"][SHOWN:]
    shown = [(f"`{row['name']}`", f"{row['calls']:.0f}", row["self_us"]) for row in rows[:SHOWN]]
    shown.append((f"{len(rest)} others", f"{sum(r['calls'] for r in rest):.0f}", sum(r["self_us"] for r in rest)))
    shown.append(("Python between operators", "", result["step_us"] - sum(r["self_us"] for r in rows)))
    return [dict(zip(("line", "calls", "us"), own, strict=True)) for own in shown]


def groups(result: dict) -> list[Record]:
    """Return the parts of the steps, grouped as in the figure."""
    accounts = {DRAWN[r.name]: account(r) for r in from_rows(result["rows"]) if r.name in DRAWN}
    return [
        {"name": name, "group": group, "us": sum(map(accounts[name].get, own))}
        for name in DRAWN.values()
        for group, own in GROUPS.items()
    ]


def draw(results: list[dict]) -> dict[str, Picture]:
    """Decode steps of one request, and the shortest recorded prompt, on a time axis."""
    [result] = [result for result in results if result["part"] == "kernels"][:1]
    recordings, device = {r.name: r for r in from_rows(result["rows"])}, device_name(result)
    decodes = [recordings[name] for name in ("stage E: kernel by kernel", "stage F, graphs only", "stage F")]
    steps = [recording.busy / recording.steps / 1e3 for recording in (decodes[0], decodes[-1])]
    title = "Kernels fill {:.1f} ms of a decode step in stage E and {:.1f} ms in stage F; grey is idle".format(*steps)
    eager = next(name for name in recordings if name.startswith("stage F, eager prefill"))
    prefills = [recordings[eager], recordings[eager.replace(", eager prefill", "")]]
    same = "The same kernels, launched one by one and from a graph; grey is idle"
    return {
        "stage_f_graph_tp/decode.svg": draw_gaps(decodes, device, title=title),
        "stage_f_graph_tp/prefill.svg": draw_gaps(prefills, device, "prefill", same),
    }
