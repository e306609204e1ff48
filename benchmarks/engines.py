"""The engines that are measured: one entry is one row of the tables.

A row is a class with its options, so one stage can have several rows (`B` and `B compiled`). Engines of other projects
are rows where their package is installed. A row of your own needs no change here:

    python -m benchmarks.run --engines A mine=my_module:LLM "D[attention_backend=reference]"
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec


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
        """Why the engine cannot run on this machine, or None where it can."""
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


_SINGLE = {"one_at_a_time": True}
_PAGED = {"sized": True, "small": {"num_kvcache_blocks": 256}}
_PEER = {"sized": True, "small": {"gpu_memory_utilization": 0.3}, "min_gpus": 1}


def _stage(name: str, package: str, factory: str = "", **properties: object) -> Engine:
    return Engine(name, factory or f"{package}:LLM", package, **properties)


_A, _B, _C, _F = "stage_a_naive", "stage_b_decode_step", "stage_c_fused_mlp", "stage_f_graph_tp"
ENGINES = (
    Engine("transformers", "benchmarks.peers:TransformersEngine", "transformers"),
    _stage("A", _A, **_SINGLE),
    _stage("A, cuDNN SDPA off", _A, "benchmarks.peers:stage_a_without_cudnn", min_gpus=1, **_SINGLE),
    _stage("B", _B, **_SINGLE),
    _stage("B compiled", _B, options={"compile": True}, needs_compiler=True, **_SINGLE),
    _stage("C", _C, needs_compiler=True, **_SINGLE),
    _stage("C compiled", _C, options={"compile": True}, needs_compiler=True, **_SINGLE),
    _stage("D", "stage_d_paged", **_PAGED),
    _stage("E", "stage_e_batching", **_PAGED),
    _stage("F eager", _F, options={"without": "graphs,prefill_graphs,megakernel"}, **_PAGED),
    _stage("F", _F, **_PAGED),
    _stage("F, 2 GPUs", _F, options={"tensor_parallel_size": 2}, min_gpus=2, **_PAGED),
    _stage("F, 4 GPUs", _F, options={"tensor_parallel_size": 4}, min_gpus=4, **_PAGED),
    Engine("nano-vllm", "benchmarks.peers:NanoVLLMEngine", "nanovllm", **_PEER),
    Engine("mini-sglang", "benchmarks.peers:MiniSGLEngine", "minisgl", **_PEER),
    Engine("vllm", "benchmarks.peers:VLLMEngine", "vllm", **_PEER),
)
REFERENCE = next(engine for engine in ENGINES if engine.name == "A")  # the parity gate compares with its tokens

# A study is a set of rows with a table of its own, the row that the others are compared with first. Name -> row -> what
# it is, as on the command line.
_B_IDEAS = {
    "late checks": "async_eos",
    "buffers": "buffers",
    "pinned memory": "pinned",
    "SDPA": "sdpa",
    "last logits only": "last_logits_only",
}
_ALL = "graphs,prefill_graphs,overlap,fused_layers,skinny_gemm,megakernel,pdl,one_shot_all_reduce"
_LONGEST = "max_model_len=2048"  # the same for rows that are sized by a workload and rows that are not
STUDIES: dict[str, dict[str, str]] = {
    "stage-b": {
        "B compiled": "B compiled",
        **{f"B compiled without {words}": f"B compiled[{option}=False]" for words, option in _B_IDEAS.items()},
        "B compiled with SDPA in the step": "B compiled[sdpa=True]",
        "B": "B",
        "B without static cache": "B[static_cache=False]",  # compiling needs it
    },
    "stage-f": {
        "none of them": f"F[without={_ALL},fused_mlp=off]",
        "no graphs": "F[without=graphs,prefill_graphs,megakernel]",
        "no graphs, but the megakernel": "F[enforce_eager=True]",
        "graphs for decode alone": "F[without=prefill_graphs]",
        "no megakernel": "F[without=megakernel]",
        "no fused kernels": "F[without=fused_layers,skinny_gemm,megakernel,fused_mlp=off]",
        "no skinny GEMM": "F[without=skinny_gemm,megakernel]",
        "no PDL": "F[without=pdl,megakernel]",
        "no overlap": "F[without=overlap]",
        "all on": "F",
    },
    "stage-f-alone": {"F": "F"},  # some seconds on every workload: what a change of its kernels does to all of them
    "ranks": {"F": "F", "F, 2 GPUs": "F, 2 GPUs", "F, 4 GPUs": "F, 4 GPUs"},
    "quantization": {
        "F": f"F[{_LONGEST}]",
        "int8": f"int8=beyond.quantization:LLM[quantization=int8,quantize_lm_head=True,{_LONGEST}]",
        "int8, KV int8": "int8=beyond.quantization:LLM"
        f"[quantization=int8,quantize_lm_head=True,kv_cache_dtype=int8,{_LONGEST}]",
    },
}


def installed_engines() -> dict[str, Engine]:
    """The rows that can exist here, by name, in table order."""
    return {engine.name: engine for engine in ENGINES if is_installed(engine.package)}


def is_installed(package: str) -> bool:
    """Whether a package is there; a folder without an `__init__.py` is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def select(names: Sequence[str], study: str | None = None) -> list[Engine]:
    """The engines that the command line names; where it names none, all that are installed, or all rows of the study.

    Args:
        names: `NAME`, a row of `ENGINES`; or `NAME=module:Class`, a row of your own; each optionally with options in
            brackets, which make another row: `D`, `D[attention_backend=reference]`.
        study: its rows are selected, in its order; `names` are some of them.

    Raises:
        ValueError: an engine or a row that is not there, or an option that cannot be read.
    """
    by_name = installed_engines()
    if study is None:
        return [_read(text, by_name) for text in names or by_name]
    rows = STUDIES[study]
    if unknown := [name for name in names if name not in rows]:
        raise ValueError(f"no row {unknown[0]!r} in study {study!r}; there are: {', '.join(rows)}")
    return [replace(_read(text, by_name), name=name) for name, text in rows.items() if name in (names or rows)]


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
        raise ValueError(f"no engine {name!r} here; there are: {', '.join(by_name)}; or yours: NAME=module:Class")
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
