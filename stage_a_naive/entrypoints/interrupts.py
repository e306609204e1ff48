"""Ctrl-C ends a command with one word and the exit status 130, from its first line on.

While Python imports, an exception is the wrong way to interrupt: either nothing catches it, or the library being
imported catches it and continues. So when a package is run as a command (`python -m stage_a_naive`), it first lets
Ctrl-C end the process. When the command's work begins, Ctrl-C raises an exception again, and open resources get closed.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMMANDS = ("stage_", "beyond", "benchmarks", "labs", "tools.")  # beginnings of what `python -m` runs


CANNOT_WRITE = {
    errno.EROFS: "; the course writes into its own folder: copy it to where you may write",
    errno.EACCES: "",
    errno.EPERM: "",
    errno.ENOSPC: "",
}


def cannot_write(error: OSError) -> str:
    """Return a message that says what could not be written, and what helps."""
    return f"{error.filename or 'what is printed'}: {error.strerror}{CANNOT_WRITE.get(error.errno or 0, '')}"


def drop_output() -> None:
    """Discard output that is still buffered for a reader that has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_at_once(*_: object) -> None:
    """End the process, as a handler of SIGINT."""
    try:
        print("\ninterrupted", file=sys.stderr, flush=True)
    finally:  # even if nothing reads stderr: in `… 2>&1 | tee log`, Ctrl-C also ends `tee`
        os._exit(130)


def end_at_once_if_a_command() -> None:
    """From now on let Ctrl-C end the process, if it was started as `python -m` with a package of the course."""
    words = sys.orig_argv
    is_command = "-m" in words[:-1] and words[words.index("-m") + 1].startswith(COMMANDS)
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Let Ctrl-C end the process at once within the block, and raise `KeyboardInterrupt` after it."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.default_int_handler, end_at_once):  # ignored, as for a shell's background jobs
        yield
        return
    signal.signal(signal.SIGINT, end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_command(main: Callable[[], int | None]) -> int | None:
    """Run a command's main function, in which Ctrl-C raises `KeyboardInterrupt`.

    Returns:
        Its exit status; 130 after Ctrl-C, 0 if the reader of a pipe has gone, and 2 if nothing can be written.
    """
    try:
        if signal.getsignal(signal.SIGINT) is end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head -1`
        drop_output()
        return 0
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        print(f"error: {cannot_write(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
