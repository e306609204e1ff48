"""What a reader types after `make` reaches the program unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")

AWKWARD = [
    "costs $5 and $(HOME) and ${HOME}",
    "$(shell touch was-run) `touch was-run` $$(touch was-run)",
    'it\'s "quoted" and back\\slashed',
    "--raw",
    "two\nlines",
    "a # comment, a = b; c | d & e",
    "什么是 KV cache？",
]


PIP = """Collecting torch
  Downloading small-1.whl (12 kB)
  Downloading torch-2.whl (180.5 MB)
Installing collected packages: small, torch
"""
# An "interpreter" that only writes down its arguments, one JSON list per call; but `-m venv` copies it, and `-m pip`
# says what pip says.
INTERPRETER = f"""#!{sys.executable} -S
import json, os, shutil, sys
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
if sys.argv[1:3] == ["-m", "venv"]:
    os.makedirs(sys.argv[3] + "/bin")
    shutil.copy(sys.argv[0], sys.argv[3] + "/bin/python")
if sys.argv[1:3] == ["-m", "pip"]:
    print({PIP!r} + os.environ["PIP_ENDS_WITH"])
"""


@pytest.fixture
def make(tmp_path):
    """Runs `make`, which sees nothing of a `make test ARGS=…` around it; with `calls`, those of the interpreter."""
    interpreter, calls = tmp_path / "interpreter", tmp_path / "calls"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)

    def make(*argv: str, venv: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        calls.unlink(missing_ok=True)
        command = ["make", "--no-print-directory", *argv, f"PYTHON={interpreter}", f"VENV={venv}"]
        ours = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"CALLS": str(calls)}
        done = subprocess.run(command, cwd=ROOT, env=ours | environment, capture_output=True, text=True, check=False)
        make.calls = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
        return done

    return make


def test_making_the_environment_shows_its_phases_and_large_downloads_and_is_done_once(make, tmp_path):
    venv = tmp_path / "venv"
    done = make("stage-a", venv=str(venv), PIP_ENDS_WITH="Successfully installed small torch")
    assert done.returncode == 0 and not done.stderr
    making, installing, *phases = done.stdout.splitlines()
    assert making.startswith("[setup] making a virtual environment") and "can take some minutes" in installing
    assert phases == ["Downloading torch-2.whl (180.5 MB)", "Installing collected packages"]
    assert PIP in (venv / "pip.log").read_text()
    assert [call[-1] for call in make.calls if call[:2] == ["-m", "pip"]] == ["."], "what the stages need, and no more"
    again = make("stage-a", venv=str(venv))
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_a_part_of_the_course_installs_its_own_packages_when_it_is_first_asked_for(make, tmp_path):
    venv = str(tmp_path / "venv")
    for target, extra in (
        ("grade-d", ".[labs]"),
        ("bench", ".[bench]"),
        ("lab", ".[notebooks]"),
        ("serve", ".[serve]"),
    ):
        done = make(target, venv=venv, PIP_ENDS_WITH="Successfully installed what it needs")
        assert done.returncode == 0 and extra in [call[-1] for call in make.calls if call[:2] == ["-m", "pip"]]
        assert make(target, venv=venv).stdout == ""


def test_the_doctor_installs_nothing(make, tmp_path):
    assert make("doctor", venv=str(tmp_path / "venv")).returncode == 0
    assert make.calls == [["-m", "tools.doctor"]] and not (tmp_path / "venv").exists()


def test_the_readers_own_results_are_a_file_that_git_ignores(make):
    assert make("bench").returncode == 0
    summary = make.calls[-1][make.calls[-1].index("--summary") + 1]
    assert summary in (ROOT / "docs/course.md").read_text(encoding="utf-8")
    assert f"/{summary}" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()


def test_a_stage_is_compared_with_the_one_before_it(make):
    assert make("compare", "STAGE=d").returncode == 0 and make.calls[-1][-2:] == ["C", "D"]
    assert "make compare STAGE=b" in make("compare", "STAGE=a").stderr


def test_published_figures_are_listed_and_measured_only_if_minutes_are_given(make):
    assert make("figures").returncode == 0 and make.calls[-1] == ["-m", "benchmarks.figures"]
    assert make("figures", "MINUTES=20").returncode == 0
    assert make.calls[-1] == ["-m", "benchmarks.figures", "--minutes", "20"]


def test_what_pip_said_last_is_shown_where_it_fails(make, tmp_path):
    done = make("stage-a", venv=str(tmp_path / "venv"), PIP_ENDS_WITH="ERROR: No space left on device")
    assert done.returncode != 0 and "ERROR: No space left on device" in done.stderr
    assert not (tmp_path / "venv" / ".ready").exists()


@pytest.mark.parametrize("prompt", AWKWARD)
@pytest.mark.parametrize("in_environment", [False, True], ids=["argument", "environment"])
def test_a_prompt_is_neither_expanded_nor_split(make, prompt, in_environment):
    done = make("stage-a", PROMPT=prompt) if in_environment else make("stage-a", f"PROMPT={prompt}")
    assert done.returncode == 0 and make.calls == [["-m", "stage_a_naive", f"--prompt={prompt}"]]
    assert not (ROOT / "was-run").exists()


@pytest.mark.parametrize(
    ("argv", "call"),
    [
        (["stage-d", "MODEL=/my models/$1"], ["-m", "stage_d_paged", "--model=/my models/$1"]),
        (["stage-f", "TP=2"], ["-m", "stage_f_graph_tp", "--tensor-parallel-size", "2"]),
    ],
)
def test_a_folder_with_spaces_is_one_argument_and_stage_f_takes_several_ranks(make, argv, call):
    assert make(*argv).returncode == 0 and make.calls == [call]


@pytest.mark.parametrize("letter", "abcde")
def test_a_stage_before_f_says_in_one_line_that_several_ranks_are_stage_fs(make, letter):
    refused = make(f"stage-{letter}", "TP=2")
    [line] = refused.stderr.splitlines()
    assert refused.returncode and "tensor parallelism begins at stage F: make stage-f TP=2" in line and not make.calls


def test_the_notebooks_open_as_root_too_and_with_the_readers_options(make):
    assert make("lab", "ARGS=--no-browser --port 9999").returncode == 0
    call = make.calls[-1]
    assert call[:2] == ["-m", "jupyterlab"] and call[-3:] == ["--no-browser", "--port", "9999"]
    assert ("--allow-root" in call) == (os.geteuid() == 0)
