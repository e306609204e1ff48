"""The smallest persistent kernel, in all versions: correct in the emulator, and a missing wait is noticed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from stage_f_graph_tp.megakernel import mini

COUNTS = {1: (2, 0), 2: (0, 0), 3: (0, 575)}  # version -> barriers and bulk copies per layer

# What to remove from each version, and the expected failure.
WRONG = {
    "no barrier before x is received": (1, "if (VERSION == 1) grid_barrier(m.arrived, ++barriers);\n", ""),
    "no barrier before the activation is received": (
        1,
        "if (VERSION == 1) grid_barrier(m.arrived, ++barriers);  // the second of the layer\n",
        "",
    ),
    "no fence before the block is counted": (1, "__threadfence();  // the results are visible", "// the results are"),
    "a word is taken for what it is": (2, "while (VERSION >= 2 &&", "while (false &&"),
    "flags of all layers are the same": (2, "    ++flag;\n", ""),
    "a slot is read before its weights are there": (3, "if (VERSION == 3) barrier_wait(", "static_cast<void>("),
    "a slot is filled before it was read": (3, "barrier_wait(empty, parity(next) ^ 1);", ""),
}
QUICK = ("no barrier before x is received", "a word is taken for what it is", "a slot is filled before it was read")


@pytest.mark.compiler
@pytest.mark.parametrize("version", COUNTS)
def test_the_row_is_that_of_plain_cpp(version):
    said = mini.run(version, mini.emulator())
    barriers, copies = COUNTS[version]
    assert said.startswith(f"version {version}: largest difference from the reference 0.0")
    assert said.endswith(f"per layer {barriers} barriers of the grid, 1178 words handed over, {copies} bulk copies")


@pytest.mark.compiler
@pytest.mark.parametrize("what", [pytest.param(w, marks=[pytest.mark.slow] * (w not in QUICK)) for w in WRONG])
def test_a_wait_that_is_missing_is_noticed(what, tmp_path, monkeypatch):
    monkeypatch.setenv("SIX_ENGINES_BUILD", str(tmp_path))
    version, old, new = WRONG[what]
    text = mini.SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    source = tmp_path / "mini.cu"
    source.write_text(text.replace(old, new), encoding="utf-8")
    program = mini.build(version, mini.emulator(), source)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode != 0, done.stdout
    assert "WRONG" in done.stdout or "what():" in done.stderr, "the program failed before the kernel"


def test_every_symbol_of_the_lesson_is_found_in_the_megakernel():
    lesson = (Path(mini.__file__).parent / "README.md").read_text(encoding="utf-8")
    _, _, table = lesson.partition("| in `mini.cu` | in the megakernel |")
    rows = re.findall(r"^\| `(\w+)` \| \[`([\w.]+)::(\w+)`\]", table, flags=re.MULTILINE)
    assert len(rows) == 10
    for symbol, file, other in rows:
        assert re.search(rf"\b{symbol}\b", mini.SOURCE.read_text(encoding="utf-8")), symbol
        assert re.search(rf"\b{other}\b", (mini.SOURCE.parent / file).read_text(encoding="utf-8")), other


@pytest.mark.slow
@pytest.mark.parametrize("version", COUNTS)
def test_it_compiles_for_an_h200(version, tmp_path, monkeypatch):
    compiler = mini.nvcc(("9.0",))
    if not Path(compiler[0]).exists():
        pytest.skip(f"there is no {compiler[0]}")
    monkeypatch.setenv("SIX_ENGINES_BUILD", str(tmp_path))
    assert mini.build(version, compiler).exists()
