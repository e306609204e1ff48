"""Isolate an answer's process from the judge, the machine and the network, as far as the system can.

Linux has three means that need no privilege. Other processes of the same user cannot open the memory and descriptors of
a process that cannot be dumped (`guard`). A subreaper inherits the orphans of its children, so it can end a daemon that
has left its process group (`end_children`). Namespaces give a process a separate list of processes, a separate network
and a separate view of the file system (`enclose`); see user_namespaces(7) and mount_setattr(2). Root has a fourth: it
can run an answer as a user who owns nothing (`become_nobody`), for example in a container whose profile refuses
namespaces. On other systems `guard` and `end_children` do nothing, and `walls` and `why_not` report what is available.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

LINUX = sys.platform == "linux"
# Of <sys/prctl.h>, <sched.h>, <sys/mount.h>, <sys/syscall.h>, <net/if.h> and <linux/capability.h>.
PDEATHSIG, DUMPABLE, SUBREAPER, NO_NEW_PRIVS = 1, 4, 36, 38
NEW_USER, NEW_MOUNTS, NEW_PIDS, NEW_NETWORK, NEW_IPC = 0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000
RECURSIVE, PRIVATE, NO_SETUID, NO_DEVICES = 0x4000, 0x40000, 2, 4
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
SET_FLAGS, UP_AND_RUNNING = 0x8914, 0x41
CAPABILITY_VERSION = 0x20080522
PATIENCE = 30.0  # seconds after which killed processes have ended
SCRATCH = "size=1g"  # bytes of the folder that an enclosed process may write to
NOBODIES = range(20_000, 60_000)  # ids of users who own nothing, in the range that rootless containers map
PROCESSES = 1000  # the most that an answer may have, threads included
# The means that isolate a process: separate namespaces, a separate user.
NAMESPACES, USER = "namespaces", "user"


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _prctl(option: int, value: int) -> None:
    if LINUX:
        with contextlib.suppress(OSError):  # Linux-like systems have fewer of them
            _call("prctl", option, value, 0, 0, 0)


def hide() -> None:
    """Close this process's memory and descriptors to others of its user."""
    _prctl(DUMPABLE, 0)


def guard() -> None:
    """Close this process's memory and descriptors to others of its user, adopt orphans, and end with its parent."""
    hide()
    _prctl(SUBREAPER, 1)
    die_with_parent()


def die_with_parent() -> None:
    """Let the system kill this process when its parent ends."""
    _prctl(PDEATHSIG, signal.SIGKILL)


def end_children() -> None:
    """Kill all children of this process and the orphans that it inherits, until there are none.

    Raises:
        TimeoutError: some do not end.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)
    raise TimeoutError(f"processes of an answer have not ended after {PATIENCE:.0f} s")


def _children() -> list[int]:
    """Return the processes whose parent is this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(folder.name))
    return found


def enclose(folder: Path, root: bool = False, hidden: Iterable[str] = ()) -> None:
    """Continue in a process that sees no other process, has no network, and can write only to `folder`.

    The folder and /dev/shm become empty folders in memory, and the current folder is `folder`. Two processes remain:
    this one waits for the first process of the new namespace, and that one waits for the process that continues, so
    that signals have their usual meaning for the latter. Both end with its status, or 128 plus a signal's number.

    Args:
        root: this process is root's, and remains so until `become_nobody`.
        hidden: folders that it must not see: each becomes an empty folder.

    Raises:
        OSError: the system does not let this user have namespaces.
    """
    user, group = os.getuid(), os.getgid()
    _prctl(DUMPABLE, 1)  # otherwise only root may write the maps below
    _call("unshare", (0 if root else NEW_USER) | NEW_MOUNTS | NEW_PIDS | NEW_NETWORK | NEW_IPC)
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in [] if root else maps.items():
        Path("/proc/self", name).write_text(text)
    hide()
    _go_on_in_a_fork()
    _call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    _call("syscall", MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    for writable in filter(os.path.isdir, (str(folder), "/dev/shm")):
        _call("mount", b"tmpfs", writable.encode(), b"tmpfs", NO_SETUID | NO_DEVICES, SCRATCH.encode())
    for unseen in filter(os.path.isdir, hidden):
        _call("mount", b"tmpfs", unseen.encode(), b"tmpfs", NO_SETUID | NO_DEVICES, b"size=4k,mode=555")
    os.chdir(folder)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        fcntl.ioctl(ours, SET_FLAGS, struct.pack("16sH14x", b"lo", UP_AND_RUNNING))
    _go_on_in_a_fork()
    if root:
        return
    _call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())


def _go_on_in_a_fork() -> None:
    """Return only in a child; this process waits for it and ends with its status."""
    child = os.fork()
    if child == 0:
        die_with_parent()
        return
    found = status = 0
    while found != child:
        found, status = os.wait()  # the first process of a namespace inherits its orphans
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def nobody() -> int:
    """Return the id of a user that no other process has."""
    return NOBODIES[os.getpid() % len(NOBODIES)]


def give(folder: Path, user: int) -> None:
    """Give a folder and everything in it to a user."""
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, user, user, follow_symlinks=False)


def become_nobody(folder: Path, user: int) -> None:
    """Change from root to a user who owns only `folder` and given files, and can signal only his processes.

    Raises:
        OSError: this process is not root's, or lacks some of root's capabilities.
    """
    give(folder, user)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    die_with_parent()  # changing the user has reset that
    _call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)


def limit_processes() -> None:
    """Limit this process's user to `PROCESSES` more than run on the machine now. Root is not limited."""
    most = PROCESSES + sum(1 for _ in Path("/proc").glob("[0-9]*/task/*"))
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def walls() -> tuple[str, ...]:
    """Return the means of isolation that this machine offers: `NAMESPACES`, `USER`, both, or none."""
    found = tuple(wall for wall, attempt in ATTEMPTS.items() if not _error_of(attempt))
    return found if len(found) < 2 or not _error_of(_try_both) else (NAMESPACES,)  # root without most of its rights


def why_not() -> str:
    """Return why an answer cannot be isolated here; "" if it can."""
    if not LINUX:
        return f"{sys.platform} has none"
    errors = {wall: _error_of(attempt) for wall, attempt in ATTEMPTS.items()}
    return "; ".join(f"{wall}: {error}" for wall, error in errors.items()) if all(errors.values()) else ""


def described(found: tuple[str, ...] | None = None) -> str:
    """Describe the means of isolation and the missing ones for a batch's first line; None: those of this machine."""
    found = walls() if found is None else found
    if not found:
        return f"WITHOUT A WALL ({why_not()}): they can do what you can; use --container"
    as_root = "" if os.getuid() else ", and start any number of processes"
    lacks = {
        (NAMESPACES,): f"in namespaces, but as your user: they can read what you can{as_root}",
        (USER,): "as another user, but without namespaces: they have the network and can read what all may",
    }
    return lacks.get(found, "in namespaces, as another user")


def _try_nobody(folder: Path) -> None:
    """Become such a user, and check whether Python can still be read."""
    if os.getuid():
        raise PermissionError(1, "only root can change it")
    become_nobody(folder, nobody())
    for file in (sys.executable, os.__file__):
        Path(file).read_bytes()


def _try_both(folder: Path) -> None:
    user = nobody()
    enclose(folder, root=True)
    become_nobody(folder, user)


ATTEMPTS: dict[str, Callable[[Path], None]] = {NAMESPACES: enclose, USER: _try_nobody}


@cache
def _error_of(attempt: Callable[[Path], None]) -> str:
    """Return what an attempt raises in a separate process; "" if nothing."""
    if not LINUX:
        return f"{sys.platform} has none"
    with tempfile.TemporaryDirectory() as folder:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                attempt(Path(folder))
            except OSError as error:
                os.write(writer, f"{error.strerror}{f': {error.filename}' if error.filename else ''}".encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as said:
            why = said.read()
        os.waitpid(child, 0)
    return why
