"""The engines that are measured: one entry of `engines.toml` is one row of the tables.

A row is a class with its options, so one stage can have several rows (`B` and `B compiled`). Engines of other projects
are rows where their package is installed. A row of your own needs no change here:

    python -m benchmarks.run --engines A mine=my_module:LLM "D[attention_backend=reference]"
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Engine:
    """One row: a class, called as `class(model, device=…, dtype=…, **options)`."""

    name: str
    factory: str  # `module:class`
    package: str  # must be importable for the row to exist
    options: Mapping[str, object] = field(default_factory=dict)
    one_at_a_time: bool = False  # serves requests one after another: a workload of many takes the sum of their times
    sized: bool = False  # takes `max_model_len`, because it reserves memory or captures graphs by it
    small: Mapping[str, object] = field(default_factory=dict)  # options that keep its memory small, for the parity gate
    needs_compiler: bool = False  # does not work without a C++ compiler
    min_gpus: int = 0  # does not work with fewer

    def unmet_need(self, num_gpus: int) -> str | None:
        """Return why the engine cannot run on this machine, or None if it can."""
        if self.needs_compiler and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))):
            return "no C++ compiler"
        if num_gpus < self.min_gpus:
            return f"needs {self.min_gpus} GPU{'s' * (self.min_gpus > 1)}, there are {num_gpus}"
        return None

    def build(self, model: str, device: str, dtype: str, max_model_len: int | None = None) -> object:
        """Load a model. `max_model_len` reaches only the engines that are sized by it."""
        module, _, name = self.factory.partition(":")
        options = dict(self.options)
        if self.sized and max_model_len is not None:
            options.setdefault("max_model_len", max_model_len)
        return getattr(importlib.import_module(module), name)(model, device=device, dtype=dtype, **options)


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ENGINES = tuple(Engine(**{"package": row["factory"].partition(":")[0]} | row) for row in _DATA["engines"])
STUDIES: dict[str, dict[str, str]] = _DATA["studies"]  # name -> row -> what it is, as on the command line
REFERENCE = next(engine for engine in ENGINES if engine.name == "A")  # the parity gate compares with its tokens


def installed_engines() -> dict[str, Engine]:
    """Return the rows whose packages are installed here, by name, in table order."""
    return {engine.name: engine for engine in ENGINES if is_installed(engine.package)}


def is_installed(package: str) -> bool:
    """Tell whether a package is installed. A folder without an `__init__.py` is not a package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def select(names: Sequence[str], study: str | None = None) -> list[Engine]:
    """Return the engines that the command line names, by default all installed ones or all rows of the study.

    Args:
        names: `NAME`, a row of `ENGINES`; or `NAME=module:Class`, a row of your own; each optionally with options in
            brackets, which make another row: `D`, `D[attention_backend=reference]`.
        study: its rows are selected, in its order; `names` are some of them.

    Raises:
        ValueError: an engine or a row does not exist, or an option cannot be parsed.
    """
    by_name = installed_engines()
    if study is None:
        return [_read(text, by_name) for text in names or by_name]
    rows = STUDIES[study]
    if unknown := [name for name in names if name not in rows]:
        raise ValueError(f"no row {unknown[0]!r} in study {study!r}; there are: {quoted(rows)}")
    return [replace(_read(text, by_name), name=name) for name, text in rows.items() if name in (names or rows)]


def quoted(names: Iterable[str]) -> str:
    """Quote names for the command line: some contain a comma or a space."""
    return ", ".join(map(shlex.quote, names))


def _read(text: str, by_name: Mapping[str, Engine]) -> Engine:
    match = re.fullmatch(r"([^\[\]=]+)(?:=([\w.]+:\w+))?(?:\[(.+)\])?", text)
    if match is None:
        raise ValueError(f"engine {text!r} is not of the form NAME, NAME=module:Class or NAME[option=value,...]")
    name, factory, options = match.groups()
    if factory:
        module = factory.partition(":")[0]
        if find_spec(module.partition(".")[0]) is None:
            raise ValueError(f"engine {name!r}: no module {module!r}; run where it can be imported")
        engine = Engine(name, factory, module)
    elif name in by_name:
        engine = by_name[name]
    else:
        raise ValueError(f"no engine {name!r} here; there are: {quoted(by_name)}; or yours: NAME=module:Class")
    if options:
        more = dict(read_option(pair) for pair in re.split(r",(?=\s*\w+=)", options))
        engine = replace(engine, name=f"{name}[{options}]", options={**engine.options, **more})
    return engine


def read_option(pair: str) -> tuple[str, object]:
    name, equals, text = pair.strip().partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError(f"option {pair!r} is not of the form name=value")
    try:
        return name, ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return name, text  # a bare word is a string
