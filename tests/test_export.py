"""`make export`: a stage that needs nothing of the course around it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools import export


@pytest.mark.parametrize("letter", ["d", pytest.param("a", marks=pytest.mark.slow)])
def test_an_exported_stage_answers_where_nothing_else_of_the_course_is(letter, tmp_path):
    assert export.main([letter, str(tmp_path / "out")]) == 0
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "out"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", export.STAGES[letter].name, "--prompt", "What is a KV cache?", "--max-tokens", "4"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "[answer]\nA KV cache" in done.stdout, done.stderr
    makefile = (tmp_path / "out" / "Makefile").read_text()
    assert makefile.count("\n") == 3 and export.STAGES[letter].name in makefile
    assert "torch==" in (tmp_path / "out" / "requirements.txt").read_text()


def test_only_what_is_imported_is_there():
    assert export.imported_stages(export.STAGES["a"]) == {"stage_a_naive"}
    assert "stage_e_batching" not in export.imported_stages(export.STAGES["d"])


@pytest.mark.parametrize(("letter", "says"), [("z", "no stage is called 'z'"), ("a", "is not empty")])
def test_a_wrong_letter_and_a_folder_in_use_are_named(letter, says, tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert export.main([letter, str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
