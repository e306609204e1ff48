"""The work of a measuring process: describe the machine, check the engines' answers for parity, time workloads.

The name of a figure ends in its unit: `_ms`, `_per_s`, `seconds`. Higher is better only for `_per_s`. TTFT is the time
to the first token, waiting included; TPOT is the time per output token after the first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.engines import Engine
from benchmarks.results import environment
from benchmarks.timing import launch_seconds, launches_per_step, measure_ceilings
from benchmarks.workloads import Call, Workload
from stage_a_naive.chat import render_chat
from stage_a_naive.checkpoints.loading import load_tokenizer, pick_device, pick_dtype, resolve
from stage_a_naive.contract.outputs import synchronized_time
from stage_a_naive.sampling import SamplingParams

PARITY_QUESTIONS = (
    "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？",
    "Who are you?",
    "What is a KV cache?",
    "What is prefill?",
)
PARITY_PARAMS = SamplingParams(temperature=0.0, max_tokens=48)
SHORT_TOKENS = 5  # of the short run that tells a workload's pace
SHORT_REQUESTS = 2  # of the short run of an engine that serves one request after another
PERCENTILES = (50, 99)


def look(job: dict) -> Iterator[dict]:
    """Describe the machine (environment, ceilings, cost of a launch), and get each engine's answers to a few questions.

    The engines answer one after another in this process; the results so far are yielded before each of them.
    """
    device = pick_device(job["device"])
    dtype = pick_dtype(job["dtype"], device)
    found: dict = {"environment": environment(), "dtype": str(dtype).removeprefix("torch."), "answers": {}}
    found["ceilings"] = measure_ceilings(device, dtype)
    found["launch_seconds"] = launch_seconds(device) if device.type == "cuda" else None
    tokenizer = load_tokenizer(resolve(job["model"]))
    chats = [render_chat(tokenizer, [{"role": "user", "content": question}]) for question in PARITY_QUESTIONS]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    for engine in (Engine(**fields) for fields in job["engines"]):
        yield found
        small = replace(engine, options={**engine.small, **engine.options})
        llm = small.build(job["model"], job["device"], job["dtype"])
        outputs = llm.generate(prompts, [PARITY_PARAMS] * len(prompts), use_tqdm=False)
        found["answers"][engine.name] = [list(output["token_ids"]) for output in outputs]
        close(llm)
        del llm
        gc.collect()
    yield found


def close(llm: object) -> None:
    if hasattr(llm, "close"):
        llm.close()


def run_workload(
    llm: object, engine: Engine, workload: Workload, device: str, round_seconds: float, max_seconds: float, count: bool
) -> dict:
    """Warm up, then time rounds: at least one, and more until `round_seconds` have passed.

    The warm-up is a round of the same lengths with other token ids: what happens once per length (a compiled program, a
    cuDNN plan) is not counted as if it happened always, and a prefix cache finds nothing. For `single` it is timed too:
    the first visit to these lengths. A round longer than `round_seconds` is not run twice; there the short version of
    it, which tells the pace, is the warm-up, and where requests are served one after another, the end of each of them.

    Args:
        count: also count the kernels and launches of a decode step, where the workload is `single` on a GPU.

    Returns:
        `samples` (a dict of figures per round); of `single` also `first_prefill_ms` (of the process's first call),
        `first_visit` (figures) and, where counted, `launches`; or `not_run` with the reason.
    """
    device = pick_device(device)
    warm_up, is_single, found = workload.warm_up_round(), workload.name == "single", {}

    def timed(calls: Sequence[Call]) -> list[TimedCall]:
        return [timed_call(llm, workload, call, device) for call in calls]

    if is_single:
        found["first_prefill_ms"] = 1e3 * timed(warm_up[:1])[0].seconds
    expected = expected_seconds(timed, workload, engine.one_at_a_time)
    if expected > max_seconds:
        how = ", serving one request at a time" if engine.one_at_a_time else ""
        return {"not_run": f"would take about {expected:.0f} s{how}; the limit was {max_seconds:.0f} s"}
    if is_single:
        found["first_visit"] = figures(workload, timed(warm_up))
    elif expected <= round_seconds:
        timed(warm_up)
    elif engine.one_at_a_time:
        timed(list(map(last_tokens, warm_up)))
    gc.collect()
    samples, start = [], time.perf_counter()
    for calls in workload.rounds:
        if not samples or time.perf_counter() - start <= round_seconds:
            samples.append(figures(workload, timed(calls)))
    found["samples"] = samples
    if count and is_single and device.type == "cuda":
        found["launches"] = launches_per_step(llm)
    return found


def last_tokens(call: Call) -> Call:
    """Return a call for the last tokens of every answer, after a prompt as long as all that was before them."""
    outputs = tuple(min(n, SHORT_TOKENS) for n in call.max_tokens)
    lengths = [len(p) + n - short for p, n, short in zip(call.prompts, call.max_tokens, outputs, strict=True)]
    prompts = tuple((p * (length // len(p) + 1))[:length] for p, length in zip(call.prompts, lengths, strict=True))
    return Call(call.tag, prompts, outputs)


class TimedCall(NamedTuple):
    """A call, its time as seen from outside, and each request's `Metrics`, if it has any."""

    call: Call
    seconds: float
    metrics: list[dict[str, float]]


def expected_seconds(
    timed: Callable[[Sequence[Call]], list[TimedCall]], workload: Workload, one_at_a_time: bool
) -> float:
    """Run a short version of one round, twice; returns about how many seconds a whole round would take."""
    seconds = 0.0
    for whole in workload.warm_up_round():
        count = SHORT_REQUESTS if one_at_a_time else len(whole.prompts)
        outputs = tuple(min(n, SHORT_TOKENS) for n in whole.max_tokens[:count])
        short = Call(whole.tag, whole.prompts[:count], outputs)
        _, again = timed([short, short])
        # The fastest request tells the pace of decoding: the others also waited for each other's prefill.
        paces = [m["tpot"] for m in again.metrics if m["tpot"] > 0]
        pace = min(paces) if paces else again.seconds / max(outputs)
        share = whole.prompt_tokens / short.prompt_tokens if one_at_a_time else 1.0
        seconds += again.seconds * share + max(whole.steps(one_at_a_time) - SHORT_TOKENS, 0) * pace
    return seconds


def timed_call(llm: object, workload: Workload, call: Call, device: torch.device) -> TimedCall:
    """Time one call of `generate`; the device is idle before the clock starts and before it stops.

    Raises:
        RuntimeError: a request got fewer or more tokens than it asked for, so the engine did different work.
    """
    prompts, params = [list(prompt) for prompt in call.prompts], workload.sampling_params(call)
    start = synchronized_time(device)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = synchronized_time(device) - start
    made = [len(output["token_ids"]) for output in outputs]
    if made != list(call.max_tokens):
        at = next((i for i, (a, b) in enumerate(zip(made, call.max_tokens, strict=False)) if a != b), len(made))
        raise RuntimeError(f"request {at} of {len(prompts)} did not get the {call.max_tokens[at]} tokens it asked for")
    return TimedCall(call, seconds, [dict(output["metrics"]) for output in outputs if "metrics" in output])


def figures(workload: Workload, timed: Sequence[TimedCall]) -> dict[str, float]:
    """Return one round's figures.

    A decode step is one more token for every request of a call: (T(n) - T(1)) / (n - 1). What happens once cancels out.
    """
    by_tag = {t.call.tag: t for t in timed}
    if workload.name == "ttft":
        return {f"ttft_{tag}_ms": 1e3 * t.seconds for tag, t in by_tag.items()}
    whole = by_tag["all"]
    rate = whole.call.output_tokens / whole.seconds
    if "first" in by_tag:
        step_ms = 1e3 * (whole.seconds - by_tag["first"].seconds) / (max(whole.call.max_tokens) - 1)
    if workload.name == "single":
        return {"prefill_ms": 1e3 * by_tag["first"].seconds, "tpot_ms": step_ms, "output_tokens_per_s": rate}
    found = {"seconds": whole.seconds, "output_tokens_per_s": rate}
    if workload.name in ("decode32", "chat32"):
        found["step_ms"] = step_ms
    if whole.metrics:
        if workload.name == "prefix":
            cached = sum(m["num_cached_tokens"] for m in whole.metrics)
            found |= {"tokens_cached": cached, "tokens_computed": whole.call.prompt_tokens - cached}
        for name in ("ttft", "tpot"):
            values = [1e3 * m[name] for m in whole.metrics]
            found |= {f"{name}_p{p}_ms": float(np.percentile(values, p)) for p in PERCENTILES}
    return found
