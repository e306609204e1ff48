"""The engines that are measured. An engine joins by being listed here once.

A row of the table is an engine with its options, so one stage can have several rows (`B` and `B compiled`). Engines of
other projects are rows only where their package is installed; stages that are not there yet are no rows at all.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Protocol

import torch

from stage_a_naive.outputs import GenerationOutput
from stage_a_naive.sampling import SamplingParams


class Generator(Protocol):
    """What a built engine can do: every stage's `LLM`, and the adapters of `peers.py`."""

    def generate(
        self, prompts: list[list[int]], sampling_params: list[SamplingParams], use_tqdm: bool
    ) -> list[GenerationOutput]: ...


@dataclass(frozen=True)
class Engine:
    """One row.

    Args:
        name: the row's name.
        factory: `module:class`, called as `class(model, device=…, dtype=…, **options)`.
        options: keyword arguments for the class.
        package: must be importable for the row to exist.
        one_at_a_time: serves requests one after another, so a workload of many takes the sum of their times.
        sized: takes `max_model_len`, because it reserves memory or records graphs by it.
        small: options that keep its memory small, so that several can be asked for their answers side by side.
        needs_compiler: does not work without a C++ compiler.
        min_gpus: does not work with fewer.
    """

    name: str
    factory: str
    package: str
    options: Mapping[str, object] = field(default_factory=dict)
    one_at_a_time: bool = False
    sized: bool = False
    small: Mapping[str, object] = field(default_factory=dict)
    needs_compiler: bool = False
    min_gpus: int = 0


def _stage(name: str, package: str, options: Mapping[str, object] | None = None, **properties: object) -> Engine:
    return Engine(name, f"{package}:LLM", package, options or {}, **properties)


def _paged(name: str, package: str, options: Mapping[str, object] | None = None, **properties: object) -> Engine:
    return _stage(name, package, options, sized=True, small={"num_kvcache_blocks": 256}, **properties)


_PEER = {"sized": True, "small": {"gpu_memory_utilization": 0.3}, "min_gpus": 1}


REFERENCE = "A"  # the parity gate compares every engine's tokens with this one's

ENGINES = (
    Engine("transformers", "benchmarks.peers:TransformersEngine", "transformers"),
    _stage("A", "stage_a_naive", one_at_a_time=True),
    _stage("B", "stage_b_decode_step", one_at_a_time=True),
    _stage("B compiled", "stage_b_decode_step", {"compile": True}, one_at_a_time=True, needs_compiler=True),
    _stage("C", "stage_c_fused_mlp", one_at_a_time=True, needs_compiler=True),
    _stage("C compiled", "stage_c_fused_mlp", {"compile": True}, one_at_a_time=True, needs_compiler=True),
    _paged("D", "stage_d_paged"),
    _paged("E", "stage_e_batching"),
    _paged("F eager", "stage_f_graph_tp", {"enforce_eager": True}),
    _paged("F", "stage_f_graph_tp"),
    _paged("F, 2 GPUs", "stage_f_graph_tp", {"tensor_parallel_size": 2}, min_gpus=2),
    Engine("nano-vllm", "benchmarks.peers:NanoVLLMEngine", "nanovllm", **_PEER),
    Engine("vllm", "benchmarks.peers:VLLMEngine", "vllm", **_PEER),
)


def installed_engines() -> list[Engine]:
    """The rows that can exist here, in table order."""
    return [engine for engine in ENGINES if is_installed(engine.package)]


def is_installed(package: str) -> bool:
    """Whether a package is there; a folder without an `__init__.py` is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def unmet_need(engine: Engine, num_gpus: int) -> str | None:
    """Why an engine cannot run on this machine, or None where it can."""
    if engine.needs_compiler and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))):
        return "no C++ compiler"
    if num_gpus < engine.min_gpus:
        return f"needs {engine.min_gpus} GPU{'s' if engine.min_gpus > 1 else ''}, there are {num_gpus}"
    return None


def select(specifications: list[str], extra_options: list[str]) -> list[Engine]:
    """The engines that the command line names.

    Args:
        specifications: names from `ENGINES`, each optionally with options in brackets, which make a row of its own:
            `D`, `D[attention_backend=reference]`. None at all: every engine installed.
        extra_options: `name.option=value`; changes that engine's row without renaming it.

    Raises:
        ValueError: an engine that is not there, or an option that cannot be read.
    """
    by_name = {engine.name: engine for engine in installed_engines()}

    def named(name: str) -> Engine:
        if name not in by_name:
            raise ValueError(f"no engine {name!r} here; there are: {', '.join(by_name)}")
        return by_name[name]

    chosen = []
    for text in specifications or by_name:
        match = re.fullmatch(r"([^\[\]]+?)(?:\[(.+)\])?", text)
        if match is None:
            raise ValueError(f"engine {text!r} is not of the form NAME or NAME[option=value,...]")
        engine = named(match[1])
        if match[2]:
            more = dict(_option(pair) for pair in match[2].split(","))
            engine = replace(engine, name=text, options={**engine.options, **more})
        chosen.append(engine)
    for text in extra_options:
        name, _, pair = text.rpartition(".") if "." in text.partition("=")[0] else ("", "", text)
        option, value = _option(pair)
        if named(name).name not in [engine.name for engine in chosen]:
            raise ValueError(f"option {text!r} is for engine {name!r}, which is not among those to run")
        chosen = [replace(e, options={**e.options, option: value}) if e.name == name else e for e in chosen]
    return chosen


def _option(pair: str) -> tuple[str, object]:
    name, equals, text = pair.strip().partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError(f"option {pair!r} is not of the form name=value")
    try:
        return name, ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return name, text  # a bare word is a string


def build(engine: Engine, model: str, device: str, dtype: str, max_model_len: int | None = None) -> Generator:
    """Load a model into an engine. `max_model_len` reaches only the engines that are sized by it."""
    module, _, class_name = engine.factory.partition(":")
    options = dict(engine.options)
    if engine.sized and max_model_len is not None:
        options.setdefault("max_model_len", max_model_len)
    torch.manual_seed(0)
    return getattr(importlib.import_module(module), class_name)(model, device=device, dtype=dtype, **options)
