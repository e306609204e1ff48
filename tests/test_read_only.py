"""Where the course's folder or the output cannot be written, a command says so in a line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stage_a_naive.entrypoints.interrupts import run_command
from stage_c_fused_mlp.extension import ExtensionError, load_extension

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent


def test_a_read_only_folder_is_named_with_what_helps_and_other_errors_are_not_hidden(capsys):
    def write():
        raise OSError(errno.EROFS, "Read-only file system", "/course/labs/work")

    assert run_command(write) == 2
    assert capsys.readouterr().err.startswith("error: /course/labs/work: Read-only file system; the course writes into")
    with pytest.raises(FileNotFoundError):
        run_command(lambda: os.stat("/no such folder") and 0)


@pytest.mark.compiler
def test_a_build_that_cannot_be_written_says_what_to_set(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIX_ENGINES_BUILD", str(tmp_path / "file" / "extensions"))
    with pytest.raises(ExtensionError, match="cannot be written .*: set SIX_ENGINES_BUILD to a folder that can be"):
        load_extension()


@pytest.mark.parametrize("module", ["stage_a_naive --list-questions", "tools.doctor"])
def test_a_full_disk_is_named(module):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", *module.split()]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == "error: what is printed: No space left on device"


def test_a_locale_that_is_not_utf_8_is_named_and_not_the_prompt():
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "stage_a_naive", "--prompt", "什么是 KV cache？"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "set LC_ALL=C.UTF-8" in done.stderr and "prompt" not in done.stderr
