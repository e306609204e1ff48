"""Import the public names of a package when they are first used.

`python -m stage_d_paged --help` first imports the package `stage_d_paged`. If the package imported the engine, the help
would appear only after seconds, because PyTorch is slow to import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable


def import_when_used(package: str, defined_in: dict[str, str]) -> Callable[[str], object]:
    """Make a package's `__getattr__`, which Python calls for names that the package does not have yet (PEP 562).

    Args:
        package: its name, for the error message.
        defined_in: for each public name, the module that defines it.
    """

    def getattr_of_package(name: str) -> object:
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(defined_in[name]), name)

    return getattr_of_package
