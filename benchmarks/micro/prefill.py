"""Stage F's prefill: time to the first token by length of the prompt, with CUDA graphs and without (GPU).

Each prompt is new, so no prefix cache helps, and the clock runs from the call of `generate` to its return. The lengths
take turns, because the CPU, which sets the time of short prompts, is faster and slower at times. The study also
measures the CPU's cost of a launch from PyTorch, from Triton, and from a graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from random import Random

import torch

from benchmarks.micro import take_turns, timed, with_engine
from benchmarks.timing import call_seconds
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp import LLM

NEEDS_GPU = True
LENGTHS = (16, 128, 512, 1024, 2048, 4096, 8192)
REPEATS, WARM_UPS = 21, 3
LAUNCHES = 1000


def measure(model: str = "random:qwen2.5-0.5b") -> dict:
    """Time one prompt of each length in two engines, and the cost of launches."""
    rows = []
    options = {"device": "cuda", "max_model_len": LENGTHS[-1] + 1, "enable_prefix_caching": False}
    for graphs in (False, True):
        rows += with_engine(
            partial(prefill_rows, graphs), LLM, model, without="" if graphs else "prefill_graphs", **options
        )
    return {"model": model, "rows": rows, "launches": launch_costs()}


def prefill_rows(graphs: bool, llm: LLM) -> list[dict]:
    found = take_turns(partial(_time_to_first_token, llm, Random(0)), LENGTHS, REPEATS, WARM_UPS)
    return [timed(samples, graphs=graphs, tokens=length) for length, samples in found.items()]


def _time_to_first_token(llm: LLM, ids: Random, length: int) -> float:
    prompt, params = ids.choices(range(10000), k=length), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    [seconds] = call_seconds(lambda: llm.generate([prompt], params, use_tqdm=False), llm.device, repeats=1, warm_up=0)
    return seconds


def launch_costs() -> dict[str, float]:
    """Return seconds per kernel that writes one number: the CPU's from Python, the GPU's in a graph."""
    from benchmarks.micro._kernels import add_one_kernel  # Triton, which not every system has

    x = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            x.add_(1)

    def per_call(call: Callable[[], object], times: int) -> float:
        return statistics.median(call_seconds(lambda: [call() for _ in range(times)], x.device, repeats=5)) / times

    return {
        "PyTorch": per_call(lambda: x.add_(1), LAUNCHES),
        "Triton": per_call(lambda: add_one_kernel[(1,)](x), LAUNCHES),
        "graph": per_call(graph.replay, 10) / LAUNCHES,
    }
