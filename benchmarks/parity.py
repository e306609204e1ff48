"""The parity gate: before anything is timed, every engine must give the very tokens that stage A gives.

A fast wrong answer is worth nothing, and a kernel that reads past its cache is often fast. Greedy answers to a few of
the tutor's questions, in one call, are compared token by token. Nothing is timed here, so on a GPU several engines
answer side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.engines import ENGINES, REFERENCE, Engine, unmet_need
from benchmarks.launch import engine_job, run_job

SIDE_BY_SIDE = 4  # on a GPU
Say = Callable[[str], None]
Refusals = dict[str, dict[str, str]]  # engine -> {"not_run" | "error": reason}


def parity_gate(
    engines: Sequence[Engine], model: str, device: str, dtype: str, num_gpus: int, timeout: float, say: Say
) -> Refusals:
    """Compare all engines with the reference; returns those that may not be timed, and why.

    Raises:
        SystemExit: the reference itself does not answer, so nothing can be compared.
    """
    def answers_of(engine: Engine) -> dict:
        return run_job(engine_job("parity", engine, model=model, device=device, dtype=dtype), timeout)

    [reference] = [engine for engine in ENGINES if engine.name == REFERENCE]
    expected = answers_of(reference)
    if "error" in expected:
        raise SystemExit(f"the reference engine {REFERENCE} does not answer: {expected['error']}")
    refused: Refusals = {}
    for engine in engines:
        need = unmet_need(engine, num_gpus)
        if need is not None:
            refused[engine.name] = {"not_run": need}
    to_ask = [engine for engine in engines if engine.name not in refused and engine != reference]
    with ThreadPoolExecutor(SIDE_BY_SIDE if num_gpus else 1) as pool:
        for engine, found in zip(to_ask, pool.map(answers_of, to_ask), strict=True):
            if "error" in found:
                refused[engine.name] = {"error": f"no answers: {found['error']}"}
            elif found["answers"] != expected["answers"]:
                parts = difference(expected["answers"], found["answers"])
                refused[engine.name] = {"error": f"parity gate: {parts}"}
            else:
                say(f"parity: {engine.name} answers as {REFERENCE} does")
    for name, reason in refused.items():
        [(outcome, text)] = reason.items()
        say(f"{name}: {outcome.replace('_', ' ')}: {text}")
    return refused


def difference(expected: list[list[int]], found: list[list[int]]) -> str:
    """Where two different lists of answers part, for the error message."""
    question = next(i for i, (want, got) in enumerate(zip(expected, found, strict=True)) if want != got)
    want, got = expected[question], found[question]
    differing = (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b)
    at = next(differing, min(len(want), len(got)))
    parts = f"answer {question} parts from {REFERENCE}'s at token {at}"
    return f"{parts}: {want[at : at + 5]} became {got[at : at + 5]}"
