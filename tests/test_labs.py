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
from pathlib import Path

import pytest

from labs import batch, bodies, grade, hint, native, pack, progress, recorder, sandbox, similarity, starter
from labs.audit import find_forbidden
from labs.exercises import LABS, ROOT, all_exercises, exercise_of, load_labs
from labs.grade import PUBLIC_TESTS, enter, job_for
from labs.mutants import load_mutations
from labs.recorder import expected_and_got
from labs.report import HUNG, Mark, Report
from labs.submission import intruders, read_answer

LETTERS = list(load_labs())
every_lab = pytest.mark.parametrize("letter", LETTERS)
every_exercise = pytest.mark.parametrize("exercise", all_exercises(), ids=lambda exercise: exercise.id)


# ---- the list ----------------------------------------------------------------------------------------------------


def test_there_are_enough_exercises_and_every_lab_adds_up_to_100_points():
    assert len(all_exercises()) >= 22
    for lab in load_labs().values():
        assert len(lab.exercises) >= 3 and lab.points == 100, lab.letter
        assert any(exercise.is_break_it for exercise in lab.exercises) == (lab.letter in "defgjk")
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
    for test in exercise.tests:
        file, cls = test.split("::")
        tree = ast.parse((PUBLIC_TESTS / file).read_text(encoding="utf-8"))
        assert cls in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


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


def judge(keys: list[tuple[str, Path]]) -> list[Mark]:
    """The marks of exercises, or whole labs, of submissions, all judged in one process."""
    marks = []
    for (key, work), lines in zip(keys, grade.judge([job_for(k, w, [PUBLIC_TESTS]) for k, w in keys]), strict=True):
        marks.append(Mark(key, str(work), 1))
        enter(lines, marks[-1])
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


def submission(tmp_path: Path, letter: str, **bodies_by_name: str) -> Path:
    """A copy of the reference in which some functions have other bodies, named by their last name."""
    lab = load_labs()[letter]
    starter.write_starter(lab, tmp_path, missing=[])
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
    assert report.marks[0].reason == "it took the process down (SIGSEGV) in test_one_message"
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


def test_given_code_is_the_references_and_a_change_is_named_with_file_and_line(tmp_path):
    work = submission(tmp_path, "a")
    file = work / "stage_a_naive" / "chat.py"
    lines = file.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("import") or line.startswith("from"))
    lines.insert(at, "raise RuntimeError('given code of the submission ran')\n")
    file.write_text("".join(lines))
    report = grade.grade(load_labs()["a"], work, only=["A.1"])
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


@pytest.mark.parametrize("body", ATTACKS["forgeries"].values(), ids=ATTACKS["forgeries"])
def test_a_forged_mark_earns_nothing_and_is_named(body, tmp_path):
    mark = mark_of("A.1", submission(tmp_path, "a", chatml=body))
    assert mark.state == "failed" and mark.reason.startswith("not allowed: "), mark


@pytest.mark.parametrize("body", ATTACKS["right"])
def test_the_audit_leaves_right_answers_alone(body):
    source = "def f(x, name):\n" + textwrap.indent(body, "    ")
    assert find_forbidden(source, exercise_of("A.2")) is None


@every_lab
def test_the_audit_leaves_right_variants_alone(letter, tmp_path):
    for answer in answers("right", letter):
        write_answer(answer, tmp_path)
        assert read_answer(exercise_of(answer["exercise"]), tmp_path) is not None


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("getattr(torch, 'o' + 's')", "the module torch as a value, write the names that you need of it"),
        ("torch.hub._get_torch_home()", "the private name _get_torch_home of the module torch"),
    ],
)
def test_a_module_that_the_file_has_imported_is_for_the_public_names_in_it(expression, said):
    what, line = find_forbidden(f"def f(x):\n    return {expression}\n", exercise_of("A.2"))
    assert what.startswith(said) and line == 2


@every_exercise
def test_the_reference_does_nothing_that_an_answer_may_not(exercise, tmp_path):
    target = exercise.copy_in(tmp_path)
    target.parent.mkdir(parents=True)
    target.write_text(exercise.reference.read_text(encoding="utf-8"), encoding="utf-8")
    assert read_answer(exercise, tmp_path).exercise is exercise


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
    assert "here 3\n" in out and "assert" in out and not (work / progress.FILE).exists()


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


@pytest.mark.parametrize(
    ("assertion", "said"),
    [
        ("it has 1 block\nassert 1 == 2\n +  where", "it has 1 block: expected 2, got 1"),
        ("assert [1] == [2]", "expected [2], got [1]"),
        ("2 wanted, got 1\nassert 1 == 2", "2 wanted, got 1"),
        ("no number\nassert False", "no number"),
        ("assert (f(1) == [2] and True)", "expected [2], got f(1)"),
        ("a mask\nassert (f(1) == 2)", "a mask: expected 2, got f(1)"),
        ("assert (None is not None and 3 == 4)", "expected 4, got 3"),
        ("it is NaN\nassert (2 == 2 and not True)", "it is NaN"),
    ],
)
def test_a_reason_says_what_was_expected_and_what_came(assertion, said):
    assert expected_and_got(assertion) == said


def test_a_reason_names_the_line_of_the_learners_where_it_came_to_light(tmp_path):
    code: dict[str, object] = {}
    exec(compile("def f():\n    return 1 / 0\ndef g():\n    return f()\n", str(tmp_path / "a.py"), "exec"), code)
    with pytest.raises(ZeroDivisionError) as caught:
        code["g"]()
    assert recorder.reason_of(caught.value, tmp_path) == "ZeroDivisionError: division by zero (a.py:2)"


def test_an_answer_takes_the_references_place_in_every_module_that_imported_it(tmp_path):
    starter.write_starter(load_labs()["d"], tmp_path, missing=[])
    program = """
from labs import judge
from labs.exercises import exercise_of
from labs.submission import read_answer
from stage_d_paged import layers, model
reference = layers.rotate
judge.install(read_answer(exercise_of("D.1"), judge.Path(sys.argv[1])))
assert model.rotate is layers.rotate is not reference
print(model.rotate.__code__.co_filename)
"""
    command = [sys.executable, "-c", f"import sys\n{program}", str(tmp_path)]  # its own process: it changes modules
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(tmp_path / "stage_d_paged" / "layers.py")


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
def test_hidden_tests_must_pass_too(done, tmp_path):
    hidden = "class TestFloor:\n    def test_hidden(self):\n        assert 0, 'hidden'\n"
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
    assert '-m labs.grade d --only "D.2" --tests "hidden"' in dry_run("grade-d", "ONLY=D.2", "LAB_TESTS=hidden")
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


@pytest.mark.parametrize("call", ['system("ls")', "#include <fstream>"])
def test_what_is_forbidden_in_cuda_is_named_with_its_line(call):
    exercise = next(e for e in load_labs()["c"].exercises if not e.is_python)
    allowed = "\n  /* to system()\n  is no call */\n#pragma unroll\n  for (;;) {}\n"
    assert find_forbidden(allowed, exercise) is None
    assert find_forbidden(f"{allowed}{call}\n", exercise) == (f"`{call}`", 6)


@pytest.mark.parametrize("indent", ["", "    "])
def test_what_is_forbidden_is_named_with_its_line(indent):
    source = "".join(f"{indent}{line}\n" for line in ("def f():", "    x = 1", "    import os"))
    exercise = exercise_of("A.1")
    assert find_forbidden(source, exercise) == ("import of os", 3)


def entered(
    expected: list[str], ended: list[dict[str, str]], *last: dict[str, str], started: int | None = None
) -> Mark:
    """The mark that a judge's lines make: of the tests that were expected, those that ended, and how it went on."""
    mark = Mark("A.1", "", 10, partial=True)
    ends = [{"event": "end", "state": "passed", "reason": "", "seconds": 0.1} | end for end in ended]
    starts = [{"event": "start", "test": "test_last"}] * (len(ends) if started is None else started)
    enter([{"event": "expected", "tests": expected}, *starts, *ends, *last], mark)
    return mark


DONE = {"event": "done"}, {"event": "ended", "reason": ""}


def test_an_exercise_whose_tests_cannot_run_here_is_not_judged():
    skipped = {"test": "t", "state": "skipped", "reason": "no C++ compiler"}
    mark = entered(["t", "t"], [{"test": "t"}, skipped], *DONE)
    assert (mark.state, mark.reason, mark.max_points) == ("not judged", "no C++ compiler", 10)


def test_tests_that_a_crash_kept_from_running_earn_no_part_of_the_points():
    mark = entered(["t"] * 4, [{"test": "t"}] * 2, {"event": "ended", "reason": "SIGSEGV"}, started=3)
    assert (mark.state, mark.points, mark.reason) == ("failed", 5.0, "SIGSEGV in test_last")


@pytest.mark.parametrize("ran", [["test_one"], ["test_two", "test_one"], ["test_one", "test_two", "test_two"]])
def test_only_the_tests_that_judge_an_exercise_earn_its_points(ran):
    mark = entered(["test_one", "test_two"], [{"test": test} for test in ran], *DONE, started=0)
    assert mark.state == "failed" and mark.points == (5 if ran == ["test_one"] else 0), mark


def test_a_line_counts_for_the_job_whose_nonce_it_has_and_whose_turn_it_is(interpreter):
    interpreter("""
import json, sys
_, x, y = sys.stdin.read().splitlines()
forged = ["A.1 {x} end", "A.2 {x} ended", "A.1 {y} ended", "[1]", "no json"]
for line in ["A.1 {x} expected", *forged[1:], "A.1 {x} ended", *forged, "A.2 {y} expected", "A.2 {y} ended"]:
    words = line.format(x=x, y=y).split()
    print(json.dumps(dict(zip(["job", "nonce", "event"], words))) if len(words) == 3 else line)
""")
    found = grade.judge([job_for(key, ROOT, [PUBLIC_TESTS]) for key in ("A.1", "A.2")])
    assert [[line["event"] for line in lines] for lines in found] == [["expected", "ended"]] * 2


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
    marks = [Mark("A.1", "one", 60, "passed", seconds=1.0), Mark("A.2", "two", 40, "failed", "got 1", hidden=True)]
    report = Report("a", "title", marks, "right", notes=["a note"], tests="abc")
    gradescope, otter = report.as_gradescope(), report.as_otter()
    assert gradescope["score"] == 60 and [test["score"] for test in gradescope["tests"]] == [60, 0]
    assert [test["output"] for test in gradescope["tests"]] == ["passed", "got 1"]
    assert gradescope["output"] == "whole stage: right\na note"
    assert [test["visibility"] for test in gradescope["tests"]] == ["visible", "after_published"]
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


def test_a_batch_hands_its_options_to_the_grader_in_whatever_folder_it_is_run(tmp_path, monkeypatch, interpreter):
    (tmp_path / "submissions" / "ada").mkdir(parents=True)
    (tmp_path / "hidden tests").mkdir()
    said = tmp_path / "said"
    interpreter(f"""
import json, os, sys
print(json.dumps([sys.argv, os.environ["SIX_ENGINES_LAB_SEED"]]), file=open({str(said)!r}, "a"))
sys.exit("error: no")
""")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("x\n")
    options = ["--tests", "hidden tests", "--partial", "--seed-secret", "secret"]
    assert batch.main(["a", "submissions", "results", *options]) == 0
    words, seed = json.loads(said.read_text())
    assert words[words.index("--tests") + 1] == str(tmp_path / "hidden tests") and "--partial" in words
    assert ("--sandbox" in words) == (sandbox.why_not() == "")
    assert seed == str(batch.student_seed("ada", "x"))
    assert "error: no" in (tmp_path / "results" / "summary.csv").read_text()


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


def test_every_student_has_seeds_of_their_own():
    seeds = [batch.student_seed(student, secret) for student in ("ada", "bob") for secret in ("x", "y")]
    assert len(set(seeds)) == 4 and batch.student_seed("ada", "x") == seeds[0]


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


def test_the_pack_has_answers_rubrics_and_hidden_tests(tmp_path):
    written = {path.name for path in pack.write_pack(tmp_path)}
    assert written >= {
        "policies.md",
        *(f"{x}_{y}.{z}" for y in LETTERS for x, z in (("rubric", "md"), ("test_lab", "py"))),
    }
    assert "def allocate" in (tmp_path / "answers_d.md").read_text()


@pytest.mark.slow
@pytest.mark.compiler
def test_the_reference_passes_the_hidden_tests_of_every_lab(tmp_path, monkeypatch):
    pack.write_pack(tmp_path / "pack")
    monkeypatch.setenv("SIX_ENGINES_LAB_SEED", "12345")
    hidden = tmp_path / "pack" / "hidden"
    hidden_of = {
        exercise.id: [test for test in exercise.tests if f"class {test.split('::')[1]}:" in text]
        for lab in load_labs().values()
        for text in [(hidden / f"test_lab_{lab.letter}.py").read_text()]
        for exercise in lab.exercises
    }
    keys = [key for key, tests in hidden_of.items() if tests]
    assert {key[0].lower() for key in keys} == {*load_labs()}, "each lab has hidden tests"
    for letter in load_labs():
        starter.write_starter(load_labs()[letter], tmp_path / letter, missing=[])
    jobs = [job_for(key, tmp_path / key[0].lower(), [hidden]) for key in keys]
    for lines, key in zip(grade.judge(jobs), keys, strict=True):
        mark = Mark(key, "", 1)
        enter(lines, mark)
        assert mark.state == "passed" and mark.num_tests >= 1, mark
