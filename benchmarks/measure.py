"""One engine in one process: the part of the benchmark that holds the model.

    python -m benchmarks.measure JOB.json

`run.py` starts this module afresh for every engine and repeat, so that no engine inherits another's memory, compiled
programs or caches. The job says what to do; the result goes into a JSON file that is rewritten after each workload, so
that a crash or a timeout costs the rest and not what was already measured.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.ceilings import measure_ceilings
from benchmarks.engines import Engine, Generator, build
from benchmarks.environment import environment
from benchmarks.figures import TimedCall, figures
from benchmarks.memory import PeakMemory
from benchmarks.warmup import estimate, warm_up
from benchmarks.workloads import Call, Workload, make_workload
from stage_a_naive.chat import render_chat
from stage_a_naive.loading import load_tokenizer, pick_device, pick_dtype, resolve
from stage_a_naive.outputs import synchronized_time
from stage_a_naive.sampling import SamplingParams

PARITY_QUESTIONS = (
    "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？",
    "Who are you?",
    "What is a KV cache?",
    "What is prefill?",
)
PARITY_TOKENS = 48
SHORTEST_MODEL_LEN = 4096  # the engines' default


def probe(job: dict) -> dict:
    """The environment and the ceilings of the device."""
    device = pick_device(job["device"])
    dtype = pick_dtype(job["dtype"], device)
    ceilings = asdict(measure_ceilings(device, dtype))
    return {"environment": environment(), "ceilings": ceilings, "dtype": str(dtype).removeprefix("torch.")}


def parity(job: dict) -> dict:
    """Greedy answers to a few questions, as token ids, in one call."""
    engine = Engine(**job["engine"])
    tokenizer = load_tokenizer(resolve(job["model"]))
    prompts = [
        tokenizer.encode(render_chat(tokenizer, [{"role": "user", "content": question}]), add_special_tokens=False)
        for question in PARITY_QUESTIONS
    ]
    engine = replace(engine, options={**engine.small, **engine.options})
    llm = build(engine, job["model"], job["device"], job["dtype"])
    params = [SamplingParams(temperature=0.0, max_tokens=PARITY_TOKENS)] * len(prompts)
    return {"answers": [list(output["token_ids"]) for output in llm.generate(prompts, params, use_tqdm=False)]}


def timing(job: dict, write: Path) -> dict:
    """All workloads of the job through one engine, in order."""
    engine = Engine(**job["engine"])
    workloads = [make_workload(name, job["size"]) for name in job["workloads"]]
    positions = resolve(job["model"]).config.max_position_embeddings
    max_model_len = min(positions, max(SHORTEST_MODEL_LEN, *(workload.longest + 1 for workload in workloads)))
    start = time.perf_counter()
    llm = build(engine, job["model"], job["device"], job["dtype"], max_model_len)
    result: dict = {"build_seconds": time.perf_counter() - start, "max_model_len": max_model_len, "workloads": {}}
    device = pick_device(job["device"])
    for workload in workloads:
        try:
            measured = run_workload(llm, engine, workload, device, job["round_seconds"], job["max_seconds"])
        except Exception as error:  # one workload's failure must not cost the others
            traceback.print_exc()
            measured = {"error": f"{type(error).__name__}: {error}"}
        result["workloads"][workload.name] = measured
        write.write_text(json.dumps(result))
        print(f"{workload.name}: {json.dumps(measured)}", flush=True)
    close = getattr(llm, "close", None)
    if close is not None:
        close()
    return result


def run_workload(
    llm: Generator, engine: Engine, workload: Workload, device: torch.device, round_seconds: float, max_seconds: float
) -> dict:
    """Warm up, then time rounds: one at least, more while less than `round_seconds` have gone by.

    Returns:
        `samples` (a dict of figures a round) and `peak_memory`, or `not_run` with the reason.
    """
    def time_call(call: Call) -> TimedCall:
        return timed_call(llm, workload, call, device)

    expected = estimate(time_call, workload, engine.one_at_a_time)
    if expected > max_seconds:
        how = ", serving one request at a time" if engine.one_at_a_time else ""
        return {"not_run": f"would take about {expected:.0f} s{how}; the limit was {max_seconds:.0f} s"}
    warm_up(time_call, workload, engine.one_at_a_time, expected, round_seconds)
    gc.collect()
    memory = PeakMemory(device)
    samples: list[dict[str, float]] = []
    start = time.perf_counter()
    for calls in workload.rounds:
        if samples and time.perf_counter() - start > round_seconds:
            break
        samples.append(figures(workload, [time_call(call) for call in calls]))
    return {"samples": samples, "peak_memory": memory.read(), "expected_seconds": expected}


def timed_call(llm: Generator, workload: Workload, call: Call, device: torch.device) -> TimedCall:
    """One call of `generate`, with the device idle before the clock starts and before it stops.

    Raises:
        RuntimeError: a request got fewer or more tokens than it asked for, so the engine did other work than the rest.
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


def main(path: str) -> int:
    """Do the job in the file and write its result where the job says."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    write = Path(job["result"])
    kinds = {"probe": probe, "parity": parity, "timing": lambda job: timing(job, write)}
    result = kinds[job["kind"]](job)
    write.write_text(json.dumps({**result, "complete": True}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
