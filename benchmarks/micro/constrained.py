"""Constrained decoding: the time of a decode step with a schema, compared with the same step without it.

The models have random weights and a made-up tokenizer as large as their vocabulary. Both ways sample with the same
seeds, and no answer can end. The host's work for grammars (accept tokens, fill masks) overlaps with the forward.
"""

import os
import time
from collections.abc import Callable

import numpy as np

from benchmarks.micro import take_turns, with_engine
from benchmarks.micro._vocabulary import widen
from beyond.structured import LLM, SamplingParams

TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 4096}
FIELDS = {"name": TEXT, "text": TEXT, "blocks": NUMBER}
OBJECT = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
SCHEMA = {"type": "array", "items": OBJECT, "minItems": 500}
WAYS = {"free": {"ignore_eos": True}, "form": {"structured_outputs": {"json": SCHEMA}}}
PROMPT, WARM_UP = 64, 8  # tokens of a prompt; steps that are not counted
TABLES = """
[constrained]
corner = "model, requests"
line = "{model}, {requests}"
columns."ms per step without a schema: median, 99 %" = "{1e3 * median(free):n}, {1e3 * median(free_99):n}"
columns."with a schema" = "{1e3 * median(form):n}, {1e3 * median(form_99):n}"
columns."ratio" = "{median(form) / median(free):.2f}, {median(form_99) / median(free_99):.2f}"
columns."ms of the host for grammars" = "{1e3 * median(host):n}, {1e3 * median(host_99):n}"
note = "{result['cores']} CPU cores; medians of {len(result['rows'][0]['form'])}"
"""


def measure(
    models: tuple = ("random:qwen2.5-0.5b", "random:qwen2.5-7b"),
    requests: tuple = (1, 32),
    tokens: int = 256,
    repeats: int = 3,
    device: str = "auto",
) -> dict:
    """Measure the seconds from one decode step's tokens to the next's: median and 99th percentile of each repeat."""
    rows, options = [], {"device": device, "max_num_seqs": max(requests), "max_model_len": 2048}
    for model in models:
        rows += with_engine(lambda llm: measure_engine(llm, requests, tokens, repeats), LLM, model, **options)
    return {"tokens": tokens, "cores": len(os.sched_getaffinity(0)), "rows": rows}


def measure_engine(llm: LLM, requests: tuple, tokens: int, repeats: int) -> list[dict]:
    """Measure an engine for each number of requests."""
    constraints, ends, host = widen(llm), [], [0.0]
    for name in ("accept", "fill_masks"):
        setattr(constraints, name, timed_into(host, getattr(constraints, name)))
    llm.engine.reports.append(lambda step, ended, now: ends.append((now, len(step.sampling), host[0])))

    def run(way: tuple[int, str]) -> dict[str, float]:
        count, name = way
        params = [SamplingParams(seed=i, max_tokens=tokens, **WAYS[name]) for i in range(count)]
        outputs = llm.generate([[i + 1] * PROMPT for i in range(count)], params, use_tqdm=False)
        assert {output["finish_reason"] for output in outputs} == {"length"}, "an answer has ended"
        times, _, spent = zip(*(end for end in ends if end[1] == count), strict=True)
        ends.clear()
        steps, own = np.diff(times)[WARM_UP:], np.diff(spent)[WARM_UP:]
        found = {name: np.median(steps), f"{name}_99": np.quantile(steps, 0.99)}
        return found | ({"host": np.median(own), "host_99": np.quantile(own, 0.99)} if name == "form" else {})

    rows: list[dict] = []
    for (count, name), found in take_turns(run, [(n, way) for n in requests for way in WAYS], repeats).items():
        if name == "free":
            rows.append({"model": llm.source.name, "requests": count})
        rows[-1] |= {key: [float(one[key]) for one in found] for key in found[0]}
    return rows


def timed_into(seconds: list[float], work: Callable) -> Callable:
    """Wrap `work` so that its seconds are added to the only entry of `seconds`."""

    def run(*given: object) -> object:
        start = time.perf_counter()
        result = work(*given)
        seconds[0] += time.perf_counter() - start
        return result

    return run
