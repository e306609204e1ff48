"""Shared by all tests: the skip of what this machine cannot run, and no progress bars or network."""

from __future__ import annotations

import os

# Before torch is imported. One thread a process: the models are tiny, and threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test runs only where there is what its markers ask for."""
    missing = {} if torch.cuda.is_available() else {"gpu": "no NVIDIA GPU"}
    if any("compiler" in item.keywords for item in items):
        from stage_c_fused_mlp.extension import ExtensionError, plan  # here: most tests can do without this import

        try:
            plan()
        except ExtensionError as error:
            missing["compiler"] = str(error)
    for item in items:
        for marker in missing.keys() & item.keywords.keys():
            item.add_marker(pytest.mark.skip(reason=missing[marker]))
