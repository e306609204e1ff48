"""All six engines at the same work, live and in small."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.engines import ENGINES
from benchmarks.measure import close
from benchmarks.pictures.picture import STAGES, Picture, draw_bars, new_panels
from benchmarks.text import number
from stage_a_naive import SamplingParams
from stage_c_fused_mlp.extension import ExtensionError, plan

SMALL = {"num_kvcache_blocks": 512, "max_num_seqs": 16}  # enough for a notebook, and a moment to build
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


def ready_stages() -> list[str]:
    """The letters of the stages that can run here; says why stage C is left out where it is."""
    try:
        plan()
    except ExtensionError as error:
        print(f"stage C is left out: {error}")
        return [letter for letter in STAGES if letter != "C"]
    return list(STAGES)


class StageRun(NamedTuple):
    """One engine at the notebook's two pieces of work."""

    answer: str
    ms_per_token: float  # one request: a decode step
    tokens_per_s: float  # many requests that arrive together
    token_ids: list[list[int]]


def run_stage(letter: str, question: str, questions: Sequence[str]) -> StageRun:
    """Ask one question, then many at once; both twice, because the first time is slow, and the second is kept.

    From D on the engine has a small pool, so that several fit side by side.
    """
    [engine] = [engine for engine in ENGINES if engine.name == letter]
    llm = replace(engine, options=SMALL if engine.sized else {}).build("tutor", "auto", "auto")
    many = [[{"role": "user", "content": q}] for q in questions]
    for _ in range(2):
        [single] = llm.chat([{"role": "user", "content": question}], GREEDY, use_tqdm=False)
    llm.chat(many, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.chat(many, GREEDY, use_tqdm=False)
    seconds = time.perf_counter() - start
    close(llm)
    ids = [output["token_ids"] for output in [single, *outputs]]
    return StageRun(single["text"], 1e3 * single["metrics"]["tpot"], sum(map(len, ids[1:])) / seconds, ids)


def draw_stages(runs: dict[str, StageRun]) -> Picture:
    """Left: one request, time of a decode step. Right: many requests, tokens per second."""
    labels = ("one request: ms per token (less is better)", "all together: tokens/s (more is better)")
    figure, panels = new_panels(8.4, 0.4 * len(runs) + 1.3, *({"xlabel": label} for label in labels), grid="x")
    names, colours = [f"stage {letter}" for letter in runs], [STAGES[letter] for letter in runs]
    for axes, figure_of in zip(panels, ("ms_per_token", "tokens_per_s"), strict=True):
        values = [getattr(run, figure_of) for run in runs.values()]
        bars, look = [(None, values, colours)], {"edgecolor": "black", "linewidth": 0.6, "height": 0.65}
        draw_bars(axes, names, bars, list(map(number, values)), 1.2, **look)
    return Picture(figure, "the time of a token for one request, and tokens per second for many, by stage")
