"""CUDA on a CPU (`csrc/emulator`): right kernels run, and wrong ones stop with a reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stage_f_graph_tp.megakernel import mini

pytestmark = pytest.mark.compiler

SAID = {
    "reverse": "reversed",
    "reverse too early": "ended",
    "some return": "reversed",
    "half of the block": "wait for one another at different barriers for ever",
    "half of a warp": "the lanes of a warp are at different instructions",
    "side by side": "ended",
    "one after another": "the blocks wait for each other for ever",
    "a copy": "a block ended before its copies had arrived",
    "too many": "720 ended",
}


@pytest.fixture(scope="module")
def program() -> Path:
    return mini.build(0, mini.emulator(), Path(__file__).with_name("emulator.cu"))


@pytest.mark.parametrize("case", SAID)
def test_a_kernel_ends_as_it_would_or_with_a_reason(case: str, program: Path):
    done = subprocess.run([program, case], capture_output=True, text=True, check=True)
    assert SAID[case] in done.stdout
