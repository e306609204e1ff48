"""Compile Triton kernels in parallel, before they are launched.

Triton compiles a kernel when it is first launched. That takes up to a second per kernel, and an engine has some thirty.
Nearly all of this work is C++ that does not hold Python's lock, so threads can compile many kernels at the same time.
Later launches, also of other processes, find the kernels in Triton's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import triton
from triton.runtime.jit import JITFunction

_lock = threading.Lock()


def compile_kernels(run: Callable[[], object]) -> None:
    """Compile the Triton kernels that `run` launches, in threads. None of them is launched.

    Everything else that `run` does is done, so it may not use the kernels' results as indices.
    """
    thread = threading.get_ident()

    def compile_only(kernel: JITFunction, grid: Any) -> Callable[..., object]:
        # Other threads may use other engines meanwhile.
        return partial(kernel.warmup, grid=grid) if threading.get_ident() == thread else launch(kernel, grid)

    def compile_all() -> None:
        # An error is raised again when the kernel is launched.
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            run()

    with _lock:
        launch = JITFunction.__getitem__
        JITFunction.__getitem__ = compile_only  # pyright: ignore[reportAttributeAccessIssue]
        try:
            copy_context().run(compile_all)  # Triton's mode is a context variable: an interrupt must not leave it on
        finally:
            del JITFunction.__getitem__
