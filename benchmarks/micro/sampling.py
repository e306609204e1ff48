"""The cost of sampling parameters per step: greedy compared with filters, penalties and logprobs.

The time of a decode step is (T(129) - T(1)) / 128, with 512 tokens in each prompt. *Flat* logits come from random
weights: their nucleus has tens of thousands of tokens. *Peaked* ones come from the same model with its last norm
scaled: their nucleus has a few tokens, somewhat fewer than a trained model's (the study `real_model`). The prefix cache
is off.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from random import Random

import torch

from benchmarks.micro import step_seconds, with_engine
from benchmarks.timing import call_seconds
from benchmarks.workloads import CHAT, make_workload
from stage_a_naive.contract.params import SamplingParams
from stage_e_batching import LLM as StageE
from stage_f_graph_tp import LLM as StageF

GREEDY = {"temperature": 0.0}
KINDS = {  # what each request asks for; a list is taken in turn
    "greedy": [GREEDY],
    "temperature 0.7": [{"temperature": 0.7}],
    "temperature 0.7, top_p 0.9": [{"temperature": 0.7, "top_p": 0.9}],
    "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05": [CHAT],
    "one of these among 31 greedy": [CHAT, *[GREEDY] * 31],
    "greedy, 20 logprobs": [{"temperature": 0.0, "logprobs": 20}],
}
LOADED = list(KINDS)[:4]  # those that serve `mixed` as well
ENGINES = {"E": StageE, "F": StageF}
PEAK = 10.0  # scale of the last norm
STEPS = 128


def measure(
    model: str = "random:qwen2.5-0.5b",
    device: str = "cuda",
    engines: tuple = ("F",),
    requests: tuple = (1, 8, 32),
    logits: tuple = ("flat", "peaked"),
    size: str = "gpu",
    repeats: int = 3,
) -> dict:
    """Measure the seconds per decode step of every kind and number of requests, and of `mixed`, flat and peaked."""
    rows = []
    for name in engines:
        work = partial(measure_engine, requests=requests, kinds_of_logits=logits, size=size, repeats=repeats)
        found = with_engine(work, ENGINES[name], model, device=device, enable_prefix_caching=False)
        rows += [{"engine": name, **row} for row in found]
    return {"model": model, "rows": rows}


def measure_engine(llm: StageE, requests: tuple, kinds_of_logits: tuple, size: str, repeats: int) -> list[dict]:
    rows, seeds = [], count(1)

    def seconds(prompts: list[list[int]], asked: list[dict], max_tokens: list[int]) -> float:
        params = [
            SamplingParams(max_tokens=most, ignore_eos=True, seed=i, **asked[i % len(asked)])
            for i, most in enumerate(max_tokens)
        ]
        [found] = call_seconds(lambda: llm.generate(prompts, params, use_tqdm=False), llm.device, 1, warm_up=0)
        return found

    for logits in kinds_of_logits:
        if logits == "peaked":
            with torch.inference_mode():
                llm.runtime.model.norm.weight.mul_(PEAK)  # in place: graphs and the megakernel read it there
        for kind, asked in KINDS.items():
            for rows_per_step in requests:
                if len(asked) not in (1, rows_per_step):
                    continue

                def generate(most: int, asked: list[dict] = asked, rows: int = rows_per_step) -> float:
                    return seconds(random_prompts(next(seeds), rows), asked, [most] * rows)

                samples = [step_seconds(generate, STEPS) for _ in range(repeats + 1)][1:]  # the first is a warm-up
                rows.append({"logits": logits, "kind": kind, "requests": rows_per_step, "samples": samples})
                print(logits, kind, rows_per_step, [f"{1e3 * s:.3f} ms" for s in samples], flush=True)
        [call] = make_workload("mixed", size).rounds[0]
        for kind in LOADED:
            prompts = [list(prompt) for prompt in call.prompts]
            samples = [seconds(prompts, KINDS[kind], list(call.max_tokens)) for _ in range(repeats + 1)][1:]
            rows.append({"logits": logits, "kind": kind, "requests": "mixed", "samples": samples})
            rows[-1]["tokens"] = call.output_tokens
            print(logits, kind, "mixed", [f"{call.output_tokens / s:.0f} tokens/s" for s in samples], flush=True)
    return rows


def random_prompts(seed: int, requests: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randint(0, 4000) for _ in range(512)] for _ in range(requests)]
