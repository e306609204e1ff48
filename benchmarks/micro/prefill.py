"""Stage F's prefill: time to the first token by length of the prompt, with CUDA graphs and without (GPU).

The prompt is new each time, nothing of it is in a prefix cache, and the clock runs from the call of `generate` to its
return. Beside it: what one launch costs the CPU when it comes from PyTorch, from Triton, and from a graph.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.micro import caption
from benchmarks.text import markdown, medians
from benchmarks.timing import call_seconds
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp import LLM

README, MARKERS, NEEDS_GPU = "stage_f_graph_tp", ("prefill", "launches"), True
LENGTHS = (16, 128, 512, 1024, 2048, 4096, 8192)
REPEATS, WARM_UPS = 10, 3
LAUNCHES = 1000


def measure(model: str = "random:qwen2.5-0.5b") -> dict:
    """One prompt of each length through two engines, and the cost of launches."""
    rows = []
    for graphs in (False, True):
        start = time.perf_counter()
        llm = LLM(
            model, device="cuda", max_model_len=LENGTHS[-1] + 1, enable_prefix_caching=False, prefill_graphs=graphs
        )
        torch.cuda.synchronize()
        ready = time.perf_counter() - start
        for length in LENGTHS:
            rows.append({"graphs": graphs, "tokens": length, "samples": _time_to_first_token(llm, length)})
            print(f"graphs={graphs} {length} tokens: {1e3 * statistics.median(rows[-1]['samples']):.2f} ms")
        rows[-1]["ready"] = ready
        print(f"graphs={graphs}: ready after {ready:.1f} s")
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return {"model": model, "rows": rows, "launches": launch_costs()}


def _time_to_first_token(llm: LLM, length: int) -> list[float]:
    ids, params = random.Random(length), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = iter([[ids.randrange(10000) for _ in range(length)] for _ in range(WARM_UPS + REPEATS)])
    return call_seconds(lambda: llm.generate([next(prompts)], params, use_tqdm=False), llm.device, REPEATS, WARM_UPS)


def launch_costs() -> dict[str, float]:
    """CPU time per launch, while the GPU keeps up; the kernels write one number."""
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


def table(results: list[dict]) -> dict[str, list[str]]:
    """Milliseconds by length, a pair of columns per model; and the cost of a launch."""
    heads, columns = ["tokens of the prompt"], []
    for result in results:
        found = medians(result["rows"], "graphs", "tokens")
        for graphs, name in ((False, "eager"), (True, "graphs")):
            heads.append(f"{result['model'].removeprefix('random:')}, {name}, ms")
            columns.append([f"{1e3 * found[graphs, length]:.2f}" for length in LENGTHS])
    body = [[f"{length:,}", *cells] for length, *cells in zip(LENGTHS, *columns, strict=True)]
    launches = [[name, f"{1e6 * seconds:.2f}"] for name, seconds in results[0]["launches"].items()]
    return {
        "prefill": [*markdown(heads, body), "", caption(results[0], f"medians of {REPEATS}")],
        "launches": [*markdown(["launched from", "CPU time per kernel, µs"], launches), "", caption(results[0])],
    }
