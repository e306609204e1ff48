"""Where the time of a decode step goes: attention, MLP, LM head, the work between them, and idle time.

Stages A, B and C run the same model, so their products come in the same order: in each layer those of Q, K and V, those
of attention where the compiler writes it out, the output product, then the MLP; after the last layer the LM head. A
request is recorded under PyTorch's profiler and divided by that order. The time of a step is measured by the engine,
without the profiler; its idle part is the time in which no kernel runs. On a CPU the spans are operators.
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

ENGINES = ("A", "B", "B compiled", "C", "C compiled")
PARTS = ("attention", "MLP", "LM head", "other kernels", "idle")
CONTEXT, STEPS, REPEATS = 128, 8, 7
TIMED = 120  # steps in a sample: enough that what happens once per request hardly counts, in the same size of cache
ATTENTION = ("scaled_dot_product", "flash", "fmha", "attention")
PRODUCTS = ("nvjet", "gemm", "gemv", "cutlass", "addmm", "linear", "mm")
FUSED_MLP = ("swiglu", "fused_kernel", "warp_kernel", "naive_kernel")  # stage C's operator is norm and MLP in one
GENERATED = ("triton_", "cpp_fused", "combine")  # a compiler's kernels are named after all that they were fused from


def is_one_of(span: Span, words: tuple[str, ...]) -> bool:
    name = span.name.lower()
    return any(word in name for word in words) and not any(word in name for word in GENERATED)


def is_fused_mlp(span: Span) -> bool:
    return is_one_of(span, FUSED_MLP)


def is_product(span: Span) -> bool:
    return is_fused_mlp(span) or (is_one_of(span, PRODUCTS) and not is_one_of(span, ATTENTION))


def parts_of_steps(spans: list[Span], num_layers: int, steps: int = STEPS) -> list[tuple[str, Span]]:
    """Name the part of every span from the prefill's last product to the last step's LM head.

    The attention of the prefill is found by its name, the parts of the steps by the order of their products. If their
    number does not fit any order, because a compiler merged products with others, all spans are `other kernels`.

    Raises:
        ValueError: the attention of the prefill is not there.
    """
    attentions = [i for i, span in enumerate(spans) if is_one_of(span, ATTENTION)]
    if len(attentions) < num_layers:
        seen = ", ".join(name for name, _ in Counter(span.name[:40] for span in spans).most_common(12))
        raise ValueError(f"{len(attentions)} attention kernels in {num_layers} layers; the most frequent are: {seen}")
    spans = spans[attentions[num_layers - 1] + 1 :]
    products = [i for i, span in enumerate(spans) if is_product(span)]
    for of_prefill in (5, 3):  # output, gate, up, down, LM head; or output, stage C's operator, LM head
        per_step, rest = divmod(len(products) - of_prefill, steps)
        per_layer, others = divmod(per_step, num_layers)  # the LM head, and perhaps one for the angles of the positions
        if rest == 0 and others in (1, 2) and per_layer > 1:
            break
    else:
        return [("other kernels", span) for span in spans[products[4] + 1 if len(products) > 4 else 0 :]]
    found, start = [], products[of_prefill - 1] + 1
    of_mlp = 1 if is_fused_mlp(spans[products[-2]]) else 3
    for number, end in enumerate(products[of_prefill:]):
        at = number % per_step - (others - 1)  # in the step: below 0 before the layers, and the LM head after them
        before = part = "MLP" if at % per_layer >= per_layer - of_mlp else "attention"
        if not 0 < at < per_step - others:  # what is before it belongs to no layer
            before, part = "other kernels", "other kernels" if at < 0 else part if at == 0 else "LM head"
        found += [(before, span) for span in spans[start:end]] + [(part, spans[end])]
        start = end + 1
    return found


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
    seconds_per_token(llm, TIMED)  # the first visit to these lengths plans and compiles
    return {"samples": [seconds_per_token(llm, TIMED) for _ in range(REPEATS)]}


def seconds_per_token(llm: object, steps: int) -> float:
    """Decode this many tokens of one request after the first; returns the time per token that the engine reports."""
    prompt = [(7 * j) % 1000 for j in range(CONTEXT)]
    params = SamplingParams(temperature=0.0, max_tokens=1 + steps, ignore_eos=True)
    return llm.generate([prompt], params, use_tqdm=False)[0]["metrics"]["tpot"]


def parts_per_step(name: str, llm: object) -> dict[str, object]:
    """Return the number of kernels in a recorded step, and the microseconds of each part."""
    run = partial(seconds_per_token, llm, STEPS)
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
