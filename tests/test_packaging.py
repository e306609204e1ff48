"""`pip install .`: the contents of a wheel, and its messages about missing parts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of packages that a wheel of this repository unpacks to; built offline from a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("packaging")
    sources = folder / "sources"
    left_out = shutil.ignore_patterns(".*", "build", "work", "*.egg-info", "__pycache__", "*.png", "*.json")
    shutil.copytree(ROOT, sources, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", "-w", str(folder), str(sources)], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "packages")
    return folder / "packages"


def run_elsewhere(installed: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another folder, where only the installed packages can be found."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", *argv]
    return subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True, check=False)


def test_a_wheel_claims_no_name_that_is_not_ours_alone(installed):
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {path.name for path in ROOT.glob("stage_?_*")}
    assert (installed / "stage_d_paged" / "attention" / "reference.py").is_file()


def test_an_installed_stage_answers_with_a_model_that_is_a_directory(installed):
    words = ["--model", str(ROOT / "models" / "tutor"), "--device", "cpu", "--max-tokens", "9"]
    done = run_elsewhere(installed, "stage_f_graph_tp", *words, "--prompt", "Who are you?")
    assert done.returncode == 0, done.stderr
    assert "[answer]\nI am the tutor" in done.stdout


def test_without_a_clone_the_command_line_says_that_one_is_needed(installed):
    done = run_elsewhere(installed, "stage_a_naive", "--list-questions")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "need a clone" in done.stderr


def test_without_a_clone_stage_c_says_that_one_is_needed_to_build(installed):
    done = run_elsewhere(installed, "stage_c_fused_mlp.extension")
    assert done.returncode != 0 and "needs a clone" in done.stderr and "Traceback" not in done.stderr
