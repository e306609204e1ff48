"""Stage B's ideas, one at a time switched off: measured here in small, or as recorded on a GPU."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engines import select
from benchmarks.measurement import in_alternating_order
from benchmarks.pictures.picture import GREY, Picture, finish, new_panel
from benchmarks.pictures.rates import colour_of
from benchmarks.tables import recorded_groups
from stage_a_naive.sampling import SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 17


@dataclass(frozen=True)
class Ablation:
    """Milliseconds per decode step of each engine, one number per round."""

    title: str
    steps: dict[str, list[float]]


def measure_ablation(model: str, engines: Sequence[str], rounds: int = 3, seconds: float = 0.15) -> Ablation:
    """Rounds through all engines in alternating order, in this process; a round's number is the median of its requests.

    Args:
        engines: rows as on the command line, for example `B` and `B[static_cache=False]`.
        seconds: requests until this long has gone by, one at least.
    """
    rng = random.Random(0)
    prompt = [rng.randrange(4096) for _ in range(PROMPT_TOKENS)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    built = {engine.name: engine.build(model, "auto", "auto") for engine in select(engines)}
    for llm in built.values():  # whatever happens once
        llm.generate([prompt], params, use_tqdm=False)
    steps: dict[str, list[float]] = {name: [] for name in built}
    for turn in range(rounds):
        for name in in_alternating_order(list(built), turn):
            found, start = [], time.perf_counter()
            while not found or time.perf_counter() - start < seconds:
                found.append(built[name].generate([prompt], params, use_tqdm=False)[0]["metrics"]["tpot"])
            steps[name].append(1e3 * statistics.median(found))
    llm = next(iter(built.values()))
    return Ablation(f"{model} on {llm.device.type}, {str(llm.dtype).removeprefix('torch.')}", steps)


def recorded_ablation() -> Ablation | None:
    """The committed ablation of a GPU; None where there is none."""
    for group in recorded_groups():
        if group.study == "stage-b" and group.size == "gpu":
            steps = {engine: group.values(engine, "single", "tpot_ms") for engine in group.engines}
            return Ablation(f"{group.model} on {group.device}, {group.dtype}", steps)
    return None


def draw_ablation(ablation: Ablation) -> Picture:
    """A bar per engine: the median time of a decode step; the whisker spans the rounds."""
    names = list(ablation.steps)
    medians = [statistics.median(values) for values in ablation.steps.values()]
    low = [m - min(values) for m, values in zip(medians, ablation.steps.values(), strict=True)]
    high = [max(values) - m for m, values in zip(medians, ablation.steps.values(), strict=True)]
    colours = [GREY if "without" in name or "[" in name else colour_of(name) for name in names]
    x_label = "ms per decode step, less is better"
    figure, axes = new_panel(9, 0.38 * len(names) + 1.3, x_label, title=ablation.title, grid="x")
    axes.barh(names, medians, xerr=[low, high], color=colours, capsize=3, height=0.65, error_kw={"elinewidth": 1})
    for y, (median, more) in enumerate(zip(medians, high, strict=True)):
        axes.annotate(f"{median:.2f}", (median + more, y), xytext=(5, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(m + h for m, h in zip(medians, high, strict=True)))
    return finish(figure, "the time of a decode step with each idea of stage B switched off in turn")
