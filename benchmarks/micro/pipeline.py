"""Pipeline stages: their idle time compared with theory, and the bytes they send compared with tensor parallelism.

*Counted*: the real scheduler and engine on stages that take one unit of time for every step. *Measured*: the busy times
that the stages of a real engine record, and its speed, on two GPUs (`device=cuda`) or CPU processes. *Bytes*: the
traffic on the cable between two hosts, counted by the kernel; this needs root (`benchmarks/two_hosts.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks import two_hosts
from benchmarks.micro import answer, with_engine
from benchmarks.pictures.picture import ON_DARK, PALETTE, Picture, new_figure
from benchmarks.unit_stages import counted_spans
from beyond.scale_out import LLM
from beyond.scale_out.spans import idle_in_theory, idle_share, read_spans

STAGES, SAMPLES, PROMPT = 2, 3, 64  # tokens of a prompt
COUNTED = {"decode": (1, STAGES), "prefill": (1, 4, 8)}  # batches or chunks that the lesson shows
BYTES = "bytes per decoded token:"
SHOWN = 12.5  # units of time in the picture
LOADS = {"one request": 1, "32 requests": 32}
LAYOUTS = {"one rank": {}, "TP 2": {"tensor_parallel_size": 2}, "PP 2": {"pipeline_parallel_size": 2}}


def measure(
    model: str = "random:qwen2.5-0.5b", device: str = "cuda" if torch.cuda.is_available() else "cpu", speed: bool = True
) -> dict:
    """Measure idle shares, speeds and bytes; `speed=False` leaves out whatever depends on the machine's other load."""
    rows = [counted_row(work, batches) for work in ("decode", "prefill") for batches in (1, 2, 4, 8)]
    if speed:
        rows += [measured_row(model, device, batches) for batches in (1, 2, 3)]
        for name, layout in LAYOUTS.items():
            rows += with_engine(partial(speed_rows, name), make_llm, model, device, **layout)
    if device == "cpu" and two_hosts.missing() is None:
        rows += [bytes_row(model, name) for name in ("TP 2", "PP 2")]
    return {"rows": rows, "model": model}


def counted_row(work: str, batches: int) -> dict[str, object]:
    idle = idle_share(counted_spans(work, batches, STAGES))
    theory = idle_in_theory(work, batches, STAGES)
    return {"study": "counted", "work": work, "batches": batches, "idle": idle, "theory": theory}


def make_llm(model: str, device: str, **options: object) -> LLM:
    """Make an engine with all ideas that its layout can use: graphs everywhere, and the megakernel on one rank."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    more = {"gpu_memory_utilization": 0.3} if device == "cuda" else {"num_kvcache_blocks": 512}
    return LLM(model, device=device, dtype=dtype, max_num_seqs=64, enable_prefix_caching=False, **more, **options)


def measured_row(model: str, device: str, batches: int) -> dict[str, object]:
    """Measure the idle share of a real engine that decodes 32 requests, from the times that its stages recorded."""
    with tempfile.TemporaryDirectory() as folder:
        trace = f"{folder}/trace.jsonl"
        options = {"pipeline_parallel_size": STAGES, "num_micro_batches": batches, "trace": trace}
        samples = with_engine(partial(idle_shares, trace), make_llm, model, device, **options)
    theory = idle_in_theory("decode", batches, STAGES)
    return {"study": "measured", "work": "decode", "batches": batches, "samples": samples, "theory": theory}


def idle_shares(trace: str, llm: LLM) -> list[float]:
    samples = []
    for _ in range(SAMPLES + 1):  # the first to warm up
        start, end = answer(llm, 32, PROMPT, 128 if llm.device.type == "cuda" else 16)
        # The last two thirds of the time: all decode, none at the end, where the batches run out.
        first, last = start + (end - start) * 0.33, start + (end - start) * 0.9
        spans = [read_spans(f"{trace}.stage{stage}") for stage in range(STAGES)]
        samples.append(idle_share([[s for s in own if first <= s["start"] and s["end"] <= last] for own in spans]))
    return samples[1:]


def speed_rows(layout: str, llm: LLM) -> list[dict[str, object]]:
    """Measure a layout's tokens per second for each load."""
    num_tokens, rows = 128 if llm.device.type == "cuda" else 8, []
    for name, count in LOADS.items():
        times = [answer(llm, count, PROMPT, num_tokens) for _ in range(SAMPLES + 1)][1:]  # the first to warm up
        samples = [count * num_tokens / (end - start) for start, end in times]
        rows.append({"study": "speed", "layout": layout, "load": name, "samples": samples})
    return rows


def bytes_row(model: str, name: str) -> dict[str, object]:
    """Count the bytes on the cable between two hosts per decoded token, both directions, four requests at a time."""
    command = ["-m", "benchmarks.micro.pipeline", model, json.dumps(LAYOUTS[name])]  # this file as a program
    with two_hosts.two_hosts() as hosts:
        processes = [hosts.start(host, two_hosts.torchrun(host, command), stdout=subprocess.PIPE) for host in range(2)]
        output, _ = processes[0].communicate(timeout=600)
        processes[1].communicate(timeout=60)
    if BYTES not in output:
        raise RuntimeError(f"the ranks did not count: {output}")
    return {"study": "bytes", "layout": name, "bytes": float(output.rsplit(BYTES, 1)[1])}


def count_bytes(model: str, layout: str) -> None:
    """Run a rank of `bytes_row`: generate, and print the bytes that passed this host's end of the cable."""
    llm = make_llm(model, "cpu", **json.loads(layout))
    counts = [sent_by_both()]
    for num_tokens in (1, 1, 9):
        answer(llm, 4, PROMPT, num_tokens)
        counts.append(sent_by_both())
    print(BYTES, ((counts[3] - counts[2]) - (counts[2] - counts[1])) / (4 * 8), flush=True)
    llm.close()


def sent_by_both() -> int:
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("cable:")]
    numbers = line.partition(":")[2].split()
    return int(numbers[0]) + int(numbers[8])  # received and transmitted bytes


def draw(results: list[dict]) -> dict[str, Picture]:
    """Draw the classical picture of the counted stages: a lane per stage, a colour per batch, white for idle time."""
    idle, at_the_ends = idle_in_theory("decode", 1, 3), idle_in_theory("prefill", 4, 3)
    panels = {
        f"one batch in flight: the stages are idle for {idle:.0%} of their time": counted_spans("decode", 1, stages=3),
        "three batches in flight: they are idle only until all have begun": counted_spans("decode", 3, stages=3),
        f"a prompt in four chunks: they are idle for {at_the_ends:.0%}, at its beginning and its end": counted_spans(
            "prefill", 4, stages=3
        ),
    }
    title = "As many batches as stages keep all stages busy"
    figure = new_figure(8.4, 1.75 * len(panels) + 0.4)
    for axes, (label, stages) in zip(figure.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
        spans = [(stage, span) for stage, own in enumerate(stages) for span in own if span["start"] < SHOWN]
        for stage, span in spans:
            width, colour = min(span["end"], SHOWN) - span["start"], PALETTE[span["batch"] % 4]
            axes.barh(stage, width, 0.84, left=span["start"], color=colour, edgecolor="white", linewidth=1)
            if width > 0.6:
                look = {"ha": "center", "va": "center", "color": ON_DARK, "fontsize": 9}
                axes.text(span["start"] + width / 2, stage, f"{span['step']}", **look)
        axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
        axes.set(xlim=(0, SHOWN), ylim=(len(stages) - 0.5, -0.5))
        axes.set_title(label, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time, in the time that a stage takes for a step; the numbers are those of the steps")
    figure.suptitle(title, fontsize=12)
    return {"beyond/scale_out/stages.svg": Picture(figure, title)}


if __name__ == "__main__":
    count_bytes(*sys.argv[1:])
