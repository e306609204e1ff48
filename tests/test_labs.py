"""The labs: the starter misses exactly what it should, and the grader gives every point where it is due."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_driver import wrong_answers

from labs import bodies, grade, starter
from labs.exercises import LABS, ROOT, all_exercises, load_labs
from labs.grade import PUBLIC_TESTS
from labs.mutants import load_mutations
from labs.native import launches_for_cpu

LETTERS = list(load_labs())
every_lab = pytest.mark.parametrize("letter", LETTERS)
# The answers to lab C are compiled for the CPU.
every_judged_lab = pytest.mark.parametrize(
    "letter", [pytest.param(letter, marks=pytest.mark.compiler if letter == "c" else ()) for letter in LETTERS]
)
every_exercise = pytest.mark.parametrize("exercise", all_exercises(), ids=lambda exercise: exercise.id)


# ---- the list ----------------------------------------------------------------------------------------------------


def test_there_are_enough_exercises_and_every_lab_adds_up_to_100_points():
    assert len(all_exercises()) >= 22
    for lab in load_labs().values():
        assert len(lab.exercises) >= 3 and lab.points == 100, lab.letter
        assert (lab.exercises[-1].is_break_it) == (lab.letter in "def")
    assert any(exercise.path.endswith((".cu", ".cuh")) for exercise in load_labs()["c"].exercises)


@every_exercise
def test_the_function_and_its_tests_exist(exercise):
    text = exercise.reference.read_text(encoding="utf-8")
    span = bodies.find(text, exercise.name, exercise.path)
    assert span.body_end > span.body_start
    assert exercise.hint and exercise.title and exercise.points > 0
    for test in exercise.tests:
        file, cls = test.split("::")
        tree = ast.parse((PUBLIC_TESTS / file).read_text(encoding="utf-8"))
        assert cls in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


@every_exercise
def test_the_handout_explains_the_exercise(exercise):
    handout = (LABS / f"lab_{exercise.lab}.md").read_text(encoding="utf-8")
    assert f"{exercise.id} " in handout and exercise.name.split(".")[-1] in handout
    assert "Every exercise fails at first" in handout


def test_no_function_of_an_exercise_needs_its_class_by_super():
    for exercise in all_exercises():  # a method compiled for another class could not call super()
        if exercise.is_python:
            text = exercise.reference.read_text(encoding="utf-8")
            assert "super()" not in bodies.definition(text, exercise.name, exercise.path), exercise.id


@pytest.mark.parametrize("letter", load_mutations())
def test_a_mutation_applies(letter, tmp_path):
    mutation = load_mutations()[letter]
    mutation.write(tmp_path)
    assert (tmp_path / mutation.file).read_text() != (ROOT / mutation.file).read_text()


# ---- the starter -------------------------------------------------------------------------------------------------


@every_lab
def test_the_starter_is_the_reference_but_for_the_listed_bodies(letter, tmp_path):
    lab = load_labs()[letter]
    starter.write_starter(lab, tmp_path)
    by_file: dict[str, list] = {}
    for exercise in lab.exercises:
        by_file.setdefault(exercise.path, []).append(exercise)
    for folder in lab.folders:
        for reference in (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".cpp")):
            path = str(reference.relative_to(ROOT))
            original, copy = reference.read_text(encoding="utf-8"), (tmp_path / path).read_text(encoding="utf-8")
            for exercise in by_file.get(path, []):
                assert exercise.message in bodies.definition(copy, exercise.name, path)
                copy = bodies.transplant(copy, original, exercise.name, path)
            assert copy == original, path
    assert (tmp_path / "models" / "tutor").is_dir()


def test_a_stub_keeps_decorators_signature_and_docstring():
    head = '@cache\ndef f(\n    x: int,  # the number\n) -> int:  # why\n    """What it is."""\n'
    text = head + "    # how\n    return x + 1\n"
    stub = bodies.stub(text, "f", "file.py", "Lab X.1: f")
    assert stub == head + '    raise NotImplementedError("Lab X.1: f")\n'


def test_a_stub_without_docstring_keeps_the_signature():
    text = "class A:\n    def f(self, x):  # fmt: skip\n        # first\n        y = x\n        return y\n\n    z = 1\n"
    stub = bodies.stub(text, "A.f", "file.py", "m")
    assert stub == 'class A:\n    def f(self, x):  # fmt: skip\n        raise NotImplementedError("m")\n\n    z = 1\n'


def test_braces_are_matched_past_comments_strings_and_calls():
    before = "int f(int x);\nint g() { return f(1); }\n// f() {\nint f(int x) {"
    text = before + '\n  auto s = "}{";  // }\n  if (x) { x = \'{\'; }\n}\n'
    stub = bodies.stub(text, "f", "file.cu", "m")
    assert stub == before + '\n  static_assert(false, "m");\n}\n'
    with pytest.raises(bodies.BodyNotFound):
        bodies.find(text, "h", "file.cu")


def test_the_starter_overwrites_nothing_without_force_and_keeps_the_old_copy_with_it(tmp_path):
    lab = load_labs()["a"]
    starter.write_starter(lab, tmp_path)
    mine = tmp_path / "stage_a_naive" / "chat.py"
    mine.write_text("my work")
    with pytest.raises(starter.AlreadyThere):
        starter.write_starter(lab, tmp_path)
    assert mine.read_text() == "my work"
    starter.write_starter(lab, tmp_path, force=True)
    assert "Lab A.1" in mine.read_text()
    [kept] = (tmp_path / "old").glob("*/stage_a_naive/chat.py")
    assert kept.read_text() == "my work"


def test_launches_are_rewritten_for_the_cpu():
    text = "k<T, 4><<<a, b, n * sizeof(T), s>>>(p, 1);\nextern __shared__ uint4 m[];"
    assert launches_for_cpu(text) == (
        "cuda_on_cpu::launch([&] { k<T, 4>(p, 1); }, a, b, n * sizeof(T), s);\nextern uint4 m[];"
    )


# ---- every version of every lab ----------------------------------------------------------------------------------


def drive(letter: str, folder: Path) -> dict[str, object]:
    """What the driver finds out about a lab, in a process of its own."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    out = folder / f"{letter}.json"
    command = [sys.executable, str(Path(__file__).parent / "lab_driver.py"), letter, str(out)]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert out.exists(), run.stdout[-2000:] + run.stderr[-2000:]
    return json.loads(out.read_text())


@every_judged_lab
def test_reference_starters_and_wrong_answers_get_what_they_deserve(letter, tmp_path):
    found = drive(letter, tmp_path)

    # The reference earns full marks.
    assert list(found["reference"]) == [exercise.id for exercise in load_labs()[letter].exercises]
    assert {i: mark for i, mark in found["reference"].items() if mark["state"] != "passed"} == {}

    # A missing body fails in its exercise, and only there.
    for missing, marks in found["stubs"].items():
        states = {i: mark["state"] for i, mark in marks.items()}
        assert states == dict.fromkeys(states, "passed") | {missing: "not started"}

    # Plausible wrong answers lose their points, with a reason.
    assert len(found["wrong"]) == len(wrong_answers(letter)) > 0
    kept = [f"{answer['exercise']}: {answer['why']}" for answer in found["wrong"] if answer["state"] != "failed"]
    assert kept == []
    assert all(answer["reason"] for answer in found["wrong"])


def test_many_exercises_have_a_wrong_answer():
    assert len({answer["exercise"] for letter in LETTERS for answer in wrong_answers(letter)}) >= 10


# ---- the grader --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner's copy of lab A with everything done."""
    work = tmp_path_factory.mktemp("done")
    starter.write_starter(load_labs()["a"], work, missing=[])
    return work


def test_grading_the_reference_gives_100_points_and_runs_the_whole_stage(done, capsys):
    assert grade.main(["a", "--work", str(done)]) == 0
    table = capsys.readouterr().out
    assert "100/100" in table and "on the tutor: right" in table
    report = json.loads((done / "grade-a.json").read_text())
    assert report["points"] == report["max_points"] == 100
    assert [exercise["id"] for exercise in report["exercises"]] == [e.id for e in load_labs()["a"].exercises]


def test_code_that_takes_the_process_down_costs_its_own_points_only(tmp_path):
    lab = load_labs()["a"]
    starter.write_starter(lab, tmp_path, missing=[lab.exercises[0], lab.exercises[4]])
    file = tmp_path / "stage_a_naive" / "chat.py"
    file.write_text(file.read_text().replace("raise NotImplementedError(", "__import__('os').abort(), ("))
    report = grade.grade(lab, tmp_path)
    states = {mark.id: mark.state for mark in report.marks}
    assert states == dict.fromkeys(states, "passed") | {"A.1": "failed", "A.5": "not started"}
    assert "took the process down" in report.marks[0].reason
    assert report.points == 80 and report.whole == ""
    assert "-> write overlap in labs/work/stage_a_naive/stop_strings.py" in str(report)


def test_code_that_cannot_be_imported_is_named(tmp_path):
    lab = load_labs()["a"]
    starter.write_starter(lab, tmp_path, missing=[])
    (tmp_path / "stage_a_naive" / "chat.py").write_text("def chatml(:\n")
    report = grade.grade(lab, tmp_path, only=["A.2"])
    [mark] = report.marks
    assert mark.state == "failed" and "chat.py" in mark.reason and "SyntaxError" in mark.reason


def test_hidden_tests_must_pass_too(done, tmp_path):
    hidden = "class TestOverlap:\n    def test_hidden(self):\n        assert 0, 'hidden'\n"
    (tmp_path / "test_lab_a.py").write_text(hidden)
    report = grade.grade(load_labs()["a"], done, only=["A.1", "A.5"], extra_tests=tmp_path)
    assert [(mark.state, mark.reason) for mark in report.marks] == [("passed", ""), ("failed", "hidden")]


def test_what_cannot_be_graded_is_refused(tmp_path, capsys):
    assert grade.main(["d", "--work", str(tmp_path)]) == 2
    assert "`make lab-d` writes the starter" in capsys.readouterr().err
    (tmp_path / "stage_d_paged").mkdir()
    assert grade.main(["d", "--work", str(tmp_path), "--only", "D.99"]) == 2
    assert "no exercise D.99" in capsys.readouterr().err
    assert grade.main(["d", "--work", str(tmp_path), "--tests", str(tmp_path)]) == 2
    assert "has no test_lab_d.py" in capsys.readouterr().err


def test_a_submission_from_another_machine_finds_this_ones_tutor(tmp_path):
    (tmp_path / "models").symlink_to(tmp_path / "not" / "here", target_is_directory=True)
    starter.link_models(tmp_path)
    assert (tmp_path / "models" / "tutor").is_dir()


def test_make_passes_the_options_on():
    def dry_run(*words: str) -> str:
        command = ["make", "-n", "-C", str(ROOT), "VENV=", "PYTHON=python3", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "-m labs.starter d --force" in dry_run("lab-d", "FORCE=1")
    assert "--force" not in dry_run("lab-d")
    assert '-m labs.grade d --only "D.2" --tests "hidden"' in dry_run("grade-d", "ONLY=D.2", "LAB_TESTS=hidden")
    assert "labs/work" in dry_run("stage-d", "LAB=1") and "labs" not in dry_run("stage-d").replace(str(ROOT), "")
