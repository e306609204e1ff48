"""Where the time of a decode step goes: attention, MLP, LM head, the work between them, and idle time.

Stages A, B and C run the same model, so their kernels come in the same order: in each layer the products of Q, K and V,
attention, the output product, then the MLP; after the last layer the LM head. A request is recorded under PyTorch's
profiler and divided by that order. The time of a step is measured by the engine, without the profiler; its idle part is
the time in which no kernel runs. On a CPU the spans are operators.

Attention is found by its kernel's name. Compiled kernels have no such name, so compiled steps are measured with `sdpa`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial

import torch

from benchmarks.engines import select
from benchmarks.micro import with_engine
from benchmarks.trace import Span, record
from stage_a_naive.sampling import SamplingParams

ENGINES = ("A", "B", "B compiled[sdpa=True]", "C", "C compiled[sdpa=True]")
PARTS = ("attention", "MLP", "LM head", "other kernels", "idle")
CONTEXT, STEPS, REPEATS = 128, 8, 7
ATTENTION = ("scaled_dot_product", "flash", "fmha", "attention")
PRODUCTS = ("nvjet", "gemm", "gemv", "cutlass", "addmm", "linear", "mm")
FUSED_MLP = ("swiglu", "fused_kernel", "warp_kernel", "naive_kernel")  # stage C's operator is norm and MLP in one
GENERATED = ("triton_", "cpp_fused", "combine")  # a compiler's kernels are named after all that they were fused from


def is_one_of(span: Span, words: tuple[str, ...]) -> bool:
    name = span.name.lower()
    return any(word in name for word in words) and not any(word in name for word in GENERATED)


def parts_of_steps(spans: list[Span], num_layers: int) -> list[tuple[str, Span]]:
    """Name the part of every span of the decode steps; the first pass, the prefill, is left out.

    If the LM head of a step is not visible, its products cannot be identified, and all its spans are `other kernels`.

    Raises:
        ValueError: the spans do not come in the order of the model.
    """
    attentions = [i for i, span in enumerate(spans) if is_one_of(span, ATTENTION)]
    passes = len(attentions) // num_layers
    if passes < 2 or len(attentions) % num_layers:
        seen = ", ".join(name for name, _ in Counter(span.name[:40] for span in spans).most_common(12))
        raise ValueError(f"{len(attentions)} attention kernels in {num_layers} layers; the most frequent are: {seen}")
    found: list[tuple[str, Span]] = []
    for at, start in enumerate(attentions):
        stop = attentions[at + 1] if at + 1 < len(attentions) else len(spans)
        last = (at + 1) % num_layers == 0
        named = _after_attention(spans[start:stop], last)
        found += named if at >= num_layers else []
    if sum(part == "LM head" for part, _ in found) != passes - 1:  # a compiler merged products with what surrounds them
        return [("other kernels", span) for _, span in found]
    return found


def _after_attention(spans: list[Span], last: bool) -> list[tuple[str, Span]]:
    """Name the spans up to the next attention: output product, MLP, and either the next layer's Q, K, V or the LM head.

    All that follows the LM head (sampling, and the next step up to its first attention) counts as other kernels.
    """
    named, products, mlp_done = [], 0, False
    for span in spans:
        is_mlp = is_one_of(span, FUSED_MLP)
        is_product = not is_mlp and not is_one_of(span, ATTENTION) and is_one_of(span, PRODUCTS)
        products += is_product
        if products == 0 or (products == 1 and is_product):
            part = "attention"
        elif is_mlp or (not mlp_done and products <= 4):
            part = "MLP"
            mlp_done = is_mlp or products == 4
        elif last:
            part = "LM head" if is_product and not any(name == "LM head" for name, _ in named) else "other kernels"
        else:
            part = "attention"
        named.append((part, span))
    return named


def measure(model: str = "random:qwen2.5-0.5b") -> dict:
    """Measure each engine's microseconds per decode step by part, and its kernels (on a CPU: operators) per step."""
    found = {}
    # All are timed before the first is recorded: a profiler that has run may go on slowing launches down.
    for work in samples_of, parts_per_step:
        for engine in select(ENGINES):
            name = engine.name.partition("[")[0]
            row = with_engine(partial(work, name), engine.build, model, "auto", "auto")
            found[name] = found.get(name, {"engine": name}) | row
            torch.compiler.reset()
    return {"model": model, "context": CONTEXT, "rows": list(found.values())}


def samples_of(name: str, llm: object) -> dict[str, list[float]]:
    """Measure the engine's time per token, without the profiler."""
    seconds_per_token(llm)  # the first visit to these lengths plans and compiles
    return {"samples": [seconds_per_token(llm) for _ in range(REPEATS)]}


def seconds_per_token(llm: object) -> float:
    """Decode `STEPS` tokens of one request; returns the time per token that the engine reports."""
    prompt = [(7 * j) % 1000 for j in range(CONTEXT)]
    params = SamplingParams(temperature=0.0, max_tokens=1 + STEPS, ignore_eos=True)
    return llm.generate([prompt], params, use_tqdm=False)[0]["metrics"]["tpot"]


def parts_per_step(name: str, llm: object) -> dict[str, object]:
    """Return the number of kernels in a recorded step, and the microseconds of each part."""
    run = partial(seconds_per_token, llm)
    run()
    named = parts_of_steps(record(name, run, llm.device, STEPS).spans, llm.source.config.num_hidden_layers)
    parts = dict.fromkeys(PARTS[:-1], 0.0)
    for part, span in named:
        parts[part] += span.length / STEPS
    return {"kernels": len(named) / STEPS, "parts": parts}


def waterfall(row: dict) -> dict[str, float]:
    """Return the microseconds per step of every part; idle is the time in which no kernel runs."""
    step = 1e6 * statistics.median(row["samples"])
    return {**row["parts"], "idle": max(0.0, step - sum(row["parts"].values()))}


def headline(result: dict) -> str:
    idle = {row["engine"]: (found := waterfall(row))["idle"] / sum(found.values()) for row in result["rows"]}
    return f"The hardware idles {idle['B']:.0%} of a decode step of B, and {idle['B compiled']:.0%} of a compiled one"
