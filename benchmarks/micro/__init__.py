"""Studies of single kernels and of single costs: one module each, found by being here.

    python -m benchmarks.micro                            # list them
    python -m benchmarks.micro mlp models=qwen2.5-0.5b    # measure, into benchmarks/local/, and print the table
    python -m benchmarks.micro mlp --publish h200         # also into benchmarks/results/mlp-h200.json

A module has `measure(**options)`, which returns the file's `rows` and whatever else it keeps, and `table(results)`,
which returns the lines for each of its `MARKERS` in the lesson of the stage `README`. A module with `NEEDS_GPU`
measures on an NVIDIA GPU alone; one with `draw(results)` has pictures. Files of a GPU hold the device's ceilings.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from benchmarks.results import ResultsError, few_repeats


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


def caption(result: dict, *more: str) -> str:
    """One line below a table: what it was measured with."""
    where = result["environment"]
    device, versions = where["device"], where["versions"]
    found = [f"{name} {versions[name]}" for name in ("torch", "triton", "flash-attn") if versions.get(name)]
    found += [f"commit {where['commit'][:10]}{' with changes' if where['dirty'] else ''}", where["date"][:10]]
    text = "; ".join([", ".join([device["name"], *found]), *more])
    again = "To be measured again. " if few_repeats(result) else ""
    return f"{again}{text}. `python -m benchmarks.micro {result['kind']}`."
