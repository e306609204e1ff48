"""What a reader types after `make` reaches the program as it is."""

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


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """An "interpreter" that writes down its arguments, one JSON list per call, and does nothing."""
    script = tmp_path / "recorder"
    script.write_text(
        f"#!{sys.executable} -S\nimport json, sys\n"
        f"with open({str(tmp_path / 'calls')!r}, 'a') as calls:\n    print(json.dumps(sys.argv[1:]), file=calls)\n"
    )
    script.chmod(0o755)
    return script


def calls(recorder: Path, *argv: str, **environment: str) -> list[list[str]]:
    """The arguments of each call of the interpreter by `make`, which sees nothing of a `make test ARGS=…` around it."""
    command = ["make", "--no-print-directory", *argv, f"PYTHON={recorder}", "VENV="]
    ours = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    subprocess.run(command, cwd=ROOT, env=ours | environment, check=True, capture_output=True)
    return [json.loads(line) for line in (recorder.parent / "calls").read_text().splitlines()]


PIP = """Collecting torch
  Downloading small-1.whl (12 kB)
  Downloading torch-2.whl (180.5 MB)
Installing collected packages: small, torch
"""


@pytest.fixture
def installer(tmp_path: Path) -> Path:
    """An "interpreter" whose `-m venv` copies it, and whose `-m pip` says what pip says."""
    script = tmp_path / "installer"
    script.write_text(
        f"#!{sys.executable} -S\nimport os, shutil, sys\n"
        "if sys.argv[1:3] == ['-m', 'venv']:\n"
        "    os.makedirs(sys.argv[3] + '/bin')\n"
        "    shutil.copy(sys.argv[0], sys.argv[3] + '/bin/python')\n"
        "if sys.argv[1:3] == ['-m', 'pip']:\n"
        f"    print({PIP!r} + os.environ['PIP_ENDS_WITH'])\n"
    )
    script.chmod(0o755)
    return script


def make_environment(installer: Path, pip_ends_with: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "stage-a", f"PYTHON={installer}", f"VENV={installer.parent / 'venv'}"]
    environment = {"PATH": os.environ["PATH"], "PIP_ENDS_WITH": pip_ends_with}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_making_the_environment_shows_its_phases_and_large_downloads_and_is_done_once(installer):
    done = make_environment(installer, "Successfully installed small torch")
    assert done.returncode == 0 and not done.stderr
    making, installing, *phases = done.stdout.splitlines()
    assert making.startswith("[setup] making a virtual environment") and "can take some minutes" in installing
    assert phases == ["Downloading torch-2.whl (180.5 MB)", "Installing collected packages"]
    assert PIP in (installer.parent / "venv" / "pip.log").read_text()
    again = make_environment(installer, "")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_what_pip_said_last_is_shown_where_it_fails(installer):
    done = make_environment(installer, "ERROR: No space left on device")
    assert done.returncode != 0 and "ERROR: No space left on device" in done.stderr
    assert not (installer.parent / "venv" / ".ready").exists()


@pytest.mark.parametrize("prompt", AWKWARD)
@pytest.mark.parametrize("in_environment", [False, True], ids=["argument", "environment"])
def test_a_prompt_is_neither_expanded_nor_split(recorder, prompt, in_environment):
    if in_environment:
        found = calls(recorder, "stage-a", PROMPT=prompt)
    else:
        found = calls(recorder, "stage-a", f"PROMPT={prompt}")
    assert found == [["-m", "stage_a_naive", f"--prompt={prompt}"]]
    assert not (ROOT / "was-run").exists()


def test_a_model_in_a_folder_with_spaces_is_one_argument(recorder):
    assert calls(recorder, "stage-d", "MODEL=/my models/$1") == [["-m", "stage_d_paged", "--model=/my models/$1"]]


@pytest.mark.parametrize("letter", "abcde")
def test_a_stage_before_f_says_in_one_line_that_several_ranks_are_stage_fs(recorder, letter):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        calls(recorder, f"stage-{letter}", "TP=2")
    [line] = refused.value.stderr.decode().splitlines()
    assert "tensor parallelism begins at stage F: make stage-f TP=2" in line
    assert not (recorder.parent / "calls").exists()


def test_stage_f_takes_several_ranks(recorder):
    assert calls(recorder, "stage-f", "TP=2") == [["-m", "stage_f_graph_tp", "--tensor-parallel-size", "2"]]


def test_the_notebooks_open_as_root_too_and_with_the_readers_options(recorder):
    call = calls(recorder, "lab", "ARGS=--no-browser --port 9999")[-1]
    assert call[:2] == ["-m", "jupyterlab"] and call[-3:] == ["--no-browser", "--port", "9999"]
    assert ("--allow-root" in call) == (os.geteuid() == 0)
