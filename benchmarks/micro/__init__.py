"""Studies of single kernels and single costs. Every module in this folder is a study.

    python -m benchmarks.micro                            # list them
    python -m benchmarks.micro mlp model=qwen3-0.6b       # measure, into benchmarks/local/, and print the table
    python -m benchmarks.micro mlp --publish h200         # also into benchmarks/results/mlp-h200.json

A module has `measure(**options)`, which returns the `rows` and other fields of its file, and `TABLES`, which defines
the table of each of its markers in lessons (`render.py`). A module with `NEEDS_GPU` only measures on an NVIDIA GPU; one
with `draw(results)` returns pictures by path. Files measured on a GPU hold its ceilings.
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
    """Return the names of all studies."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))


def study(name: str) -> ModuleType:
    """Import the module of a study.

    Raises:
        ResultsError: no study has this name.
    """
    if name not in names():
        raise ResultsError(f"there is no study {name!r}; there are: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def timed(samples: list[float], **what: object) -> dict:
    """Make a row of the file, and print it with its shortest time to show the progress of a study."""
    print(f"{', '.join(map(str, what.values()))}: {1e6 * min(samples):.1f} µs", flush=True)
    return what | {"samples": samples}


def take_turns(
    work: Callable[[Way], Found], ways: Iterable[Way], repeats: int, warm_ups: int = 1
) -> dict[Way, list[Found]]:
    """Run `work(way)` for every way in every repeat. The ways take turns, so a busy machine disturbs all alike."""
    found: dict[Way, list[Found]] = {way: [] for way in ways}
    for _ in range(warm_ups + repeats):
        for way, own in found.items():
            own.append(work(way))
    return {way: own[warm_ups:] for way, own in found.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch to one CPU thread: write `@one_thread()` above a `measure`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def with_engine(work: Callable[[object], Found], engine: Callable, *arguments: object, **options: object) -> Found:
    """Run `work(llm)` and then release the engine, because the next one needs its memory."""
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
    """Return the function that measures a part of a study.

    Raises:
        ValueError: the part does not exist, or it is one of `on_gpu` and there is no GPU.
    """
    if part not in parts:
        raise ValueError(f"there is no part {part!r}; there are: {', '.join(parts)}")
    if part in on_gpu and not torch.cuda.is_available():
        raise ValueError(f"part={part} needs an NVIDIA GPU, and PyTorch sees none")
    return parts[part]


def unlike_prompt(number: int, length: int) -> list[int]:
    """Make a prompt of this many tokens. Prompts of different numbers share no block: their first tokens differ."""
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
