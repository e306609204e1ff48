"""Layers that forget: KV memory and step time with one pool for all layers and with one per kind of layer.

    python -m benchmarks.micro windows                 # counted; `part=memory`
    python -m benchmarks.micro windows part=step       # timed on a GPU, as `part=load` is

*memory*: bytes that a request of Gemma 3 270M holds in decode, and requests whose blocks fit next to the weights on a
GPU with 16 GB, in an engine for up to 32,768 tokens. *step*: a decode step of requests with 30,000 tokens each, run by
the whole engine. *load*: requests of 8,000 tokens in a small pool.
"""

from __future__ import annotations

import itertools
import time

import torch

from benchmarks.micro import chosen, unlike_prompt, with_engine
from beyond import LLM, SamplingParams
from beyond.windows.pools import Limits
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.floor import ModelBytes
from stage_d_paged.config import ModelConfig

MODEL, BLOCK_SIZE, DTYPE = "gemma-3-270m", 16, torch.bfloat16
LENGTHS = (256, 2048, 8192, 16384, 32768)
MEMORY, SHARE = 16 * 10**9, 0.9  # of a GPU, and what of it the engine takes
STEP_TOKENS, MOST_SEQS = 2048, 512
LONG, STEP_REQUESTS, STEPS = 30_000, (1, 8, 32), 64
LOAD = {"requests": 64, "prompt": 8_000, "output": 64, "num_kvcache_blocks": 4096}


def measure(part: str = "memory", repeats: int = 3) -> dict:
    """Measure one part of the study.

    Raises:
        ValueError: the part does not exist, or it needs a GPU and there is none.
    """
    parts = {"memory": lambda _: count_memory(), "step": time_steps, "load": time_load}
    return {"part": part, "rows": chosen(parts, part, on_gpu=("step", "load"))(repeats)}


def count_memory() -> list[dict]:
    """Count the bytes per request, and the requests that fit, for every length."""
    config, model = ModelConfig.from_hf(preset_config(MODEL)), ModelBytes(preset_config(MODEL), DTYPE.itemsize)
    windowed = sum(bool(kind.window) for kind in config.layers)
    full, window = config.num_layers - windowed, max(kind.window for kind in config.layers)
    block_bytes = BLOCK_SIZE * model.kv_bytes_per_token  # of all layers
    of_a_layer = block_bytes // config.num_layers
    budget = (int(MEMORY * SHARE) - model.weight_bytes) // block_bytes
    limits = Limits(window, max(LENGTHS), MOST_SEQS, STEP_TOKENS)
    pools = limits.divide(budget, BLOCK_SIZE, full, windowed)
    rows = []
    for length in LENGTHS:
        blocks = length // BLOCK_SIZE
        held = min(blocks, limits.held(BLOCK_SIZE))
        fits = min(pools.full // blocks, (pools.windowed - limits.of_a_step(BLOCK_SIZE)) // held)
        sizes = block_bytes * blocks, of_a_layer * (blocks * full + held * windowed)
        rows.append({"length": length, "pools": 1, "bytes": sizes[0], "requests": budget // blocks})
        rows.append({"length": length, "pools": 2, "bytes": sizes[1], "requests": fits})
    return rows


def time_steps(repeats: int) -> list[dict]:
    """Measure the seconds of a decode step after 30,000 tokens, by the number of requests."""
    rows = []
    for hybrid, requests in itertools.product((False, True), STEP_REQUESTS):
        prompts = [unlike_prompt(i, LONG) for i in range(requests)]
        samples = with_engine(
            lambda llm, prompts=prompts: [step_seconds(llm, prompts) for _ in range(1 + repeats)][1:],
            LLM,
            f"random:{MODEL}",
            device="cuda",
            dtype="bfloat16",
            max_model_len=32768,
            max_num_seqs=max(STEP_REQUESTS),
            max_num_batched_tokens=4096,
            hybrid_kv_cache=hybrid,
        )
        rows.append({"pools": 1 + hybrid, "requests": requests, "samples": samples})
        print(rows[-1], flush=True)
    return rows


def step_seconds(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the mean seconds of a step in which all requests decode, from the last prefilled request."""
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    return min(output["metrics"]["tpot"] for output in llm.generate(prompts, params, use_tqdm=False))


def time_load(repeats: int) -> list[dict]:
    """Measure the seconds of long requests that do not all fit in one pool, and how many run together."""
    rows = []
    prompts = [unlike_prompt(i, LOAD["prompt"]) for i in range(LOAD["requests"])]
    params = SamplingParams(temperature=0.0, max_tokens=LOAD["output"], ignore_eos=True)
    for hybrid in (False, True):
        found = with_engine(
            lambda llm: [load_seconds(llm, prompts, params) for _ in range(1 + repeats)][1:],
            LLM,
            f"random:{MODEL}",
            device="cuda",
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=LOAD["requests"],
            max_num_batched_tokens=STEP_TOKENS,
            num_kvcache_blocks=LOAD["num_kvcache_blocks"],
            kvcache_block_size=BLOCK_SIZE,
            enable_prefix_caching=False,
            hybrid_kv_cache=hybrid,
        )
        samples, together = zip(*found, strict=True)
        rows.append({"pools": 1 + hybrid, "together": max(together), "samples": list(samples)})
        print(rows[-1], flush=True)
    return rows


def load_seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """Return the seconds of all requests, and how many ran together at most."""
    running: list[int] = []
    scheduler = llm.engine.scheduler
    llm.engine.reports[:] = [lambda *_: running.append(scheduler.num_running)]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, max(running)
