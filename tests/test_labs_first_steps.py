"""A student's first minutes in a fresh clone: from `make lab-a`, or a notebook, to a first exercise that passes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labs import bodies, notebook
from labs.exercises import ROOT, exercise_of, load_labs

# Hidden folders too: in one of them other tests write and remove files at the same time.
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "work", "pack", "results", "local", "*.png", "__pycache__", "*.egg-info"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone of the repository."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("fresh") / "clone", ignore=LEFT_OUT))


def make(clone: Path, *words: str) -> str:
    return run(clone, "make", "-C", str(clone), "VENV=", f"PYTHON={sys.executable}", *words)[0]


def run(clone: Path, *command: str, status: int = 0) -> tuple[str, str]:
    """What a command prints in the clone, on stdout and stderr."""
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def labs(clone: Path, module: str, *words: str, status: int = 0) -> tuple[str, str]:
    return run(clone, sys.executable, "-m", f"labs.{module}", *words, status=status)


def test_from_make_lab_a_to_a_first_green_exercise(clone):
    said = make(clone, "lab-a")
    assert "labs/lab_a.md" in said and "make grade-a ONLY=A.0" in said
    assert "not started" in make(clone, "grade-a", "ONLY=A.0")
    exercise = exercise_of("A.0")
    file = exercise.copy_in(clone / "labs" / "work")
    mine = bodies.transplant(file.read_text(), exercise.reference.read_text(), exercise.name, exercise.path)
    file.write_text(mine)
    assert "15/15  passed" in make(clone, "grade-a", "ONLY=A.0")
    assert "  A  ██" in make(clone, "progress")


def test_a_copy_that_is_there_ends_the_command_with_2_and_how_to_begin_again(clone):
    labs(clone, "starter", "a", "--force")
    said = labs(clone, "starter", "a", status=2)[1]
    assert (
        "labs/work/variants/floors.py\nNothing was written. `make lab-a FORCE=1`" in said and "stage_a_naive, " in said
    )


SLOW = "stage_b_decode_step, stage_d_paged, stage_e_batching, stage_f_graph_tp"


@pytest.mark.parametrize(("letter", "word", "yours"), [("g", "g", "beyond/serving"), ("p", "p", SLOW), ("e", "", "")])
def test_whose_code_runs_is_said(letter, word, yours, clone):
    shutil.rmtree(clone / "labs" / "work", ignore_errors=True)
    labs(clone, "starter", "a")  # of another lab, not done
    said = f"`make lab-{letter}` makes one"
    assert not word or said in labs(clone, "starter", "--show", word, status=2)[1]
    labs(clone, "starter", letter)
    for cache in ("beyond/__pycache__", "stage_a_naive/__pycache__"):  # as it is after a run
        (clone / "labs" / "work" / cache).mkdir(parents=True, exist_ok=True)
    said = labs(clone, "starter", "--show", *[word] * bool(word))[1]
    own = yours or "stage_a_naive, stage_d_paged, stage_e_batching"
    assert said == f"[lab] yours: {own}; every other stage is the reference\n"


WHERE = (
    "import beyond.serving, stage_e_batching, beyond.speculation; print(*(m.__path__[0] for m in "
    "(beyond.serving, stage_e_batching, beyond.speculation)), sep='\\n')"
)


def test_with_one_labs_letter_the_other_labs_are_the_references(clone):
    shutil.rmtree(clone / "labs" / "work", ignore_errors=True)
    for letter in "eg":
        labs(clone, "starter", letter)
    assert "every other stage is the reference" in labs(clone, "starter", "--show", "g")[1]
    work = clone / "labs" / "work"
    for path, ours in (((work / ".only" / "g", clone), [True, False, False]), ((work, clone), [True, True, False])):
        environment = {"PYTHONSAFEPATH": "1", "PYTHONPATH": ":".join(map(str, path))}
        found = run(clone, "env", *(f"{k}={v}" for k, v in environment.items()), sys.executable, "-c", WHERE)[0]
        assert [str(work) in line for line in found.splitlines()] == ours


def test_a_hint_says_how_many_are_left(clone):
    assert "no exercise was named; say `make hint D.3`" in labs(clone, "hint", status=2)[1]
    said = [labs(clone, "hint", "d.3")[0].splitlines()[-1].strip() for _ in exercise_of("D.3").hints]
    assert said[0] == f"({len(said) - 1} more: `make hint D.3` again)" and said[-1] == "(that was the last one)"


HASHES = """
from labs.report import LABS, hash_of_tests
for file in ("README.md", "tests/test_lab_a.py", "exercises.toml"):
    with (LABS / file).open("a") as more:
        more.write("# changed\\n")
    print(hash_of_tests("a"))
"""


def test_marks_of_other_exercises_or_other_tests_are_not_of_the_same_hash(clone):
    assert len(set(run(clone, sys.executable, "-c", HASHES)[0].split())) == 3


@pytest.mark.slow
def test_the_notebook_of_lab_a_does_the_same_with_nothing_but_the_repository(clone):
    cells = json.loads((clone / "labs" / "notebooks" / "lab_a.ipynb").read_text(encoding="utf-8"))["cells"]
    setup, first, *_ = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exercise = exercise_of("A.0")
    reference = bodies.definition(exercise.reference.read_text(), exercise.name, exercise.path)
    mine = re.sub("(?<='''\n).*?(?=''')", lambda _: reference, first, flags=re.DOTALL)
    assert mine != first and 'grade("A.0")' in mine
    shutil.rmtree(clone / "labs" / "work", ignore_errors=True)
    said, _ = run(clone, sys.executable, "-c", f"{setup}\n{mine}")
    assert "A.0" in said and "15/15  passed" in said


@pytest.mark.slow
def test_a_cell_runs_the_learners_stage_and_grades_what_it_names(clone):
    stage = clone / "labs" / "work" / "stage_a_naive"
    shutil.rmtree(stage, ignore_errors=True)
    labs(clone, "starter", "a", "--force")
    (stage / "__main__.py").write_text("import sys; print('mine', sys.argv[1:])")
    program = "from labs import notebook; notebook.run('stage_a_naive', '--raw'); "
    program += "notebook.grade('a.5', show=True); notebook.grade('A')"
    said, _ = run(clone, sys.executable, "-c", program)
    assert said.startswith("mine ['--raw']\n") and "A.5 not started: write answer_floor" in said
    assert said.count("not started") == 1 + len(load_labs()["a"].exercises)


@pytest.mark.parametrize("letter", load_labs())
def test_both_notebooks_are_made_from_the_handout_and_the_starter_with_equal_code(letter):
    code = []
    for edition in notebook.EDITIONS:
        written = (notebook.FOLDER / f"lab_{letter}{edition}.ipynb").read_text(encoding="utf-8")
        assert written == notebook.notebook(load_labs()[letter], edition), "run `python -m labs.notebook`"
        code.append([text for kind, text in notebook.cells_of(load_labs()[letter], edition) if kind == "code"])
    assert code[0] == code[1]
    for text in code[0]:
        compile(text, letter, "exec")


ANSWER = """
import sys
from labs import bodies, notebook
from labs.exercises import load_labs
lab = load_labs()[sys.argv[1]]
notebook.write_starter(lab, force=True)
for exercise in lab.exercises:
    text = exercise.reference.read_text(encoding="utf-8")
    notebook.answer(exercise.id, bodies.definition(text, exercise.name, exercise.path))
for exercise in lab.exercises:
    copy = exercise.copy_in(notebook.WORK).read_text(encoding="utf-8")
    assert copy == exercise.reference.read_text(encoding="utf-8") and exercise.message not in copy, exercise.id
"""


@pytest.mark.slow
@pytest.mark.parametrize("letter", load_labs())
def test_an_answer_from_a_cell_reaches_the_copy(letter, clone):
    run(clone, sys.executable, "-c", ANSWER, letter)
