"""Read a profiler's trace: every kernel of some work with its start and its length, and draw them.

On a GPU the spans are the kernels by the device's clock, also inside CUDA graphs. On a CPU they are the innermost
operators; between them Python and PyTorch's dispatcher run. Recording slows down the CPU, which launches the work, but
not the kernels.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.pictures.picture import BLUE, FAINT, GREY, Picture, new_panel

# Innermost operators of a CPU that compute nothing: they make or reshape the description of a tensor.
NO_WORK = """
as_strided as_strided_ view view_as _unsafe_view reshape _reshape_alias flatten unflatten empty empty_like
empty_strided zeros full detach detach_ alias lift_fresh resize_ set_ transpose t permute slice select narrow chunk
split split_with_sizes unsqueeze squeeze expand contiguous to type_as result_type item _local_scalar_dense
resolve_conj resolve_neg
"""


class Span(NamedTuple):
    """One kernel (GPU) or innermost operator (CPU); microseconds."""

    name: str
    start: float
    length: float


@dataclass(frozen=True)
class Recording:
    """A few decode steps of one engine."""

    name: str
    steps: int
    spans: list[Span]

    @property
    def whole(self) -> float:
        """Return the µs from the first span's start to the last one's end."""
        return max(s.start + s.length for s in self.spans) - self.spans[0].start

    @property
    def busy(self) -> float:
        """Return the µs in which at least one span runs."""
        total, end = 0.0, float("-inf")
        for span in self.spans:
            stop = span.start + span.length
            total += max(0.0, stop - max(end, span.start))
            end = max(end, stop)
        return total


def record(name: str, run: Callable[[], object], device: torch.device, steps: int) -> Recording:
    """Call `run`, which runs `steps` decode steps, under PyTorch's profiler; returns the fastest of three calls.

    Raises:
        RuntimeError: no kernel or operator ran.
    """
    found = [_record_once(run, device) for _ in range(3)]
    if not all(found):
        raise RuntimeError(f"the profiler saw nothing run in {name!r}")
    return min((Recording(name, steps, spans) for spans in found), key=lambda recording: recording.whole)


def _record_once(run: Callable[[], object], device: torch.device) -> list[Span]:
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as profiler:
        run()
        if is_cuda:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path, is_cuda)


def read_trace(path: Path, is_cuda: bool) -> list[Span]:
    """Return the kernels (on a CPU: innermost operators) in a file of PyTorch's profiler, by start."""
    events = [e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = sorted(kernels if is_cuda else _innermost(events), key=lambda e: e["ts"])
    zero = found[0]["ts"] if found else 0.0
    return [Span(e["name"].removeprefix("aten::"), round(e["ts"] - zero, 2), round(e["dur"], 2)) for e in found]


def _innermost(events: list[dict]) -> list[dict]:
    """Keep operators that compute something and call no other such operator; a product that copies its bias is one."""
    operators = [e for e in events if e.get("cat") == "cpu_op" and e["name"].split("::")[-1] not in NO_WORK.split()]
    operators.sort(key=lambda e: (e["tid"], e["ts"], -e["dur"]))  # an operator is followed by the first that it calls
    ends: dict[int, float] = {}  # of the last product, by thread
    operators = [e for e in operators if e["ts"] >= ends.get(e["tid"], 0.0) and not ends.update(_end_of_product(e))]
    return [
        event
        for event, after in zip_longest(operators, operators[1:])
        if not after or after["tid"] != event["tid"] or after["ts"] >= event["ts"] + event["dur"]
    ]


def _end_of_product(event: dict) -> dict[int, float]:
    return {event["tid"]: event["ts"] + event["dur"]} if event["name"] in ("aten::addmm", "aten::baddbmm") else {}


def to_rows(recordings: list[Recording]) -> list[dict]:
    """Convert recordings to rows of a results file; a span is [number of its name, start, length], to save space."""
    rows = []
    for r in recordings:
        number = {name: i for i, name in enumerate(dict.fromkeys(span.name for span in r.spans))}
        spans = [[number[span.name], span.start, span.length] for span in r.spans]
        rows.append({"name": r.name, "steps": r.steps, "names": [name[:80] for name in number], "spans": spans})
    return rows


def from_rows(rows: list[dict]) -> list[Recording]:
    """Return the recordings in a results file."""
    spans = [[Span(row["names"][number], *times) for number, *times in row["spans"]] for row in rows]
    return [Recording(row["name"], row["steps"], own) for row, own in zip(rows, spans, strict=True)]


def draw_gaps(recordings: list[Recording], device: str, what: str = "decode step", title: str = "") -> Picture:
    """Draw the kernels of a few steps on one time axis: coloured marks are work, grey is waiting."""
    longest = max(r.whole for r in recordings)
    scale, unit = (1e3, "ms") if longest > 2000 else (1, "µs")
    counted = f"{recordings[0].steps} {what}{'s' * (recordings[0].steps > 1)}"
    label = f"{unit}; {counted} on {device}, under the profiler, which slows the CPU down"
    figure, axes = new_panel(8.4, 0.9 * len(recordings) + 1.1, label, title=title, grid="")
    for lane, r in enumerate(recordings):
        axes.broken_barh([(0, r.whole / scale)], (lane - 0.33, 0.66), facecolor=FAINT, linewidth=0)
        spans: list[list[float]] = []  # spans closer than a pixel become one mark
        for span in r.spans:
            if spans and span.start - sum(spans[-1]) < longest / 4000:
                spans[-1][1] = max(spans[-1][1], span.start + span.length - spans[-1][0])
            else:
                spans.append([span.start, span.length])
        spans = [[start / scale, length / scale] for start, length in spans]
        axes.broken_barh(spans, (lane - 0.33, 0.66), facecolor=BLUE, linewidth=0)
        text = (
            f"{r.name}: {len(r.spans) / r.steps:.0f} per {what}, {r.whole / r.steps / scale:.3g} {unit} per {what}, "
            f"at work {r.busy / r.whole:.0%} of the time"
        )
        axes.annotate(text, (0, lane - 0.36), va="bottom", fontsize=9)
    axes.set(ylim=(len(recordings) - 0.5, -0.65), xlim=(0, longest / scale), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.tick_params(colors=GREY, labelcolor="black")
    return Picture(figure, f"when kernels run during each {what}, and the gaps between them")
