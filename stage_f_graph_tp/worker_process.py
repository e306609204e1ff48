"""A worker process, run as a script by rank 0's `Ranks`.

Importing PyTorch takes seconds, in which rank 0 may die. So before any import of weight, a thread starts that ends this
process with its parent. (The connection to rank 0 alone would not tell: a child that rank 0 has forked holds it open.)
"""

import os
import signal
import sys
import threading
import time


def end_with(parent: int) -> None:
    """Leave, even from the middle of a collective, when `parent` is this process's parent no more."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; rank 0 says what it ends
    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    from stage_f_graph_tp.rank import build_worker
    from stage_f_graph_tp.worker import work_for_parent

    work_for_parent(*map(int, sys.argv[2:]), build_worker)
