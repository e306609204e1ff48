"""A worker's process, which rank 0 runs as a script.

Importing PyTorch takes seconds, and rank 0 may die meanwhile. So before the first slow import, this script starts a
thread that ends the process when its parent ends. (The connection to rank 0 does not always show that: a forked child
of rank 0 keeps it open.)
"""

import importlib
import os
import signal
import sys
import threading
import time


def end_with(parent: int) -> None:
    """End this process, even in the middle of a collective, when `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; rank 0 decides what it ends
    _, module, function, parent, *numbers = sys.argv
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    from stage_f_graph_tp.tensor_parallel.watch.worker_loop import run_worker

    run_worker(getattr(importlib.import_module(module), function), *map(int, numbers))
