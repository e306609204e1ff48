"""Static and continuous batching side by side, a preemption, and what a long prompt does to the others' pace.

Records are those of stage E's trace (`stage_e_batching/trace.py`). Stage D writes none; its steps are noted from what
its model is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.pictures import timeline
from benchmarks.pictures.picture import BLUE, ORANGE, Picture, finish, new_panel
from benchmarks.recording import watch_model
from stage_a_naive import SamplingParams
from stage_d_paged import LLM as StaticLLM
from stage_d_paged.attention import AttentionMetadata


def record_static(llm: StaticLLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[dict]:
    """Generate with stage D and return a record of every step. Each batch must be prefilled in a single step."""
    records: list[dict] = []
    first, slots = 0, 0  # the batch's first request and how many there are in it

    def note(arguments: tuple, _: object) -> None:
        nonlocal first, slots
        metadata: AttentionMetadata = arguments[3]
        counts = metadata.cu_seqlens_q.diff().tolist()
        contexts = metadata.context_lens.tolist()
        if metadata.max_query_len > 1:
            first, slots = first + slots, len(counts)
        live = [i for i, context in enumerate(contexts) if context > 0]
        records.append({
            "sequences": [{"id": first + i, "tokens": counts[i]} for i in live],
            "num_decodes": 0 if metadata.max_query_len > 1 else len(live),
            "num_tokens": sum(counts[i] for i in live),
            "padding": [first + i for i, context in enumerate(contexts) if context == 0],
            "waiting": list(range(first + slots, len(prompts))),
            "preempted": [],
        })  # fmt: skip

    with watch_model(llm.runtime.model, note):
        llm.generate(list(prompts), list(params), use_tqdm=False)
    return records


def draw_batches(runs: Mapping[str, list[dict]]) -> Picture:
    """A panel per run, on one axis of steps: what every request did in every step, and how many rows were idle."""
    named = {}
    for name, records in runs.items():
        rows = sum(len(record["sequences"]) + len(record.get("padding", ())) for record in records)
        live = sum(len(record["sequences"]) for record in records)
        named[f"{name}: {len(records)} steps, {1 - live / rows:.0%} of rows idle"] = records
    return timeline.draw_panels(named)


def token_gaps(records: Sequence[dict], request: int) -> tuple[list[float], list[float]]:
    """(when, how long after the one before), in ms, for each token of a request after its first."""
    ends = [
        record["end"] for record in records
        if any(entry["id"] == request and entry["samples"] for entry in record["sequences"])
    ]  # fmt: skip
    gaps = [1e3 * (b - a) for a, b in zip(ends, ends[1:], strict=False)]
    return [1e3 * (end - ends[0]) for end in ends[1:]], gaps


def draw_token_gaps(runs: Mapping[str, list[dict]], request: int) -> Picture:
    """The time between two tokens of one request, while a long prompt comes in."""
    ms = f"ms between two tokens\nof request {request}"
    figure, axes = new_panel(9, 3.4, f"ms since the first token of request {request}", ms)
    for (name, records), colour, marker in zip(runs.items(), (ORANGE, BLUE), "so", strict=False):
        when, gaps = token_gaps(records, request)
        label = f"{name}: longest {max(gaps):.0f} ms"
        axes.plot(when, gaps, f"{marker}-", color=colour, linewidth=1, markersize=4, label=label)
    axes.set_ylim(0)
    axes.legend(frameon=False)
    return finish(figure, "the time between two tokens of one request while another one's long prompt is prefilled")
