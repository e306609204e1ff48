"""Mixture of experts: bytes and time of a decode step by the number of requests, and the experts that it touches.

    python -m benchmarks.micro experts                     # counted; `part=floor`
    python -m benchmarks.micro experts part=step           # timed on a GPU, as the others are
    python -m benchmarks.micro experts part=skewed         # the same with a router that prefers some experts
    python -m benchmarks.micro experts part=ranks          # on one GPU and on two; `ranks=2,4`: also on four
    python -m benchmarks.micro experts part=tiles          # the products alone, by how they are divided

*floor*: bytes of weights under a router that chooses all experts equally often. *step*: the whole engine. The prompts
differ, and the experts are counted in the same steps of an engine without graphs: a step's floor is what these experts
and all other weights take to read. *skewed*: an eighth of the router's rows are three times as large. *ranks*: the
engine with every way to divide experts among GPUs; the ways that the host must follow step by step run without graphs,
and so does one that could be recorded, to compare them with. *tiles*: one layer's products in a CUDA graph over all
layers, each with its own weights.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.floor import ModelCost
from benchmarks.micro import timed, with_engine
from benchmarks.timing import graph_seconds
from beyond import LLM, SamplingParams
from beyond.experts.floor import expected_touched, weight_bytes
from stage_a_naive.checkpoints.presets import preset_config

if TYPE_CHECKING:  # only a GPU needs Triton
    from beyond.experts.products import Choice, Tiles

MODEL = "qwen3-30b-a3b"
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT, STEPS, COUNTED = 64, 64, 4  # tokens of a prompt; steps that are timed, and whose experts are counted
TILED = (("pairs", 1), ("pairs", 8), ("blocks", 8), ("blocks", 32), ("blocks", 256), ("blocks", 4096))
FEW = (1, 8, 32, 256)  # requests on ranks
DIVIDED = {  # ways to divide the experts among ranks
    "parts of experts": {},
    "whole experts, `sum`": {"expert_parallel": "sum"},
    "parts of experts, no graphs": {"enforce_eager": True},
    "whole experts, `all_to_all`, no graphs": {"expert_parallel": "all_to_all", "enforce_eager": True},
}
OPTIONS = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 256, "attention_backend": "triton"}
OPTIONS |= {"num_kvcache_blocks": 1024, "kvcache_block_size": 64}
BYTES = ModelCost(preset_config(MODEL), 2)
EXPERTS = BYTES.experts


def measure(
    part: str = "floor", requests: tuple[int, ...] = (), repeats: int = 5, ranks: tuple[int, ...] = (2,)
) -> dict:
    """One part of the study.

    Args:
        requests: by default 1 to 256.
        ranks: of the part `ranks`.

    Raises:
        ValueError: there is no such part, or no GPU that it needs.
    """
    if part not in ("floor", "step", "skewed", "ranks", "tiles"):
        raise ValueError(f"experts has no part {part!r}; there are: floor, step, skewed, ranks, tiles")
    requests = requests or (FEW if part == "ranks" else REQUESTS)
    if part == "floor":
        counts = {n: expected(n) for n in requests} | {"all": EXPERTS.count}
        return {
            "part": part,
            "rows": [
                {"requests": n, "touched": touched, "bytes": round(weight_bytes(BYTES, touched))}
                for n, touched in counts.items()
            ],
        }
    if not torch.cuda.is_available():
        raise ValueError(f"experts part={part} needs an NVIDIA GPU, and PyTorch sees none")
    if part == "tiles":
        return {"part": part, "rows": with_engine(time_tiles, LLM, f"random:{MODEL}", enforce_eager=True, **OPTIONS)}
    options = OPTIONS | {"max_num_seqs": max(requests), "enable_prefix_caching": False}
    if part == "ranks":
        return {"part": part, "rows": time_ranks(ranks, requests, repeats, options)}
    counted = with_engine(
        lambda llm: {n: count_touched(llm, n) for n in requests},
        make_llm,
        part,
        enforce_eager=True,
        without="overlap",
        **options,
    )
    print(f"experts touched: {counted}", flush=True)
    rows = with_engine(
        lambda llm: [timed(samples_of(llm, n, repeats), requests=n, touched=counted[n]) for n in requests],
        make_llm,
        part,
        **options,
    )
    return {"part": part, "rows": rows}


def time_ranks(ranks: tuple[int, ...], requests: tuple[int, ...], repeats: int, options: dict) -> list[dict]:
    """Seconds of a step on one GPU, and on several with every way to divide the experts."""
    ways = [(1, "all experts", {}), *((n, way, own) for n in ranks for way, own in DIVIDED.items())]
    rows = []
    for size, way, own in ways:
        own = own | ({"tensor_parallel_size": size} if size > 1 else {})

        def time_engine(llm: LLM, **what: object) -> list[dict]:
            return [timed(samples_of(llm, n, repeats), **what, requests=n) for n in requests]

        rows += with_engine(partial(time_engine, ranks=size, way=way), LLM, f"random:{MODEL}", **options, **own)
    return rows


def floor_seconds(requests: int, touched: float, copy_bytes_per_s: float) -> float:
    """Seconds of reading what a step reads: the touched experts, all other weights, and the requests' KV cache."""
    context = PROMPT + STEPS / 2
    return (weight_bytes(BYTES, touched) + requests * context * BYTES.kv_bytes_per_token) / copy_bytes_per_s


def expected(requests: int) -> float:
    """Experts per layer that a uniform router touches."""
    return expected_touched(EXPERTS.count, EXPERTS.per_token, requests)


def make_llm(part: str, **options: object) -> LLM:
    llm = LLM(f"random:{MODEL}", **options)
    if part == "skewed":
        for layer in llm.runtime.model.layers:
            layer.mlp.gate.weight[: EXPERTS.count // 8] *= 3  # in place: graphs read it, too
    return llm


def prompts_of(requests: int) -> list[list[int]]:
    """Different random tokens for every request."""
    numbers = random.Random(0)
    return [numbers.choices(range(1, BYTES.config.vocab_size), k=PROMPT) for _ in range(requests)]


def samples_of(llm: LLM, requests: int, repeats: int) -> list[float]:
    """Seconds of a decode step of all requests; a first run, which warms up, is left out."""
    return [step_seconds(llm, requests) for _ in range(1 + repeats)][1:]


def step_seconds(llm: LLM, requests: int) -> float:
    """Mean seconds of a decode step of all requests."""
    params = SamplingParams(temperature=0.0, max_tokens=1 + STEPS, ignore_eos=True)
    outputs = llm.generate(prompts_of(requests), params, use_tqdm=False)
    return min(output["metrics"]["tpot"] for output in outputs)


def count_touched(llm: LLM, requests: int) -> float:
    """Different experts per layer in the first decode steps, on average."""
    params = SamplingParams(temperature=0.0, max_tokens=1 + COUNTED, ignore_eos=True)
    chosen: list[torch.Tensor] = []

    def collect(router: object, given: object, found: tuple[torch.Tensor, Choice]) -> None:
        if len(found[0]) == requests:  # a decode step of all requests
            chosen.append(found[1].chosen.clone())

    hooks = [layer.router.register_forward_hook(collect) for layer in llm.runtime.model.layers]
    llm.generate(prompts_of(requests), params, use_tqdm=False)
    for hook in hooks:
        hook.remove()
    return sum(len(of_layer.unique()) for of_layer in chosen) / len(chosen)


@torch.inference_mode()
def time_tiles(llm: LLM) -> list[dict]:
    """Seconds of a layer's products with several divisions, for random choices of experts."""
    from beyond.experts.products import Choice, block_rows, down_add, gate_up_silu, group

    layers, rows = [layer.mlp for layer in llm.runtime.model.layers], []
    for way, tokens in TILED:
        numbers = torch.Generator("cuda").manual_seed(0)
        x = torch.randn(tokens, BYTES.config.hidden_size, device="cuda", dtype=torch.bfloat16, generator=numbers)
        scores = torch.rand(len(layers), tokens, EXPERTS.count, device="cuda", generator=numbers)
        choices = [Choice(weights, chosen.int()) for weights, chosen in (s.topk(EXPERTS.per_token) for s in scores)]
        touched = sum(len(choice.chosen.unique()) for choice in choices) / len(choices)
        block = block_rows(tokens, EXPERTS)
        groups = [group(c.chosen, EXPERTS.count, block) if way == "blocks" else None for c in choices]
        activated = gate_up_silu(x, choices[0].chosen, groups[0], layers[0].gate_up_proj.weight, EXPERTS)

        def launch(part: str, tiles: Tiles | None, layer: int) -> object:
            mlp, choice, own = layers[layer], choices[layer], groups[layer]  # noqa: B023
            if part == "gate and up":
                return gate_up_silu(x, choice.chosen, own, mlp.gate_up_proj.weight, EXPERTS, tiles)  # noqa: B023
            return down_add(activated, choice, own, mlp.down_proj.weight, EXPERTS, x, tiles)  # noqa: B023

        for part, divisions in divisions_of(way, block).items():
            found = []
            for tiles in [None, *divisions]:
                launches = [partial(launch, part, tiles, layer) for layer in range(len(layers))]
                try:
                    samples = graph_seconds(launches, 5)
                except Exception as error:  # more shared memory than there is
                    print(f"{part}, {tokens} tokens, {tiles}: {type(error).__name__}", flush=True)
                    continue
                found.append(
                    timed(samples, way=way, tokens=tokens, part=part, tiles=str(tiles or "chosen"), touched=touched)
                )
            rows += found
    return rows


def divisions_of(way: str, block: int) -> dict[str, list[Tiles]]:
    """Divisions to compare with the chosen one."""
    from beyond.experts.products import Tiles

    if block >= 64:
        same = [Tiles(64, 64, w, s) for w in (4, 8) for s in (3, 4)]
        return {"gate and up": same, "down": [replace(tiles, rows=128) for tiles in same]}
    heights = (
        {"gate and up": (16, 32), "down": (64, 128)} if way == "pairs" else {"gate and up": (32, 64), "down": (64, 128)}
    )
    return {
        part: [Tiles(height, columns, 4, stages) for height in own for columns in (128, 256) for stages in (3, 5)]
        for part, own in heights.items()
    }
