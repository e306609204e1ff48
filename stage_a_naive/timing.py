"""Time the product of a matrix and a vector, twice wrongly and then correctly: `python -m stage_a_naive.timing`."""

import time
from statistics import median

import torch

from stage_a_naive.floor import measure_copy_bandwidth, synchronized_time

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
weight, x = torch.ones(8192, 8192, device=device), torch.ones(8192, device=device)  # float32: 268 MB
for name, clock, count in (
    ("wrong, the first call", lambda: synchronized_time(device), 1),
    ("wrong, no synchronisation", time.perf_counter, 20),
    ("correct", lambda: synchronized_time(device), 20),  # all work done, then the time
):
    times = []
    for _ in range(count):
        start = clock()
        torch.matmul(weight, x)
        times.append(1e3 * (clock() - start))
    print(f"{name:26} {median(times):9.3f} ms, from {min(times):.3f} to {max(times):.3f}")
floor = 1e3 * weight.nbytes / measure_copy_bandwidth(device)
print(f"{'floor':26} {floor:9.3f} ms: {weight.nbytes / 1e6:.0f} MB at the speed of a copy")
