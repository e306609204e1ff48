"""A clock for work that a device does later: wait before reading the clock, at both ends, and leave the first call out.

`stage_a_naive/timing.py` makes both mistakes, too. `python -m labs.variants.timed` times a product.
"""

import time
from collections.abc import Callable

import torch

from stage_a_naive.floor import synchronized_time


def milliseconds(work: Callable[[], object], now: Callable[[], float], repeats: int) -> float:
    """Time a piece of work: the median of `repeats` calls, in milliseconds.

    One more call comes first, and is not counted: it loads, compiles and plans.

    Args:
        work: launches what is timed, and returns before it is done.
        now: waits until all that was launched is done, and returns the time in seconds.
    """
    times = []
    for _ in range(repeats + 1):
        start = now()
        work()
        times.append(now() - start)
    ordered = sorted(times[1:])
    return 1000 * (ordered[repeats // 2] + ordered[(repeats - 1) // 2]) / 2


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight, x = torch.ones(4096, 4096, device=device), torch.ones(4096, device=device)
    started = time.perf_counter()
    found = milliseconds(lambda: weight @ x, lambda: synchronized_time(device), 20)
    print(f"{found:.3f} ms per product, {1000 * (time.perf_counter() - started):.0f} ms for all 21")


if __name__ == "__main__":
    main()
