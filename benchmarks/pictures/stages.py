"""All six engines at the same work, live and in small."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from benchmarks.pictures.picture import Picture, draw_bars, finish, new_panels
from benchmarks.pictures.rates import colour_of
from benchmarks.text import number
from stage_a_naive import SamplingParams
from stage_a_naive.frontend import Frontend
from stage_c_fused_mlp.extension import ExtensionError, plan

PACKAGES = {
    "A": "stage_a_naive", "B": "stage_b_decode_step", "C": "stage_c_fused_mlp", "D": "stage_d_paged",
    "E": "stage_e_batching", "F": "stage_f_graph_tp",
}  # fmt: skip
SMALL = {"num_kvcache_blocks": 512, "max_num_seqs": 16}  # enough for a notebook, and a moment to build
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


def ready_stages() -> list[str]:
    """The letters of the stages that can run here; says why stage C is left out where it is."""
    try:
        plan()
    except ExtensionError as error:
        print(f"stage C is left out: {error}")
        return [letter for letter in PACKAGES if letter != "C"]
    return list(PACKAGES)


@contextmanager
def stage(letter: str, model: str = "tutor") -> Iterator[Frontend]:
    """The engine of a stage, for a `with` block. From D on with a small pool, so that several fit side by side."""
    llm = import_module(PACKAGES[letter]).LLM(model, **(SMALL if letter in "DEF" else {}))
    try:
        yield llm
    finally:
        if hasattr(llm, "close"):
            llm.close()


@dataclass(frozen=True)
class StageRun:
    """One engine at the notebook's two pieces of work."""

    answer: str
    ms_per_token: float  # one request: a decode step
    tokens_per_s: float  # many requests that arrive together
    token_ids: list[list[int]]


def run_stage(letter: str, question: str, questions: Sequence[str]) -> StageRun:
    """Ask one question, then many at once; both twice, because the first time is slow, and the second is kept."""
    many = [[{"role": "user", "content": q}] for q in questions]
    with stage(letter) as llm:
        for _ in range(2):
            [single] = llm.chat([{"role": "user", "content": question}], GREEDY, use_tqdm=False)
        llm.chat(many, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.chat(many, GREEDY, use_tqdm=False)
        seconds = time.perf_counter() - start
    count = sum(len(output["token_ids"]) for output in outputs)
    ids = [output["token_ids"] for output in [single, *outputs]]
    return StageRun(single["text"], 1e3 * single["metrics"]["tpot"], count / seconds, ids)


def draw_stages(runs: dict[str, StageRun]) -> Picture:
    """Left: one request, time of a decode step. Right: many requests, tokens per second."""
    labels = ("one request: ms per token (less is better)", "all together: tokens/s (more is better)")
    figure, panels = new_panels(10, 0.4 * len(runs) + 1.3, *({"xlabel": label} for label in labels), grid="x")
    names = [f"stage {letter}" for letter in runs]
    for axes, figure_of in zip(panels, ("ms_per_token", "tokens_per_s"), strict=True):
        values = [getattr(run, figure_of) for run in runs.values()]
        bars = [(None, values, [colour_of(letter) for letter in runs])]
        draw_bars(axes, names, bars, list(map(number, values)), 1.2, edgecolor="black", linewidth=0.6, height=0.65)
    return finish(figure, "the time of a token for one request, and tokens per second for many, by stage")
