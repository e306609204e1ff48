"""What keeps an answer's process apart from the judge, the machine and the network, where the system has such means.

Linux has three that need no privilege. A process that cannot be dumped has a memory and descriptors that others of the
same user cannot open (`guard`). A subreaper inherits the orphans of its children, so that it can end a daemon which has
left its process group (`end_children`). And namespaces give a process its own list of processes, its own network and
its own view of the file system (`enclose`); see user_namespaces(7) and mount_setattr(2). Elsewhere these do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

LINUX = sys.platform == "linux"
# <sys/prctl.h>
PDEATHSIG, DUMPABLE, SUBREAPER = 1, 4, 36


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def guard() -> None:
    """Close this process's memory and descriptors to others of its user, adopt orphans, and end with its parent."""
    if LINUX:
        _call("prctl", DUMPABLE, 0, 0, 0, 0)
        _call("prctl", SUBREAPER, 1, 0, 0, 0)
    die_with_parent()


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends."""
    if LINUX:
        _call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_children() -> None:
    """Kill all children of this process, and those that it inherits from them, until there are none."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> list[int]:
    """The processes whose parent this one is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(folder.name))
    return found
