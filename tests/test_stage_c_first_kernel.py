"""The lesson on CUDA: its kernels are correct in the emulator, and the bugs that it describes show there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stage_c_fused_mlp import first_kernel
from stage_c_fused_mlp.extension import CSRC

SOURCE, ARTICLE = CSRC / "stage_c" / "first_kernel.cu", CSRC / "stage_c" / "article_norm.cu"


def changed(source: Path, folder: Path, *changes: tuple[str, str]) -> str:
    """What a program prints after changes of its text."""
    text = source.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / source.name).write_text(text, encoding="utf-8")
    return first_kernel.run_cuda(folder / source.name)


@pytest.mark.compiler
def test_the_program_finds_all_rows_right_and_counts_the_sectors(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["first_kernel"])
    first_kernel.main()
    said = capsys.readouterr().out
    assert re.findall(r"(\d+) of 10 rows are right", said) == ["10"] * 3
    assert said.strip().endswith("32 with a thread per row, 4 with a warp per row")


@pytest.mark.compiler
def test_sums_are_wrong_without_the_barrier(tmp_path):
    without = changed(SOURCE, tmp_path, ("  __syncthreads();  // all threads have stored their sums\n", ""))
    assert "a block per row: 10 of 10" not in without and "a warp per row: 10 of 10" in without


def rows(said: str) -> list[str]:
    return re.findall(r"row \d: (\w+)", said)


@pytest.mark.compiler
def test_the_article_s_kernel_is_wrong_in_two_ways_and_each_repair_mends_a_row(tmp_path):
    cleared = (
        "  atomicAdd(&mean_buf, mean);",
        "  if (threadIdx.x == 0) mean_buf = var_buf = 0.0f;\n  __syncthreads();\n  atomicAdd(&mean_buf, mean);",
    )
    text = ARTICLE.read_text(encoding="utf-8")
    one_pass = text[
        text.index("  float mean = 0.0f, var") : text.index(
            "  for (int i = threadIdx.x; i < kHidden; i += kThreads) y["
        )
    ]
    two_passes = """
  __shared__ float mean_buf, var_buf;
  if (threadIdx.x == 0) mean_buf = var_buf = 0.0f;
  __syncthreads();
  float sum = 0.0f, squares = 0.0f;
  for (int i = threadIdx.x; i < kHidden; i += kThreads) sum += x_row[i];
  atomicAdd(&mean_buf, sum / kHidden);
  __syncthreads();
  for (int i = threadIdx.x; i < kHidden; i += kThreads) squares += (x_row[i] - mean_buf) * (x_row[i] - mean_buf);
  atomicAdd(&var_buf, squares / kHidden);
  __syncthreads();
  if (threadIdx.x == 0) var_buf = rsqrtf(var_buf + 1e-5f);
  __syncthreads();
"""
    assert rows(changed(ARTICLE, tmp_path)) == ["right", "WRONG", "WRONG"]
    assert rows(changed(ARTICLE, tmp_path, cleared)) == ["right", "right", "WRONG"]
    assert rows(changed(ARTICLE, tmp_path, (one_pass, two_passes))) == ["right"] * 3
