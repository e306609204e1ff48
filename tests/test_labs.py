"""The labs: the starter misses exactly what it should, and the grader gives every point where it is due."""

from __future__ import annotations

import ast
import csv
import json
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from labs import batch, bodies, grade, hint, native, pack, progress, sandbox, similarity, starter, tree, values
from labs.exercises import LABS, ROOT, all_exercises, exercise_of, load_labs
from labs.judge import HUNG
from labs.mutants import load_mutations
from labs.report import Mark, Report
from labs.submission import intruders, read_answer

LETTERS = list(load_labs())
every_lab = pytest.mark.parametrize("letter", LETTERS)
every_exercise = pytest.mark.parametrize("exercise", all_exercises(), ids=lambda exercise: exercise.id)


# ---- the list ----------------------------------------------------------------------------------------------------


def test_there_are_enough_exercises_and_every_lab_adds_up_to_100_points():
    assert len(all_exercises()) >= 22
    for lab in load_labs().values():
        assert len(lab.exercises) >= 3 and lab.points == 100, lab.letter
        assert any(exercise.is_break_it for exercise in lab.exercises) == (lab.letter in "defgjkl")
        assert lab.letter == "p" or not any(exercise.slow for exercise in lab.exercises)
        share = sum(exercise.minutes for exercise in lab.exercises) / lab.points
        odd = [e.id for e in lab.exercises if not 0.58 < e.points * share / e.minutes < 1.75]
        assert odd == [], f"points and minutes of {odd} do not agree"
    assert any(exercise.path.endswith((".cu", ".cuh")) for exercise in load_labs()["c"].exercises)


@every_exercise
def test_the_function_and_its_tests_exist(exercise):
    text = exercise.reference.read_text(encoding="utf-8")
    span = bodies.find(text, exercise.name, exercise.path)
    assert span.body_end > span.body_start
    assert exercise.hints and exercise.title and exercise.points > 0 and exercise.minutes > 0
    driver = ast.parse((LABS / "tests" / f"test_lab_{exercise.lab}.py").read_text(encoding="utf-8"))
    classes = {node.name for node in driver.body if isinstance(node, ast.ClassDef)}
    assert {*exercise.tests} <= classes or exercise.is_break_it


@every_exercise
def test_the_handout_explains_the_exercise(exercise):
    handout = (LABS / f"lab_{exercise.lab}.md").read_text(encoding="utf-8")
    assert f"{exercise.id} " in handout
    if exercise.slow:  # where it is, is for the learner to find
        assert exercise.path.split("/")[-1] not in handout or f"`{exercise.name.split('.')[-1]}`" not in handout
    else:
        assert exercise.name.split(".")[-1] in handout
    assert "Every exercise fails at first" in handout


@every_exercise
def test_the_handout_says_how_long_an_exercise_takes_and_gives_an_example(exercise):
    handout = (LABS / f"lab_{exercise.lab}.md").read_text(encoding="utf-8")
    text = re.search(rf"^### {re.escape(exercise.id)} .*?(?=^##)", handout, flags=re.DOTALL | re.MULTILINE)[0]
    assert f"({exercise.points} points)" in text
    assert f"*About {exercise.minutes} minutes. Read: " in text
    assert "**Example.** " in text and "**By hand, before code.** " in text


def test_no_function_of_an_exercise_needs_its_class_by_super():
    for exercise in all_exercises():  # a method compiled for another class could not call super()
        if exercise.is_python:
            text = exercise.reference.read_text(encoding="utf-8")
            assert "super()" not in bodies.definition(text, exercise.name, exercise.path), exercise.id


@pytest.mark.parametrize("letter", load_mutations())
def test_a_mutation_applies(letter, tmp_path):
    for mutation in load_mutations()[letter]:
        assert mutation.apply((ROOT / mutation.file).read_text()) != (ROOT / mutation.file).read_text()
    file = tmp_path / mutation.file
    file.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutation.file, file)
    mutation.write(tmp_path, broken=True)
    assert not (tmp_path / mutation.file).exists(), "a test that reads the source must find none"


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
            original = reference.read_text(encoding="utf-8")
            copy = lab.copy_of(path, tmp_path).read_text(encoding="utf-8")
            for exercise in by_file.get(path, []):
                assert exercise.slow or exercise.message in bodies.definition(copy, exercise.name, path)
                copy = bodies.transplant(copy, original, exercise.name, path)
            assert copy == original, path
    assert (tmp_path / lab.prefix / "models" / "tutor").is_dir()


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
    text = before + "\n  auto s = \"}{\";  // }\n  if (x) { x = '{'; }\n}\n"
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
    assert native.launches_for_cpu(text) == (
        "gpu::launch([&] { k<T, 4>(p, 1); }, a, b, n * sizeof(T), s);\nextern uint4 m[];"
    )


# ---- every version of every lab ----------------------------------------------------------------------------------


def answers(kind: str, letter: str) -> list[dict[str, str]]:
    """Changes of the reference's functions that must lose (`wrong`) or keep (`right`) their points."""
    entries = tomllib.loads((Path(__file__).parent / f"lab_{kind}_answers.toml").read_text(encoding="utf-8"))
    found = [answer for answer in entries.get("answer", []) if answer["exercise"].startswith(letter.upper())]
    for exercise in load_labs()[letter].exercises:
        if exercise.slow and kind == "wrong":
            (find, put), *then = exercise.slow
            found.append(
                {"exercise": exercise.id, "why": "slow", "find": find, "put": f"{put}  ", "then": then}  # not as given
            )
    return found


def write_answer(answer: dict[str, str], work: Path) -> None:
    """A submission of one file, in which the reference's function is changed."""
    exercise = exercise_of(answer["exercise"])
    text = exercise.reference.read_text(encoding="utf-8")
    span = bodies.find(text, exercise.name, exercise.path)
    body, file = text[span.start : span.end], exercise.copy_in(work)
    if "body" in answer:
        head = text[span.start : span.body_start]
        body = head + textwrap.indent(answer["body"], span.indent) + text[span.body_end : span.end]
    for find, put in [(answer["find"], answer["put"]), *answer.get("then", [])] if "find" in answer else []:
        assert body.count(find) == 1, f"{exercise.id}: {find!r} is {body.count(find)} times in the reference"
        body = body.replace(find, put)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text[: span.start] + body + text[span.end :], encoding="utf-8")


def judge(keys: list[tuple[str, Path]], seed: int = 0, recorded: dict[str, list[str]] | None = None) -> list[Mark]:
    """The marks of exercises, or whole labs, of submissions, all judged in one process."""
    marks = []
    with grade.Judge(seed, recorded=recorded) as found:
        for key, work in keys:
            lab = load_labs()[key[0].lower()]
            exercises = [exercise for exercise in lab.exercises if key in (exercise.id, lab.letter)]
            marks.append(Mark(key, str(work), 1))
            found.enter(marks[-1], lab, exercises, work)
    return marks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("letter", "is_whole"),
    [
        *((letter, False) for letter in "ai"),  # the quick ones, and of each exercise one answer
        *(
            pytest.param(letter, True, marks=[pytest.mark.slow, *[pytest.mark.compiler] * (letter in "cf")])
            for letter in LETTERS
        ),
    ],
)
def test_reference_and_other_answers_get_what_they_deserve(letter, is_whole, tmp_path):
    lab = load_labs()[letter]
    starter.write_starter(lab, tmp_path / "reference", missing=[])
    keys = [(key, tmp_path / "reference") for key in [*(exercise.id for exercise in lab.exercises), letter]]
    others = [(kind, answer) for kind in ("wrong", "right") for answer in answers(kind, letter)]
    if not is_whole:
        others = list({answer["exercise"]: (kind, answer) for kind, answer in reversed(others)}.values())
    for number, (_, answer) in enumerate(others):
        write_answer(answer, tmp_path / str(number))
        keys.append((answer["exercise"], tmp_path / str(number)))
    marks = judge(keys)

    # The reference earns full marks, and the stage of which all is the learner's works.
    reference, others_marks = marks[: len(lab.exercises) + 1], marks[len(lab.exercises) + 1 :]
    assert {mark.id: mark.reason for mark in reference if mark.state != "passed"} == {}

    # Plausible wrong answers lose their points, with a reason; other right ones keep theirs.
    unjust = [
        f"{mark.id}, {kind}: {answer['why']} ({mark.state}: {mark.reason})"
        for (kind, answer), mark in zip(others, others_marks, strict=True)
        if mark.state != {"wrong": "failed", "right": "passed"}[kind] or (kind == "wrong" and not mark.reason)
    ]
    assert unjust == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "letter", [pytest.param(letter, marks=[pytest.mark.compiler] * (letter in "cf")) for letter in LETTERS]
)
def test_right_answers_are_right_with_other_inputs_too(letter, tmp_path):
    lab = load_labs()[letter]
    keys = [(exercise.id, tmp_path / exercise.id) for exercise in lab.exercises]
    for exercise, (_, work) in zip(lab.exercises, keys, strict=True):  # nothing else is handed in
        starter.write_starter(lab, work, missing=[other for other in lab.exercises if other is not exercise])
    for number, answer in enumerate(answers("right", letter)):
        write_answer(answer, tmp_path / str(number))
        keys.append((answer["exercise"], tmp_path / str(number)))
    marks = judge(keys, 12345, grade.values_of(lab, 12345))  # the reference's, from another process
    assert [f"{mark.id}: {mark.reason}" for mark in marks if mark.state != "passed"] == []


@every_lab
def test_a_fresh_starter_is_not_started(letter, tmp_path):
    lab = load_labs()[letter]
    starter.write_starter(lab, tmp_path)
    report = grade.grade(lab, tmp_path)
    assert {mark.state for mark in report.marks} == {"not started"} and report.points == 0 and report.notes == []


def test_every_exercise_has_a_wrong_answer():
    answered = {answer["exercise"] for letter in LETTERS for answer in answers("wrong", letter)}
    assert answered == {exercise.id for exercise in all_exercises()}


# ---- the grader --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner's copy of lab A with everything done."""
    work = tmp_path_factory.mktemp("done")
    starter.write_starter(load_labs()["a"], work, missing=[])
    return work


@pytest.mark.slow
def test_grading_the_reference_gives_100_points_and_runs_the_whole_stage(done, capsys):
    assert grade.main(["a", "--work", str(done)]) == 0
    table = capsys.readouterr().out
    assert "100/100" in table and "on the tutor: right" in table
    report = json.loads((done / "grade-a.json").read_text())
    assert report["points"] == report["max_points"] == 100
    assert [exercise["id"] for exercise in report["exercises"]] == [e.id for e in load_labs()["a"].exercises]


def submission(tmp_path: Path, letter: str, alone: bool = False, **bodies_by_name: str) -> Path:
    """A copy of the reference, or if `alone` the starter, in which functions, by their last name, have other bodies."""
    lab = load_labs()[letter]
    starter.write_starter(lab, tmp_path, missing=None if alone else [])
    for exercise in lab.exercises:
        if exercise.name.split(".")[-1] in bodies_by_name:
            file = exercise.copy_in(tmp_path)
            text = file.read_text(encoding="utf-8")
            span = bodies.find(text, exercise.name, exercise.path)
            lines = bodies_by_name[exercise.name.split(".")[-1]].splitlines()
            body = "".join(f"{span.indent}{line}\n" for line in lines)
            file.write_text(text[: span.body_start] + body + text[span.body_end :], encoding="utf-8")
    return tmp_path


def mark_of(key: str, work: Path) -> Mark:
    """The mark of one exercise of a submission."""
    [mark] = grade.grade(load_labs()[key[0].lower()], work, only=[key]).marks
    return mark


@pytest.mark.slow
def test_code_that_takes_the_process_down_or_hangs_costs_its_own_points_only(tmp_path):
    crash = (
        "from numpy.lib.stride_tricks import as_strided\nimport numpy\n"
        "return as_strided(numpy.zeros(1), (10**9,), (10**6,)).sum()"
    )
    work = submission(tmp_path, "a", chatml=crash, answer_floor="while True:\n    pass")
    report = grade.grade(load_labs()["a"], work, only=["A.1", "A.4"])
    assert [mark.state for mark in report.marks] == ["failed", "passed"] and report.whole == ""
    assert report.marks[0].reason == "it took the process down (SIGSEGV) in test_one_message", report
    [mark] = grade.grade(load_labs()["a"], work, only=["A.5"], seconds=1).marks
    assert mark.state == "failed" and "longer than 1 s" in mark.reason


@pytest.mark.slow
def test_a_syntax_error_costs_the_exercises_that_it_is_in(tmp_path):
    work = submission(tmp_path, "e", _grow="return (")
    report = grade.grade(load_labs()["e"], work, only=["E.4", "E.5"])
    [decodes, grow] = report.marks
    assert decodes.state == "passed", decodes.reason
    assert grow.state == "failed" and "SyntaxError" in grow.reason and "scheduler.py:" in grow.reason


@pytest.mark.slow
def test_a_method_in_a_file_that_is_indented_with_tabs_is_judged(tmp_path):
    file = submission(tmp_path, "e") / "stage_e_batching" / "scheduler.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r"^(?: {4})+", lambda spaces: "\t" * (len(spaces[0]) // 4), text, flags=re.MULTILINE))
    mark = mark_of("E.5", tmp_path)
    assert mark.state == "passed", mark.reason


def test_a_changed_signature_is_refused_with_the_one_that_was_given(tmp_path):
    work = submission(tmp_path, "a")
    file = work / "variants" / "floors.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("bandwidth: float)", "bandwidth: float = 1.0)"))
    mark = mark_of("A.5", work)
    line = text[: text.index("def answer_floor(")].count("\n") + 1
    assert mark.state == "failed" and mark.reason.startswith("the signature must stay as it is given: expected `def ")
    assert mark.reason.endswith(f" (variants/floors.py:{line})")


@pytest.fixture(scope="module")
def running_judge() -> Iterator[grade.Judge]:
    """One for the tests of lab A that need nothing special: starting one takes seconds."""
    with grade.Judge(7) as found:
        yield found


def test_given_code_is_the_references_and_a_change_is_named_with_file_and_line(tmp_path, running_judge):
    work = submission(tmp_path, "a")
    file = work / "stage_a_naive" / "chat.py"
    lines = file.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("import") or line.startswith("from"))
    lines.insert(at, "raise RuntimeError('given code of the submission ran')\n")
    file.write_text("".join(lines))
    report = running_judge.report(load_labs()["a"], work, ["A.1"])
    assert report.marks[0].state == "passed"
    assert report.notes == [f"stage_a_naive/chat.py:{at + 1}: given code was changed; the judge uses the reference's"]


@pytest.mark.slow
def test_what_would_take_over_the_judge_is_never_run_and_named(tmp_path, monkeypatch):
    work = submission(tmp_path, "a", chatml="return ''")
    monkeypatch.setenv("PYTHONPATH", str(work))
    for name in ("sitecustomize.py", "conftest.py", "labs/grade.py", "torch/__init__.py"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text("raise SystemExit('it ran')\n")
    report = grade.grade(load_labs()["a"], work, only=["A.1"])
    assert report.marks[0].state == "failed" and report.points == 0
    assert [note.split(":")[0] for note in report.notes] == ["sitecustomize.py", "conftest.py", "labs", "torch"]


ATTACKS = tomllib.loads((Path(__file__).parent / "lab_attacks.toml").read_text(encoding="utf-8"))


def forged(exercise: str, body: str, folder: Path) -> tuple[str, Path]:
    """A submission that has nothing but this body."""
    name = exercise_of(exercise).name.split(".")[-1]
    return exercise, submission(folder, exercise[0].lower(), alone=True, **{name: body})


@pytest.fixture(scope="module")
def marks_of_forgeries(tmp_path_factory: pytest.TempPathFactory, running_judge: grade.Judge) -> dict[str, Mark]:
    """The marks of forgeries of A.1."""
    works = {name: forged("A.1", body, tmp_path_factory.mktemp("f"))[1] for name, body in ATTACKS["forgeries"].items()}
    return {name: running_judge.report(load_labs()["a"], work, ["A.1"]).marks[0] for name, work in works.items()}


@pytest.mark.parametrize("name", ATTACKS["forgeries"])
def test_a_forgery_earns_nothing(name, marks_of_forgeries):
    assert marks_of_forgeries[name].state == "failed" and marks_of_forgeries[name].reason, marks_of_forgeries[name]


@pytest.mark.slow
@pytest.mark.compiler
def test_a_forgery_in_another_lab_earns_nothing(tmp_path):
    forgeries = ATTACKS["elsewhere"]
    marks = judge([forged(f["exercise"], f["body"], tmp_path / f["exercise"]) for f in forgeries], seed=7)
    paid = [(f["name"], mark) for f, mark in zip(forgeries, marks, strict=True) if mark.state != "failed"]
    assert paid == []


@pytest.mark.slow
def test_the_values_of_another_seed_earn_nothing(tmp_path):
    lab = load_labs()["a"]
    with grade.Judge(0) as public:
        public.expected(lab, ("TestChatPrompt",))
    lines = public.recorded["a.TestChatPrompt"][1:]
    told = f"import os\nfor line in {lines!r}:\n    os.write(3, (line + '\\n').encode())\nos._exit(0)"
    work = submission(tmp_path, "a", chatml=told)
    [known], [hidden] = judge([("A.1", work)], seed=0), judge([("A.1", work)], seed=7)
    assert known.state == "passed", "who knows all inputs beforehand can write down all values"
    assert hidden.state == "failed", "a grader's seed is new in every run"


def test_the_folder_of_an_answer_has_neither_the_references_body_nor_any_expected_value(tmp_path):
    exercise = exercise_of("A.1")
    work = submission(tmp_path / "work", "a", chatml="return 'mine'")
    [place] = tree.write(load_labs()["a"], tmp_path / "tree", [read_answer(exercise, work)])
    body = bodies.definition(exercise.reference.read_text(encoding="utf-8"), exercise.name, exercise.path).splitlines()[
        -1
    ]
    found = [
        file
        for file in (tmp_path / "tree").rglob("*")
        if file.is_file() and not file.is_relative_to(tmp_path / "tree" / "models")
    ]
    assert [file for file in found if body.strip().encode() in file.read_bytes()] == []
    assert not [file for file in found if file.parts[-2] in ("tests", "variants") and "test_labs" in file.name]
    assert not (tmp_path / "tree" / "stage_b_decode_step").exists() and not list(
        (tmp_path / "tree").glob("**/chat.*.pyc")
    )
    lines = (tmp_path / "tree" / exercise.path).read_text(encoding="utf-8").splitlines()
    assert lines[place.first - 1] == "    return 'mine'"
    theirs = exercise.copy_in(work).read_text(encoding="utf-8").splitlines()
    assert theirs[place.first + place.shift - 1] == "    return 'mine'" and place.shown == "stage_a_naive/chat.py"


def test_of_other_exercises_the_folder_has_what_the_driver_runs_and_what_was_handed_in(tmp_path):
    lab, judged = load_labs()["a"], exercise_of("A.7")
    work = submission(tmp_path / "work", "a", alone=True, generate="return ['mine']")
    tree.write(lab, tmp_path / "tree", tree.others(lab, [judged], work))
    found = {}
    for exercise in lab.exercises:
        text, reference = [(folder / exercise.path).read_text() for folder in (tmp_path / "tree", ROOT)]
        body = bodies.definition(text, exercise.name, exercise.path)
        kinds = {"reference": body in reference, "missing": exercise.message in body, "own": "['mine']" in body}
        found[exercise.id] = next(kind for kind, it_is in kinds.items() if it_is)
    expected = dict.fromkeys(found, "missing") | {"A.7": "reference", "A.2": "reference", "A.6": "own"}
    assert found == expected and judged.needs == ("A.2",)  # that of the judged one is put there by its answer


@pytest.mark.slow
def test_grading_one_exercise_leaves_the_marks_of_all_and_counts_as_progress(tmp_path, capsys):
    work = submission(tmp_path, "a", answer_floor="return 0")
    (work / "grade-a.json").write_text("all marks")
    (work / progress.FILE).write_text('{"A.1": "failed"}')
    assert grade.main(["a", "--work", str(work), "--only", "a.1"]) == 0
    assert "on the tutor" not in capsys.readouterr().out, "one exercise is not the whole stage"
    assert (work / "grade-a.json").read_text() == "all marks"
    assert progress.read(work) == {"A.1": "passed"}
    table = progress.table(work)
    assert "10/100" in table and "next: A.0" in table


@pytest.mark.slow
def test_show_prints_what_the_answer_prints_and_gives_no_mark(tmp_path, capfd):
    work = submission(tmp_path, "a", answer_floor="import os\nprint('here', num_prompt)\nreturn 0")
    assert grade.main(["a", "--work", str(work), "--only", "A.5", "--show"]) == 1
    out = capfd.readouterr().out
    assert "here 3\n" in out and "A.5 failed: weights of 1000 bytes" in out and not (work / progress.FILE).exists()


def test_show_says_what_is_missing_where_nothing_can_run(tmp_path, capfd):
    starter.write_starter(load_labs()["a"], tmp_path / "new")
    assert grade.main(["a", "--work", str(tmp_path / "new"), "--only", "A.5", "--show"]) == 1
    assert capfd.readouterr().out == "A.5 not started: write answer_floor in labs/work/variants/floors.py\n"
    work = submission(tmp_path / "wrong", "a", answer_floor="return (")
    assert grade.main(["a", "--work", str(work), "--only", "A.5", "--show"]) == 1
    printed = capfd.readouterr()
    assert printed.out.startswith("A.5 failed: ") and not printed.err


@pytest.mark.slow
@pytest.mark.compiler
def test_a_crash_in_cuda_on_a_cpu_is_named_with_its_line(tmp_path):
    work = submission(tmp_path, "c")
    file = work / "csrc" / "stage_c" / "mlp_warp.cu"
    text = file.read_text(encoding="utf-8")
    line = "      if (lane == 0) out[index] = from_float<T>(value);"
    assert text.count(line) == 1
    file.write_text(text.replace(line, line.replace("out[index]", "out[index + (size_t(1) << 40)]")), encoding="utf-8")
    mark = mark_of("C.6", work)
    number = text[: text.index(line)].count("\n") + 1
    assert f"SIGSEGV at csrc/stage_c/mlp_warp.cu:{number})" in mark.reason, mark


TENSOR = {"dtype": "float32", "shape": [2, 2], "values": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize(
    ("expected", "got", "how", "said"),
    [
        (2, 2, {}, ""),
        (2, 3, {}, "expected 2, got 3"),
        (1, True, {}, "expected 1, got True"),
        (True, 1, {}, "expected True, got 1"),
        (2.0, 2, {}, ""),
        (1.0, 1.0 + 1e-9, {}, ""),
        (1.0, 1.1, {}, "expected 1, got 1.1"),
        (1.0, 1.1, {"atol": 0.2, "rtol": 0}, ""),
        (float("nan"), float("nan"), {}, ""),
        (float("nan"), 0.0, {}, "expected nan, got 0"),
        (float("inf"), 1e300, {}, "expected inf, got 1e+300"),
        ("a", "b", {}, "expected 'a', got 'b'"),
        (None, 0, {}, "expected None, got 0"),
        ([1, [2, 3]], [1, [2, 3]], {}, ""),
        ([1, 2], [1], {}, "expected [1, 2], got [1]"),
        ([], {}, {}, "expected [], got {}"),
        (
            [*range(99)],
            [*range(50), 0, *range(51, 99)],
            {},
            "from place 50 on expected [50, 51, 52, 53, 54, 55], got [0, 51, ",
        ),
        (0.5, 0.9, {"most": 0.93}, ""),
        (0.5, 0.94, {"most": 0.93}, "expected at most 0.93, got 0.94"),
        (5, "5", {"least": 1, "most": 9}, "expected 1 to 9, got '5'"),
        (TENSOR, TENSOR, {}, ""),
        (TENSOR, [1, 2, 3, 4], {}, "expected a tensor [2, 2], got [1, 2, 3, 4]"),
        (TENSOR, TENSOR | {"dtype": "int64"}, {}, "expected the dtype float32, got 'int64'"),
        (TENSOR, TENSOR | {"values": [1.0]}, {}, "expected 4 numbers, got 1"),
        (TENSOR, TENSOR | {"values": [1.0, 2.0, 3.0, 5.0]}, {"error": 0.5}, ""),
        (
            TENSOR,
            TENSOR | {"values": [1.0, 2.0, 3.0, 5.0]},
            {"error": 0.1},
            "expected a relative error of at most 0.1, got 0.183",
        ),
        (7, 8, {"unsaid": 1}, "not what is counted in the slow copy, got 8"),
    ],
)
def test_the_first_difference_says_what_was_expected_and_what_came(expected, got, how, said):
    found = values.difference(expected, got, how)
    assert found.startswith(said) and bool(found) == bool(said), found


def lines_of(*lines: dict[str, object]) -> list[str]:
    return [json.dumps(line) for line in lines]


RIGHT = [
    {"test": "t"},
    {"label": "one", "value": 1, "how": {}},
    {"label": "two", "value": [2], "how": {}},
    {"seconds": 0.1},
]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (RIGHT, ""),
        ([*RIGHT[:2], {"label": "two", "value": [3], "how": {}}, RIGHT[3]], "two: expected [2], got [3]"),
        ([*RIGHT[:2], RIGHT[3]], "two: expected [2], got nothing"),
        ([RIGHT[0], *RIGHT[2:]], "one: expected 1, got nothing"),
        ([*RIGHT[:3], RIGHT[2], RIGHT[3]], "it sent more than the driver asks for"),
        ([*RIGHT[:2], {"label": "two", "value": [3], "how": {"most": 9}}, RIGHT[3]], "two: expected [2], got [3]"),
        ([*RIGHT[:2], {"error": "KeyError: 5", "frames": []}, RIGHT[3]], "KeyError: 5"),
        ([RIGHT[0], {"skip": "no compiler"}, RIGHT[3]], "one: expected 1, got nothing"),
        (RIGHT[:3], "it sent more"),
    ],
)
def test_a_test_has_passed_when_all_its_values_came_and_no_other(sent, reason):
    [expected], [got] = values.read(lines_of(*RIGHT)), values.read(lines_of(*sent))
    found = values.failure(expected, got)
    assert found.startswith(reason) and bool(found) == bool(reason), found


@pytest.mark.parametrize(
    "line", ["", "[]", "{", '{"label": "x"}', '{"error": 1}', "[" * 100_000, '{"test"', "9" * 9999]
)
def test_what_no_driver_writes_ends_what_is_read(line):
    assert [test.error for test in values.read([*lines_of(*RIGHT), line, *lines_of(*RIGHT)])] == ["", values.NO_DRIVER]


@pytest.mark.slow
def test_a_reason_names_the_line_of_the_learners_where_it_came_to_light(tmp_path):
    work = submission(tmp_path, "a", chatml="def inner():\n    return 1 / 0\nreturn inner()")
    file = work / "stage_a_naive" / "chat.py"
    file.write_text(f"# a line more\n{file.read_text()}")
    line = file.read_text().splitlines().index("        return 1 / 0") + 1
    assert mark_of("A.1", work).reason == f"ZeroDivisionError: division by zero (stage_a_naive/chat.py:{line})"


def test_hints_come_one_after_another(tmp_path):
    exercise = exercise_of("D.3")
    assert hint.next_hints("d.3", tmp_path) == [exercise.hints[0]]
    for _ in exercise.hints:
        found = hint.next_hints("D.3", tmp_path)
    assert found == list(exercise.hints)
    with pytest.raises(ValueError, match="no exercise 'D.99'"):
        hint.next_hints("D.99", tmp_path)


def test_a_stage_that_is_not_right_costs_ten_points_and_one_that_never_ends_half_of_the_lab():
    marks = [Mark("A.1", "one", 100, state="passed")]
    points = [Report("a", "title", marks, whole).points for whole in ("", "right", "wrong tokens", f"{HUNG} 120 s")]
    assert points == [100, 100, 90, 50]


@pytest.mark.slow
def test_points_are_all_or_nothing_or_on_request_in_proportion(tmp_path):
    work, target = submission(tmp_path, "a", answer_floor="return 0"), tmp_path / "marks.json"
    points = []
    for option in ([], ["--partial"]):
        assert grade.main(["a", "--work", str(work), "--only", "A.5", "--json", str(target), *option]) == 0
        points.append(json.loads(target.read_text())["points"])
    assert points[0] == 0 < points[1] < 10


@pytest.mark.slow
def test_another_seed_gives_other_inputs_and_the_last_bug_of_a_break_it(tmp_path):
    lab = load_labs()["d"]
    found = {}
    for seed in (0, 0, 7):
        with grade.Judge(seed) as fresh:
            fresh.expected(lab, ("TestVariant",))
            found.setdefault(seed, []).append(fresh.recorded["d.TestVariant"][:-1])
    strip = [[line for line in lines if "seconds" not in line] for lines in found[0]]
    assert strip[0] == strip[1] and strip[0] != [line for line in found[7][0] if "seconds" not in line]
    public, graded = (load_mutations(graded=graded) for graded in (False, True))
    assert all(graded[letter][:-1] == public[letter] for letter in public)


def test_what_cannot_be_graded_is_refused(tmp_path, capsys):
    assert grade.main(["d", "--work", str(tmp_path)]) == 2
    assert "`make lab-d` writes the starter" in capsys.readouterr().err
    (tmp_path / "stage_d_paged").mkdir()
    assert grade.main(["d", "--work", str(tmp_path), "--only", "D.99"]) == 2
    assert "no exercise D.99" in capsys.readouterr().err
    assert grade.main(["d", "--work", str(tmp_path), "--only", "D.1,D.2", "--show"]) == 2
    assert "SHOW=1 shows one exercise: ONLY=D.0" in capsys.readouterr().err


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
    assert '-m labs.grade d --only "D.2" --seed 7' in dry_run("grade-d", "ONLY=D.2", "SEED=7")
    assert '--only "D.2" --show' in dry_run("grade-d", "ONLY=D.2", "SHOW=1")
    assert "-m labs.hint D.3" in dry_run("hint", "D.3") and "-m labs.progress" in dry_run("progress")
    assert "-m labs.starter --show p\n" in dry_run("stage-f", "LAB=p")
    assert "labs/work/.only/g:" in dry_run("serve", "LAB=g") and "labs/work/.only/g:" in dry_run("bench", "LAB=g")
    assert "-m labs.submit d" in dry_run("submit", "LAB=d")
    assert "labs/work" in dry_run("stage-d", "LAB=1") and "labs" not in dry_run("stage-d").replace(str(ROOT), "")


def test_a_decorated_function_is_found_whole_in_a_file_that_does_not_parse():
    text = "def other(:\n\nclass C:\n    @staticmethod\n    @cache\n    def f(x):\n        return x\n\n    def g():\n"
    start, end = bodies.find_in_broken(text, "C.f")
    assert text[start:end].strip() == "@staticmethod\n    @cache\n    def f(x):\n        return x"


def test_what_was_kept_aside_is_no_intruder(tmp_path):
    for folder in (tmp_path / "old" / "a-20260101-000000", tmp_path / "stage_a_naive"):
        folder.mkdir(parents=True)
        (folder / "conftest.py").write_text("")
    assert intruders(tmp_path) == ["stage_a_naive/conftest.py: ignored; it would replace a module of the judge"]


def test_progress_names_the_next_exercise_of_a_lab_that_was_begun(tmp_path):
    assert "next: A.0" in progress.table(tmp_path)
    starter.write_starter(load_labs()["d"], tmp_path)
    assert "next: D.0" in progress.table(tmp_path)


def mark_from(expected: list[values.Test], outcome: grade.Outcome) -> Mark:
    """The mark that an outcome makes where these values are expected."""
    mark, lab = Mark("A.1", "", 10, partial=True), load_labs()["a"]
    fake = grade.Judge(recorded={"a.TestChatPrompt": []})
    fake.expected = lambda *_: expected
    fake.run = lambda *_, **__: outcome
    with fake:
        fake.enter(mark, lab, [exercise_of("A.1")], ROOT)
    return mark


def test_an_exercise_whose_tests_cannot_run_here_is_not_judged():
    skipped = values.read(lines_of({"test": "t"}, {"skip": "no C++ compiler"}, {"seconds": 0.1}))
    mark = mark_from(skipped, grade.Outcome([], "", []))
    assert (mark.state, mark.reason, mark.max_points) == ("not judged", "no C++ compiler", 10)


def test_tests_that_a_crash_kept_from_running_earn_no_part_of_the_points():
    expected = values.read(lines_of(*RIGHT * 4))
    mark = mark_from(expected, grade.Outcome(lines_of(*RIGHT * 2, *RIGHT[:2]), "SIGSEGV", []))
    assert (mark.state, mark.points, mark.reason) == ("failed", 5.0, "SIGSEGV in t")
    mark = mark_from(expected, grade.Outcome(lines_of(*RIGHT * 5), "", []))
    assert mark.state == "failed", "a test too many"


def test_a_judge_that_cannot_begin_ends_the_command_with_2(interpreter, done, capsys):
    interpreter("import sys; sys.exit('no torch')")
    assert grade.main(["a", "--work", str(done)]) == 2
    assert "(exit status 1): no torch" in capsys.readouterr().err


def test_a_judge_that_is_silent_is_ended(interpreter, done):
    interpreter("import time; time.sleep(600)")
    with pytest.raises(grade.JudgeError, match=r"\(SIGKILL\)"):
        grade.grade(load_labs()["a"], done, seconds=1 - grade.SILENCE)


# ---- for courses --------------------------------------------------------------------------------------------------


def test_a_report_has_the_forms_of_gradescope_and_otter():
    marks = [Mark("A.1", "one", 60, "passed", seconds=1.0), Mark("A.2", "two", 40, "failed", "got 1")]
    report = Report("a", "title", marks, "right", notes=["a note"], tests="abc")
    gradescope, otter = report.as_gradescope(), report.as_otter()
    assert gradescope["score"] == 60 and [test["score"] for test in gradescope["tests"]] == [60, 0]
    assert [test["output"] for test in gradescope["tests"]] == ["passed", "got 1"]
    assert gradescope["output"] == "whole stage: right\na note"
    assert {test["visibility"] for test in gradescope["tests"]} == {"visible"}, "no later grading has the same inputs"
    assert otter["total"] == 60 and otter["results"]["A.2"]["possible"] == 40 and otter["tests_hash"] == "abc"
    marks[1].partial, marks[1].num_tests, marks[1].num_passed = True, 4, 3
    assert report.points == 90 and report.as_json()["exercises"][1]["points"] == 30
    thirds = [Mark("A.1", "one", points, num_tests=3, num_passed=2, partial=True) for points in (10, 15, 25, 50)]
    assert Report("a", "title", thirds).points == 66.7 == round(sum(mark.points for mark in thirds), 9)


@pytest.mark.slow
def test_a_batch_grades_every_student_and_says_who_wrote_alike(tmp_path, capsys):
    odd = (
        "total = 0\nfor n in range(1, num_generated):\n    part = weight_bytes + (num_prompt + n) * kv_bytes\n"
        "    if part > 0 and bandwidth > 0:\n        total += part / bandwidth\nreturn total"
    )
    renamed = re.sub(r"\bn\b", "size", odd.replace("part", "read"))
    students = tmp_path / "submissions"
    for name, body in (("ada", odd), ("bob", renamed), ("cay", "return 0")):
        copy = submission(tmp_path / f"copy-{name}", "a", answer_floor=body)
        for path in ("variants/floors.py", "stage_a_naive/__init__.py"):
            (students / name / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(copy / path, students / name / path)
    with tarfile.open(students / "cay.tar.gz", "w:gz") as archive:
        archive.add(students / "cay", "cay")
    shutil.rmtree(students / "cay")
    (students / "dan.tar.gz").write_bytes(b"no archive")
    assert batch.main(["a", str(students), str(tmp_path / "results"), "--form", "gradescope"]) == 0
    with (tmp_path / "results" / "summary.csv").open() as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert [rows[name]["A.5"] for name in ("ada", "bob", "cay")] == ["10", "10", "0"]
    assert float(rows["ada"]["A.5 seconds"]) >= 0
    assert rows["dan"]["points"] == "0" and "cannot be unpacked" in rows["dan"]["problem"]
    assert json.loads((tmp_path / "results" / "ada.json").read_text())["tests"][5]["score"] == 10
    pairs = (tmp_path / "results" / "similarity.csv").read_text().splitlines()[1:]
    assert len(pairs) == 1 and pairs[0].startswith("A.5,ada,bob,")


def test_the_references_answer_is_no_sign_of_having_copied(done):
    assert similarity.similar_pairs(load_labs()["a"], {"ada": done, "bob": done}) == []


def test_a_batch_hands_its_options_to_the_judge_in_whatever_folder_it_is_run(tmp_path, monkeypatch):
    (tmp_path / "submissions" / "ada" / "stage_a_naive").mkdir(parents=True)
    monkeypatch.setattr(batch, "values_of", lambda lab, seed: {f"{lab.letter}.{seed}": []})
    asked = []

    def report(judge: grade.Judge, lab: object, work: Path) -> Report:
        asked.append((judge.seed, judge.walls, judge.recorded, work))
        return Report("a", "title", [Mark("A.1", "one", 10, "failed", num_tests=4, num_passed=2)])

    monkeypatch.setattr(grade.Judge, "report", report)
    monkeypatch.chdir(tmp_path)
    assert batch.main(["a", "submissions", "results", "--partial", "--seed", "5"]) == 0
    assert asked == [(5, sandbox.walls(), {"a.5": []}, tmp_path / "submissions" / "ada")]
    assert "ada,5.0," in (tmp_path / "results" / "summary.csv").read_text()


@pytest.mark.slow
def test_a_judge_serves_one_student_after_another_and_runs_nothing_after_its_deadline(tmp_path, done):
    wrong = submission(tmp_path, "a", chatml="return 0")
    with grade.Judge(5) as judge:
        reports = [judge.report(load_labs()["a"], work, ["A.1"]) for work in (wrong, done)]
        assert [report.points for report in reports] == [0, 10]
        judge.deadline = 0.0
        with pytest.raises(grade.JudgeError, match="no time left"):
            judge.report(load_labs()["a"], done, ["A.1"])


# A compiler that notes which files it was given, and has another process compile the same while it does.
COMPILER = """
import os, pathlib, subprocess, sys
if "--version" in sys.argv:
    sys.exit()
own = pathlib.Path(next(word[2:] for word in sys.argv if word.startswith("-I" + os.environ["SIX_ENGINES_BUILD"])))
files, said = [str(file) for file in own.rglob("*") if file.is_file()], pathlib.Path(os.environ["SAID"])
first = not said.exists()
with said.open("a") as log:
    print(*files, file=log)
if first:
    subprocess.run([PYTHON, "-c", "from labs import native; native.cuda_library()"], cwd=ROOT, check=True)
assert all(map(os.path.isfile, files))
subprocess.run(["c++", "-shared", "-x", "c++", os.devnull, "-o", sys.argv[sys.argv.index("-o") + 1]], check=True)
"""


@pytest.mark.slow
@pytest.mark.compiler
def test_judges_that_compile_the_same_answer_at_once_write_no_file_of_one_another(tmp_path, monkeypatch):
    compiler, said = tmp_path / "compiler", tmp_path / "said"
    compiler.write_text(f"#!{sys.executable}\nPYTHON, ROOT = {sys.executable!r}, {str(ROOT)!r}\n{COMPILER}")
    compiler.chmod(0o755)
    for name, value in {"SIX_ENGINES_BUILD": tmp_path / "build", "CXX": compiler, "SAID": said}.items():
        monkeypatch.setenv(name, str(value))
    native.cuda_library()
    native.cuda_library()
    first, second = (set(line.split()) for line in said.read_text().splitlines())  # and no third time
    assert first and second and not first & second


def test_nobody_knows_the_seed_of_a_run_beforehand():
    assert len({batch.new_seed() for _ in range(9)}) == 9 and all(batch.new_seed() for _ in range(9))


def test_every_written_question_has_a_model_answer():
    text = (pack.TEMPLATES / "question_answers.md").read_text()
    answers = dict(re.findall(r"^## Lab (.)\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE))
    for letter in load_labs():
        handout, answered = (pack.LABS / f"lab_{letter}.md").read_text(), answers.pop(letter.upper())
        questions = handout.partition("\n## Questions\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\d\.", answered, re.MULTILINE) == re.findall(r"^\d\.", questions, re.MULTILINE) != []
        assert ("**Prediction.**" in answered) == ("## Predict" in handout)
        exercises = handout.split("\n### ")[1:]
        # A question that the handout does not answer itself, in parentheses: its paragraph ends with it.
        open_end = re.compile(r"By hand, before code(?:.|\n(?!\n))*[?.]\n\n")
        asked = [text.split()[0] for text in exercises if open_end.search(f"{text}\n\n")]
        assert re.findall(rf"\b({letter.upper()}\.\d+):", answered) == asked
    assert not answers


def test_the_pack_has_answers_and_rubrics(tmp_path):
    written = {path.name for path in pack.write_pack(tmp_path)}
    assert written >= {"policies.md", *(f"rubric_{letter}.md" for letter in LETTERS)}
    assert "def allocate" in (tmp_path / "answers_d.md").read_text()
