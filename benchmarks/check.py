"""Check counts (not times) against committed bounds: does every stage still save the work that it should save?

    python -m benchmarks.check                    # make bench-check: half a minute on a CPU
    python -m benchmarks.check --stages D E F

Times depend on the machine and on its other work, so no test asserts one. How often the model is called per token,
how many operators a decode step has, how many blocks a request holds and how much the prefix cache finds are the same
everywhere. `bounds.json` has the lowest and the highest value that is allowed for each. The work: eight prompts that
share their first 32 tokens, with short and long answers, four at a time where a stage batches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engines import ENGINES
from stage_a_naive.contract.outputs import GenerationOutput
from stage_a_naive.contract.params import SamplingParams
from stage_d_paged.layers import Embedding

STAGES = {engine.name: engine for engine in ENGINES if engine.name in tuple("ABCDEF")}
BOUNDS = Path(__file__).with_name("bounds.json")
MODEL = "random:qwen2-tiny"
BATCHED = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kvcache_blocks": 64, "kvcache_block_size": 16}
SHARED, OWN = 32, 8  # tokens of a prompt
ANSWERS = (4, 28, 8, 12, 4, 28, 8, 12)  # tokens
CHAT = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


class Calls:
    """Records the model's calls: the tokens of each, and the operators that ran until the next one."""

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self.tokens: list[int] = []
        self.counts: list[Counter[str]] = []
        self.blocks = 0  # most of the pool that were in use

    def begin(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        """Begin a new call: every call of a model looks up its tokens once."""
        if isinstance(module, (nn.Embedding, Embedding)):
            self.tokens.append(inputs[0].numel())
            self.counts.append(Counter())
            if self._engine is not None:
                scheduler = getattr(self._engine, "scheduler", self._engine)  # stage D's engine has none
                self.blocks = max(self.blocks, scheduler.block_manager.num_used)

    def up_to(self, num_tokens: int) -> list[Counter[str]]:
        """Return the operators of calls with at most this many tokens: the decode steps."""
        return [counts for tokens, counts in zip(self.tokens, self.counts, strict=True) if tokens <= num_tokens]

    def count(self, what: str) -> None:
        if self.counts:
            self.counts[-1][what] += 1


class Operators(TorchDispatchMode):
    """Counts the operators that PyTorch runs. On a GPU most of them launch a kernel."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self._calls.count("operators")
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts operations that would copy to a GPU; on a CPU some of them are not operators."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        name = getattr(func, "__name__", "")
        if name in ("tensor", "copy_") or name == "to" and any(isinstance(a, torch.device) for a in args):
            self._calls.count("copies")
        return func(*args, **(kwargs or {}))


def prompts(first: int) -> list[list[int]]:
    """Make prompts with a common prefix, from token id `first` on."""
    shared = list(range(first, first + SHARED))
    return [[*shared, *(first + SHARED + OWN * i + j for j in range(OWN))] for i in range(len(ANSWERS))]


def run(llm: Any, first: int, **params: float) -> tuple[list[GenerationOutput], Calls]:
    """Answer prompts made of token ids from `first` on, and count the model's calls."""
    asked = [SamplingParams(max_tokens=count, ignore_eos=True, seed=0, **params) for count in ANSWERS]
    calls = Calls(getattr(llm, "engine", None))
    hook = register_module_forward_pre_hook(calls.begin)
    try:
        with Operators(calls), Copies(calls):
            return llm.generate(prompts(first), asked, False), calls
    finally:
        hook.remove()


def measure(stage: str) -> dict[str, float]:
    """Count a stage's calls, operators and blocks for this work."""
    options = BATCHED if stage in "DEF" else {}
    llm = replace(STAGES[stage], options=options).build(MODEL, "cpu", "auto")
    largest = options.get("max_num_seqs", 1)
    try:
        run(llm, 1, temperature=0)  # one-time work
        outputs, calls = run(llm, 400, temperature=0)
        sampled = run(llm, 800, **CHAT)[1] if options else None
    finally:
        llm.close()
    generated, decodes = sum(len(output["token_ids"]) for output in outputs), calls.up_to(largest)
    values = {
        "model calls per generated token": len(calls.tokens) / generated,
        "tokens computed per generated token": sum(calls.tokens) / generated,
        "operators per decode step": median(counts["operators"] for counts in decodes),
    }
    if sampled is not None:
        at_chat = median(counts["operators"] for counts in sampled.up_to(largest))
        values["operators per decode step, sampled"] = at_chat
        cached = sum(output["metrics"]["num_cached_tokens"] for output in outputs)
        values["copies from the host per decode step"] = median(counts["copies"] for counts in decodes)
        values["most blocks in use per batch slot"] = calls.blocks / largest
        values["prompt tokens found in the prefix cache"] = cached / sum(len(o["prompt_token_ids"]) for o in outputs)
    return values


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns 1 if a count is outside its bounds or has none."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="default: all")
    parser.add_argument("--bounds", type=Path, default=BOUNDS, help="default: %(default)s")
    args = parser.parse_args(argv)
    bounds, status = json.loads(args.bounds.read_text(encoding="utf-8")), 0
    print(f"{'stage':5}  {'count':40} {'value':>8}  {'lowest':>8}  {'highest':>8}")
    for stage in args.stages:
        if (missing := STAGES[stage].unmet_need(num_gpus=0)) is not None:
            print(f"{stage:5}  skipped: {missing}")
            continue
        for name, value in measure(stage).items():
            lowest, highest = bounds.get(stage, {}).get(name, (float("nan"), float("nan")))
            is_inside = lowest <= value <= highest
            line = f"{stage:5}  {name:40} {value:8.4g}  {lowest:8g}  {highest:8g}"
            print(f"{line}  {'ok' if is_inside else 'OUTSIDE'}", flush=True)
            status |= not is_inside
    return status


if __name__ == "__main__":
    sys.exit(main())
