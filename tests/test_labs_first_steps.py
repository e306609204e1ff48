"""A student's first minutes in a fresh clone: from `make lab-a`, or a notebook, to a first exercise that passes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labs import bodies, notebook
from labs.exercises import ROOT, load_labs

# Hidden folders too: in one of them other tests write and remove files at the same time.
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "work", "pack", "results", "local", "*.png", "__pycache__", "*.egg-info"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as somebody gets it."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("fresh") / "clone", ignore=LEFT_OUT))


def make(clone: Path, *words: str) -> str:
    command = ["make", "-C", str(clone), "VENV=", f"PYTHON={sys.executable}", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_from_make_lab_a_to_a_first_green_exercise(clone):
    said = make(clone, "lab-a")
    assert "labs/lab_a.md" in said and "make grade-a ONLY=A.1" in said
    assert "not started" in make(clone, "grade-a", "ONLY=A.1")
    exercise = load_labs()["a"].exercises[0]
    file = clone / "labs" / "work" / exercise.path
    mine = bodies.transplant(file.read_text(), exercise.reference.read_text(), exercise.name, exercise.path)
    file.write_text(mine)
    assert "10/10  passed" in make(clone, "grade-a", "ONLY=A.1")
    assert "  A  ██" in make(clone, "progress")


def test_the_notebook_of_lab_a_does_the_same_with_nothing_but_the_repository(clone):
    cells = json.loads((clone / "labs" / "notebooks" / "lab_a.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    exercise = load_labs()["a"].exercises[0]
    reference = bodies.definition(exercise.reference.read_text(), exercise.name, exercise.path)
    first = code[1].replace(notebook._stub(exercise), reference)
    assert first != code[1] and 'grade("A.1")' in first
    script = "\n".join(["import shutil; shutil.rmtree('labs/work', ignore_errors=True)", code[0], first])
    run = subprocess.run([sys.executable, "-c", script], cwd=clone, capture_output=True, text=True, check=False)
    assert "A.1" in run.stdout and "10/10  passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("letter", load_labs())
def test_a_notebook_is_made_from_the_handout_and_the_starter(letter):
    written = (notebook.FOLDER / f"lab_{letter}.ipynb").read_text(encoding="utf-8")
    assert written == notebook.notebook(load_labs()[letter]), "run `python -m labs.notebook`"
    for kind, text in notebook.cells_of(load_labs()[letter]):
        if kind == "code":
            compile(text, letter, "exec")


@pytest.mark.parametrize("letter", load_labs())
def test_an_answer_from_a_cell_reaches_the_copy(letter, tmp_path, monkeypatch):
    monkeypatch.setattr(notebook, "WORK", tmp_path)
    lab = load_labs()[letter]
    notebook.write_starter(lab, tmp_path)
    for exercise in lab.exercises:
        text = exercise.reference.read_text(encoding="utf-8")
        notebook.answer(exercise.id, bodies.definition(text, exercise.name, exercise.path))
        assert exercise.copy_in(tmp_path).read_text(encoding="utf-8").count(exercise.message) == 0
        assert notebook._exercise(exercise.id).is_stub("") is False
    for exercise in lab.exercises:
        assert exercise.copy_in(tmp_path).read_text(encoding="utf-8") == exercise.reference.read_text(encoding="utf-8")


def test_a_cell_runs_the_learners_stage_and_grades_what_it_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notebook, "WORK", tmp_path)
    (tmp_path / "stage_a_naive").mkdir()
    (tmp_path / "stage_a_naive" / "__init__.py").touch()
    (tmp_path / "stage_a_naive" / "__main__.py").write_text("import sys; print('mine', sys.argv[1:])")
    notebook.run("stage_a_naive", "--raw")
    assert capsys.readouterr().out.strip() == "mine ['--raw']"
    asked = []
    monkeypatch.setattr(notebook, "_python", lambda *words: asked.append(words[2:]))
    notebook.grade("d.2", show=True)
    notebook.grade("D")
    assert asked == [("d", "--only", "D.2", "--show"), ("d",)]
