"""Import files that define kernels without Triton, as on macOS; their kernels cannot be called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import MagicMock

from labs.exercises import Exercise

MODULES = ("triton", "triton.language", "triton.tools", "triton.tools.tensor_descriptor")


def is_missing() -> bool:
    """Return whether Triton cannot be imported here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return True
    return False


def needs(exercise: Exercise) -> bool:
    """Return whether an exercise is a Triton kernel."""
    return exercise.is_python and "\nimport triton" in exercise.reference.read_text(encoding="utf-8")


@contextmanager
def stand_in() -> Iterator[None]:
    """Within the block, make a stand-in importable as Triton, if there is none."""
    if not is_missing():
        yield
        return
    before = {name: sys.modules[name] for name in MODULES if name in sys.modules}
    sys.modules |= {name: MagicMock(name=name) for name in MODULES}
    try:
        yield
    finally:
        for name in MODULES:
            del sys.modules[name]
        sys.modules |= before


def import_module(name: str) -> None:
    """Import a module, with the stand-in if it needs Triton and there is none.

    PyTorch and transformers are imported before, because they check for Triton themselves.
    """
    try:
        importlib.import_module(name)
    except ImportError:
        if not is_missing():
            raise
        from transformers import AutoModelForCausalLM  # noqa: F401

        with stand_in():
            importlib.import_module(name)
