"""Timing: calls from the CPU, kernels in a CUDA graph, and a device's ceilings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.floor import Ceilings
from stage_a_naive.contract.outputs import synchronized_time
from stage_a_naive.floor import measure_copy_bandwidth
from stage_a_naive.sampling import SamplingParams

Work = Callable[[], object]


def call_seconds(work: Work, device: torch.device, repeats: int, warm_up: int = 1) -> list[float]:
    """Time each of `repeats` calls in seconds; the device is idle before the clock starts and before it stops."""
    samples = []
    for _ in range(warm_up + repeats):
        start = synchronized_time(device)
        work()
        samples.append(synchronized_time(device) - start)
    return samples[warm_up:]


def graph_seconds(launches: Sequence[Work], repeats: int, replays: int = 1, capture: bool = True) -> list[float]:
    """Measure seconds per launch on the current GPU, `repeats` samples, by the device's clock, without Python.

    Args:
        launches: captured into one CUDA graph, one after another. They should read different memory, so that the L2
            cache does not serve them.
        replays: of the graph, in a sample.
        capture: False launches them one by one, for work that cannot be captured.
    """
    for launch in launches[:2]:  # whatever happens once: compiling, loading, choosing an algorithm
        launch()
    torch.cuda.synchronize()

    def launch_all() -> None:
        for launch in launches:
            launch()

    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch_all()
    samples = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay() if capture else launch_all()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / replays / len(launches))
    return samples[2:]


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the copy bandwidth (bytes read plus written) and the matmul rate, because data sheets promise more.

    The sizes exceed all caches and make launch times negligible. The best of several runs counts, because a disturbed
    run is not the ceiling.
    """
    num_bytes, size = (2**31, 8192) if device.type == "cuda" else (2**27, 1024)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul = min(call_seconds(lambda: left @ right, device, repeats=20, warm_up=3))
    copy = measure_copy_bandwidth(device, num_bytes, repeats=20)
    return {"copy_bytes_per_s": copy, "matmul_operations_per_s": 2 * size**3 / matmul}


def launch_seconds(device: torch.device) -> dict[str, float]:
    """Measure the seconds of an empty kernel, launched from Python (`alone`) and inside a CUDA graph (`in_graph`)."""
    x = torch.zeros(1, device=device)
    launches = [lambda: x.add_(1)] * 1000
    captured = {"alone": False, "in_graph": True}
    return {name: min(graph_seconds(launches, 6, capture=capture)) for name, capture in captured.items()}


LAUNCHES = re.compile(r"cu(da)?Launch(Cooperative)?Kernel(Ex|ExC)?|cudaGraphLaunch|cudaMem(cpy|set)Async")
COUNTED_STEPS = 8


def launches_per_step(llm: object) -> dict[str, float]:
    """Count the kernels that the GPU runs in a decode step of one request, and the launches that the CPU makes for it.

    PyTorch's profiler counts them, as the difference of two calls of `generate`. The two are about equal without CUDA
    graphs; with one, a single launch starts all its kernels.
    """

    def counted(max_tokens: int) -> tuple[int, int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            llm.generate([list(range(1, 65))], [params], use_tqdm=False)
            torch.cuda.synchronize()
        events = profiler.events()
        kernels = sum(e.device_type == DeviceType.CUDA and not e.name.startswith("Mem") for e in events)
        return kernels, sum(e.device_type == DeviceType.CPU and bool(LAUNCHES.fullmatch(e.name)) for e in events)

    counted(1 + COUNTED_STEPS)  # the profiler's start, and lazy loading
    whole, first = counted(2 + COUNTED_STEPS), counted(2)
    return {name: (a - b) / COUNTED_STEPS for name, a, b in zip(("kernels", "launches"), whole, first, strict=True)}
