"""How often a decode step calls for the GPU, and what a call costs.

Two counts that stage F drives apart: the *kernels* that a step runs, and the *orders* that the CPU gives for it.
Without graphs they are about equal; a graph makes a single order of all kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from stage_a_naive.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.llm import LLM

STEPS = 8  # that are counted
ORDERS = frozenset({
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync",
})  # fmt: skip


def count_launches(llm: LLM, prompt: list[int]) -> dict[str, float] | None:
    """Kernels and orders of one decode step of one sequence; None without a GPU, where nothing is launched."""
    if llm.device.type != "cuda":
        return None
    params = SamplingParams(temperature=0.0, max_tokens=4 * STEPS, ignore_eos=True)
    engine = llm.engine
    engine.add_request(Request(0, prompt, params, 0), streams=False)
    for _ in range(STEPS):  # the prefill, and some steps that load what is loaded lazily
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_unfinished():
        engine.step()
    events = profiler.events()
    kernels = sum(e.device_type == DeviceType.CUDA and not e.name.startswith("Mem") for e in events)
    orders = sum(e.device_type == DeviceType.CPU and e.name in ORDERS for e in events)
    return {"kernels": kernels / STEPS, "orders": orders / STEPS}


def launch_costs(device: torch.device) -> dict[str, float] | None:
    """Microseconds of a tiny kernel ordered by itself, and of one inside a graph; None without a GPU."""
    if device.type != "cuda":
        return None
    x, count = torch.zeros(1, device=device), 1000

    def kernels() -> None:
        for _ in range(count):
            x.add_(1)

    kernels()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels()
    return {name: 1e6 * _best(work, device) / count for name, work in (("alone", kernels), ("in_graph", graph.replay))}


def _best(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(6):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
