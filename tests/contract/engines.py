"""The engines under test, one row each, and the prompts and parameters that all of them are asked with."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from stand_ins import EagerRecorder, forked_ranks

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import GenerationOutput, SamplingParams
from stage_f_graph_tp.cuda_graph import capture_sizes
from stage_f_graph_tp.prefill_graphs import prefill_sizes

ROOT = Path(__file__).resolve().parents[2]
MODEL = "random:qwen2-tiny"
VOCAB = 4096
POOL = {"num_kvcache_blocks": 256, "kvcache_block_size": 8, "max_model_len": 2000}
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 16, 9, 48)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
QUESTIONS = ["What is a KV cache?", "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？"]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
SHORT_CHAT = [{"role": "user", "content": "Name a fruit."}]  # the answer has six tokens
NOTHING = (0, 0)  # requests and blocks held
SEEDED = [SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=10, ignore_eos=True) for i in range(5)]

# What an engine can do, beyond what all can. `needs` names these.
CALLS_IN_TURN = {"calls in turn"}  # a call waits for the running call, and is refused from inside it
POOLED = {"pool"}  # blocks, prefix cache, add_request/step
BATCHING = POOLED | {"side by side"}  # calls run in the same steps; `stream`; preemption
# One process: no ranks. Exact: the tokens are stage A's. Penalty rows: requests wait for one of `max_num_penalty_seqs`.
# Structured: structured output. Experts: models whose layers have a mixture of experts.
BEYOND = {"structured", "experts"}
FEATURES = CALLS_IN_TURN | BATCHING | BEYOND | {"one process", "exact", "penalty rows"}


@dataclass(frozen=True, eq=False)
class Engine:
    """One way to make an `LLM`.

    Attributes:
        has: its features, out of `FEATURES`.
        prepare: called with the `LLM` once it is made.
    """

    name: str
    package: str
    has: frozenset[str]
    options: dict = field(default_factory=dict)
    marks: tuple = ()
    prepare: Callable[[NaiveLLM], object] = lambda llm: None

    def make(self, model: str = MODEL, **options: object) -> NaiveLLM:
        pool = POOL if "pool" in self.has else {}
        llm = importlib.import_module(self.package).LLM(model, **{"device": "cpu"} | pool | self.options | options)
        self.prepare(llm)
        return llm

    @contextmanager
    def made(self, model: str = MODEL, **options: object) -> Iterator[NaiveLLM]:
        """Make a separate `LLM` for one test; its other ranks are forks, which start at once."""
        with forked_ranks():
            llm = self.make(model, **options)
        try:
            yield llm
        finally:
            llm.close()


def row(
    name: str,
    package: str,
    *has: set[str] | str,
    marks: tuple = (),
    prepare: Callable[[NaiveLLM], object] = Engine.prepare,
    **options: object,
) -> Engine:
    parts = [{part} if isinstance(part, str) else part for part in has]
    marks = (*marks, pytest.mark.slow) if name in SLOW else marks
    return Engine(name, package, frozenset().union(*parts), options, marks, prepare)


def record(llm: NaiveLLM) -> None:
    """Record steps of up to 8 sequences or 64 tokens, as on a GPU."""
    seqs, tokens = min(8, llm.options.max_num_seqs), min(64, llm.options.max_num_batched_tokens)
    llm.runner.capture(EagerRecorder(), capture_sizes(seqs), prefill_sizes(tokens))


ALONE = ("one process", "exact")  # most rows
ALL = BATCHING, BEYOND, *ALONE, "penalty rows"
# Other tests cover what these rows add.
VARIANTS = {
    "f, recorded",
    "f, no overlap",
    "guesses, recorded",
    "guesses, no overlap",
    "guesses of a model",
    "two pools",
}
SLOW = {"c", "8 bits"} | VARIANTS
ENGINES = [
    row("a", "stage_a_naive", CALLS_IN_TURN, *ALONE, "experts"),
    row("b", "stage_b_decode_step", CALLS_IN_TURN, *ALONE, "experts", sync_every=3),
    row("c", "stage_c_fused_mlp", CALLS_IN_TURN, *ALONE, "experts", marks=(pytest.mark.compiler,)),
    row("d", "stage_d_paged", CALLS_IN_TURN, POOLED, *ALONE),
    row("e", "stage_e_batching", BATCHING, *ALONE, "penalty rows"),
    row("f", "stage_f_graph_tp", BATCHING, *ALONE, "penalty rows"),
    row("f, no overlap", "stage_f_graph_tp", BATCHING, *ALONE, "penalty rows", without="overlap"),
    row("f, recorded", "stage_f_graph_tp", BATCHING, *ALONE, "penalty rows", prepare=record),
    row("8 bits", "beyond", BATCHING, BEYOND, "one process", quantization="int8", kv_cache_dtype="int8"),
    row("guesses", "beyond", *ALL, speculation="ngram"),
    row("guesses, recorded", "beyond", *ALL, prepare=record, speculation="ngram"),
    row("guesses, no overlap", "beyond", *ALL, without="overlap", speculation="ngram"),
    row("guesses of a model", "beyond", *ALL, speculation="model", draft_model=MODEL),
    row("two pools", "beyond", *ALL, hybrid_kv_cache=True),
    row("two ranks", "stage_f_graph_tp", BATCHING, "exact", tensor_parallel_size=2),
    row("two stages", "beyond", BATCHING, BEYOND, "exact", "penalty rows", pipeline_parallel_size=2),
]
PACKAGES = list(dict.fromkeys(engine.package for engine in ENGINES))
PAGED = list(dict.fromkeys(engine.package for engine in ENGINES if "pool" in engine.has))


def options_class(package: str) -> type:
    """The dataclass of an engine's options, from stage D on."""
    module = importlib.import_module(f"{package}.options")
    [found] = [v for v in vars(module).values() if is_dataclass(v) and v.__module__ == module.__name__]
    return found


def ids(outputs: list[GenerationOutput]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def ask(llm: NaiveLLM, prompts: object, params: object = GREEDY, on_text: Callable | None = None) -> list[list[int]]:
    """The tokens of each answer."""
    return ids(llm.generate(prompts, params, False, on_text))


def one_by_one(llm: NaiveLLM, params: object = GREEDY, prompts: list = PROMPTS) -> list[list[int]]:
    """The tokens of each answer, when each request runs alone."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    return [ask(llm, [prompt], [own])[0] for prompt, own in zip(prompts, each, strict=True)]


@cache
def right_of(model: str, params: SamplingParams = GREEDY, seed: int = 0) -> list[list[int]]:
    """Stage A's tokens for each of `PROMPTS`."""
    return one_by_one(NaiveLLM(model, device="cpu", seed=seed), params)


def finish(llm: NaiveLLM) -> dict[int, list[int]]:
    """Step until all requests have ended; return their tokens by request id."""
    outputs: dict[int, list[int]] = {}
    while not llm.is_finished():
        outputs.update(llm.step()[0])
    return outputs


@contextmanager
def sampler(llm: NaiveLLM, function: Callable) -> Iterator[None]:
    """Within the block the engine samples with `function`."""
    llm.sampling_fn = function
    try:
        yield
    finally:
        llm.sampling_fn = None


@contextmanager
def forward_calls(llm: NaiveLLM, call: Callable[[int], None]) -> Iterator[None]:
    """Within the block `call` is told the number of each forward pass of the model, from 1 on, before it begins."""
    numbers = count(1)
    layer = llm.runtime.model.layers[0]
    hook = layer.register_forward_pre_hook(lambda *_: call(next(numbers)))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def waiting_call(llm: NaiveLLM, prompt: list[int]) -> Iterator[tuple[Future, threading.Event]]:
    """A call in another thread that has reported its first piece of text, and the event that it then waits for."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(ask, llm, [prompt], GREEDY, wait)
        try:
            assert begun.wait(60)
            yield call, go_on
        finally:
            go_on.set()


def python(*argv: str, first_on_path: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository, with the modules in `first_on_path` before all others."""
    paths = os.pathsep.join([str(first_on_path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def listener(count: int) -> tuple[list[str], Callable[[int, str], None]]:
    """The texts that a callback has received, and the callback."""
    heard = [""] * count
    return heard, lambda index, piece: heard.__setitem__(index, heard[index] + piece)


def held(llm: NaiveLLM) -> tuple[int, int]:
    """What an engine with a pool still holds: requests that wait or run, and blocks."""
    if not hasattr(llm, "calls"):
        return len(llm.engine.unfinished), llm.engine.block_manager.num_used
    stats = llm.calls.stats()
    return stats["num_waiting"] + stats["num_running"], stats["num_used_blocks"]


def mixture(seed: int, num_requests: int = 14) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts in which tokens come again, and parameters of every kind."""
    numbers = random.Random(seed)

    def some(*values: float | None) -> float | None:
        return numbers.choice(values)

    prompts = [numbers.choices(range(1, 30), k=numbers.randint(1, 25)) for _ in range(num_requests)]
    params = [
        SamplingParams(
            temperature=some(0.0, 0.3, 0.7, 1.0, 1.7, 1e300, 5e-324),
            top_k=some(0, 0, 1, 5, 20, 400, 4095, 10**6),
            top_p=some(1.0, 1.0, 0.95, 0.8, 0.3, 1e-6, 0.99999999),
            min_p=some(0.0, 0.0, 0.02, 0.3, 1.0),
            repetition_penalty=some(1.0, 1.0, 1.05, 1.3, 0.8),
            presence_penalty=some(0.0, 0.0, 0.5, -0.3),
            frequency_penalty=some(0.0, 0.0, 0.4, -0.2),
            logprobs=some(None, None, 0, 3, 20),
            logit_bias=numbers.choice([{}, {}, {}, {7: 3.5, 12: -100}, {i: 100 for i in range(40, 60)}]),
            bad_words=numbers.choice([(), (), ("a", "the cache")]),
            allowed_token_ids=numbers.choice([None, None, range(3, 2000)]),
            min_tokens=some(0, 0, 1),
            seed=numbers.getrandbits(64),
            max_tokens=numbers.randint(1, 10),
            ignore_eos=True,
        )
        for _ in range(num_requests)
    ]
    return prompts, params
