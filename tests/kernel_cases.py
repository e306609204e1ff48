"""What tests of kernels share: where a case runs, how near is near, and what several of them compare with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stage_d_paged.layers import QKNorm, RotaryEmbedding
from stage_d_paged.rope import Rope

ROOT = Path(__file__).resolve().parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
F32, HALVES = torch.float32, (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, F32)
CASE = ("case", "device", "dtype")


def case(values: object, device: torch.device = CPU, dtype: torch.dtype = F32, marks: Sequence = ()):
    """A row of a table whose columns are `CASE`."""
    return pytest.param(values, device, dtype, marks=marks, id=f"{device}-{dtype}-{values}")


def interpreted(*cases: object) -> list:
    """Run cases in Triton's interpreter, which has float32 alone: all of them takes long, so most are slow tests."""
    marks = [pytest.mark.interpreted, pytest.mark.slow]
    return [case(values, marks=marks[: 1 if number % 5 == 0 else 2]) for number, values in enumerate(cases)]


def on_a_gpu(*cases: object, dtypes: Sequence[torch.dtype] = FLOATS) -> list:
    """Run each case on a GPU, in each dtype."""
    return [case(values, CUDA, dtype, [pytest.mark.gpu]) for values in cases for dtype in dtypes]


def assert_equal_in_the_interpreter(program: str) -> None:
    """Run a program in Triton's interpreter, in a separate process; it compares kernels and prints "equal"."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["equal"], done.stderr[-2000:]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖: single numbers of a rounded sum may be far off where they cancel."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def rotary_and_norm(
    heads: int, kv_heads: int, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device
) -> tuple[RotaryEmbedding, QKNorm]:
    """Rotary tables of 50 positions, and norms of heads whose weights are not 1."""
    norm = QKNorm(heads, kv_heads, head_dim, eps, dtype, device)
    norm.weight[:heads], norm.weight[heads:] = 1 + torch.rand(2, 1, head_dim, device=device)
    return RotaryEmbedding(Rope(), head_dim, 50, dtype, device), norm
