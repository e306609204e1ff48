"""Studies of single kernels and of single costs: one module each, found by being here.

    python -m benchmarks.micro                            # list them
    python -m benchmarks.micro mlp model=qwen3-0.6b       # measure, into benchmarks/local/, and print the table
    python -m benchmarks.micro mlp --publish h200         # also into benchmarks/results/mlp-h200.json

A module has `measure(**options)`, which returns the file's `rows` and whatever else it keeps, and `TABLES`, which says
for each of its markers in lessons what the table is (`render.py`). A module with `NEEDS_GPU` measures on an NVIDIA GPU
alone; one with `draw(results)` has pictures, by their path. Files of a GPU hold the device's ceilings.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import torch

from benchmarks.results import ResultsError
from stage_a_naive.contract.params import SamplingParams

Found = TypeVar("Found")
Way = TypeVar("Way", bound=Hashable)
Work = TypeVar("Work", bound=Callable)


def names() -> list[str]:
    """The studies there are."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))


def study(name: str) -> ModuleType:
    """The module of a study.

    Raises:
        ResultsError: there is none of that name.
    """
    if name not in names():
        raise ResultsError(f"there is no study {name!r}; there are: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def timed(samples: list[float], **what: object) -> dict:
    """A row of the file. It is printed with its shortest time, which shows how far a study has come."""
    print(f"{', '.join(map(str, what.values()))}: {1e6 * min(samples):.1f} µs", flush=True)
    return what | {"samples": samples}


def take_turns(
    work: Callable[[Way], Found], ways: Iterable[Way], repeats: int, warm_ups: int = 1
) -> dict[Way, list[Found]]:
    """`work(way)` of each way in every repeat; they take turns, so that a busy machine disturbs all alike."""
    found: dict[Way, list[Found]] = {way: [] for way in ways}
    for _ in range(warm_ups + repeats):
        for way, own in found.items():
            own.append(work(way))
    return {way: own[warm_ups:] for way, own in found.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes on one thread of the CPU; `@one_thread()` above a `measure` is enough."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def with_engine(work: Callable[[object], Found], engine: Callable, *arguments: object, **options: object) -> Found:
    """`work(llm)` with an engine that is gone afterwards: the next one needs its memory."""
    llm = engine(*arguments, **options)
    try:
        return work(llm)
    finally:
        getattr(llm, "close", lambda: None)()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def chosen(parts: Mapping[str, Work], part: str, on_gpu: Iterable[str] = ()) -> Work:
    """The work of a part of a study.

    Raises:
        ValueError: there is no such part, or it is one of `on_gpu` and there is no GPU.
    """
    if part not in parts:
        raise ValueError(f"there is no part {part!r}; there are: {', '.join(parts)}")
    if part in on_gpu and not torch.cuda.is_available():
        raise ValueError(f"part={part} needs an NVIDIA GPU, and PyTorch sees none")
    return parts[part]


def unlike_prompt(number: int, length: int) -> list[int]:
    """A prompt of this many tokens that begins unlike those of other numbers, so that no two share a block."""
    return [(number * 131 + i * 7) % 4000 + 1 for i in range(length)]


def answer(llm: Any, count: int, length: int, num_tokens: int) -> tuple[float, float]:
    """Answer prompts of this length greedily; returns when that began and ended, on the monotonic clock."""
    prompts = [unlike_prompt(i, length) for i in range(count)]
    params, start = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True), time.monotonic()
    llm.generate(prompts, params, use_tqdm=False)
    return start, time.monotonic()


def step_seconds(generate: Callable[[int], float], steps: int) -> float:
    """Seconds of a decode step, if answers of `n` tokens take `generate(n)`: what happens once cancels out."""
    first = generate(1)
    return (generate(1 + steps) - first) / steps


def device_name(result: dict) -> str:
    return result["environment"]["device"]["name"]
