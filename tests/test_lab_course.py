"""A course of five students: `instructors.md` line by line, a stand-in for docker, and Gradescope's folders."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from labs import batch, container, gradescope, sandbox, starter, student_repo, submit
from labs.exercises import LABS, ROOT, exercise_of, load_labs
from labs.grade import JudgeError, grade
from labs.lateness import Policy, moment
from tests.test_labs import judge, submission
from tests.test_labs_first_steps import LEFT_OUT

LAB = load_labs()["d"]
DONE = ("D.1", "D.2")  # what the students have done
# Says that all is right, and removes all.
MALICE = """
import os
for name in ("test_each_pair_turns_by_its_angle", "test_lengths_and_relative_angles_stay"):
    os.write(3, b'{"test": "%s"}\\n{"seconds": 0}\\n' % name.encode())
for victim in ("SUBMISSIONS", "RESULTS"):
    os.system("rm -rf " + victim)
os.kill(os.getppid(), 9)
return x
"""
# Says what it was asked; of `docker run` it does what the container would, with the folders where they are.
DOCKER = """
import json, os, subprocess, sys
with open(os.environ["ASKED"], "a") as asked:
    print(json.dumps(sys.argv[1:]), file=asked)
if sys.argv[1] == "run":
    words = sys.argv[1:]
    mounted = [words[i + 1].split(":") for i, word in enumerate(words) if word == "--volume"]
    inner = words[words.index("python") + 1 :]
    for outside, inside, *_ in mounted:
        inner = [outside + word.removeprefix(inside) if word.startswith(inside) else word for word in inner]
    inner = [word for word in inner if word != "--sandbox" or os.environ.get("WALLS")]
    sys.exit(subprocess.run([PYTHON, *inner]).returncode)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Put a stand-in for docker on the path; returns what gives all that it was asked."""
    folder, asked = tmp_path / "bin", tmp_path / "asked"
    folder.mkdir()
    (folder / "docker").write_text(f"#!{sys.executable}\nPYTHON = {sys.executable!r}\n{DOCKER}")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(asked))
    monkeypatch.setenv("WALLS", "yes" * bool(sandbox.walls()))
    return lambda: [json.loads(line) for line in asked.read_text().splitlines()]


def lines_of_the_page() -> list[str]:
    """The lines of all code blocks of `instructors.md`."""
    blocks = re.findall(r"^```\n(.*?)^```", (LABS / "instructors.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def learners_folder(target: Path, **bodies: str) -> Path:
    """A learner's `labs/work`, with `DONE` written and all else as it was given."""
    if bodies:
        submission(target, "d", **bodies)
    else:
        starter.write_starter(LAB, target, missing=[])
    for exercise in (exercise for exercise in LAB.exercises if exercise.id not in DONE):
        file = exercise.copy_in(target)
        file.write_text(exercise.starter_text(file.read_text(encoding="utf-8")), encoding="utf-8")
    return target


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_line_by_line_for_two_honest_students_a_late_one_a_broken_archive_and_a_malicious_one(
    tmp_path, docker
):
    clone = Path(shutil.copytree(ROOT, tmp_path / "clone", ignore=LEFT_OUT))
    course = tmp_path / "course"
    for folder in ("submissions", "results"):
        (course / folder).mkdir(parents=True)
    malice = MALICE.replace("SUBMISSIONS", str(course / "submissions")).replace("RESULTS", str(course / "results"))

    def run(line: str, student: str = "") -> None:
        where = clone if line.startswith("make") or "docker build" in line else course
        words = line + (f" VENV= PYTHON={sys.executable}" if line.startswith("make") else "")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(["sh", "-c", words], cwd=where, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"

    def rows() -> dict[str, dict[str, str]]:
        with (course / "results" / "summary.csv").open() as file:
            return {row["student"]: row for row in csv.DictReader(file)}

    points = sum(exercise_of(key).points for key in DONE)
    one_less = points - exercise_of("D.1").points

    def pack_all(line: str) -> None:
        packed = clone / "labs" / "work" / "submission-d.zip"
        for student in ("eve", "bob", "cay", "ada"):
            shutil.rmtree(clone / "labs" / "work", ignore_errors=True)
            learners_folder(clone / "labs" / "work", **({"rotate": malice} if student == "eve" else {}))
            run(line)
            shutil.copy(packed, course / "submissions" / f"{student}.zip")
        shutil.copy(course / "submissions" / "ada.zip", course / "submission-d.zip")
        (course / "submissions" / "dan.zip").write_bytes(packed.read_bytes()[:1000])
        times = {"ada": "10-01T20:00:00", "bob": "10-02T00:05:00", "cay": "10-03T12:00:00", "dan": "10-01T20:00:00"}
        table = "".join(f"{student},2026-{time}+02:00\n" for student, time in (times | {"eve": times["ada"]}).items())
        (course / "received.csv").write_text(f"student,received\n{table}")

    def check_table(lateness: bool) -> None:
        found = rows()
        assert {name: row["problem"] for name, row in found.items() if name != "dan"} == dict.fromkeys(
            ("ada", "bob", "cay", "eve"), ""
        )
        assert found["dan"]["problem"].startswith("cannot be unpacked: ") and float(found["dan"]["points"]) == 0
        got = {name: float(row["points"]) for name, row in found.items()}
        assert got == {
            "ada": points,
            "bob": points,
            "cay": points * (0.8 if lateness else 1),
            "dan": 0,
            "eve": one_less,
        }
        reasons = {e["id"]: e["reason"] for e in json.loads((course / "results" / "eve.json").read_text())["exercises"]}
        assert reasons["D.1"] and not reasons["D.2"], reasons
        if sandbox.walls():
            assert len(list((course / "submissions").iterdir())) == 5, "the malicious answer removed them"

    checks = {
        "make student-repo": run,
        "make submit": lambda line: pack_all(line),
        "mkdir alice": run,
        "python -m labs.grade d --work alice": lambda line: (
            run(line if sandbox.walls() else line.replace("--sandbox", "")),
            json.loads((course / "alice-d.json").read_text())["points"] == points or pytest.fail("alice's points"),
        ),
        "python -m labs.batch d submissions/ results/ --jobs 2 --due": (
            lambda line: (run(line), check_table(lateness=True))
        ),
        "docker build": run,
        "python -m labs.batch d submissions/ results/ --jobs 2 --container": (
            lambda line: (run(line), check_table(lateness=False))
        ),
        "make instructor-pack": run,
        "python -m labs.gradescope pack d": run,
        "make grade-d SEED=": run,
    }
    for line in lines_of_the_page():
        [check] = [check for beginning, check in checks.items() if line.startswith(beginning)]
        check(line)
    assert len(lines_of_the_page()) == len(checks)
    build, *runs = docker()
    assert build == ["build", "-t", "six-engines", "-f", ".devcontainer/Dockerfile", "."] and len(runs) == 4
    assert (clone / "labs" / "pack" / "policies.md").is_file() and (course / "autograder.zip").is_file()


def test_a_container_sees_one_student_has_no_network_and_ends(tmp_path):
    words = container.command("image", "name", "d", tmp_path / "work", tmp_path / "marks", 60.0, ["--partial"])
    line = " ".join(words)
    assert "--network none --read-only" in line and "--memory 4g --memory-swap 4g" in line and "--pids-limit" in line
    assert "--cap-drop ALL" in line and "--security-opt no-new-privileges" in line
    mounts = [words[i + 1] for i, word in enumerate(words) if word == "--volume"]
    assert mounts == [f"{tmp_path}/work:/submission:ro", f"{tmp_path}/marks:/results"]
    assert "--interactive" in words, "it reads the reference's values"
    assert line.endswith(
        "image timeout --signal=KILL 60 python -m labs.grade d --work /submission --json /results/marks.json"
        " --sandbox --partial"
    )


def test_each_student_has_a_folder_for_marks_and_all_have_the_same_seed_and_values(tmp_path, docker, monkeypatch):
    for student in ("ada", "bob"):
        learners_folder(tmp_path / "submissions" / student)
    monkeypatch.setattr(batch, "_run", lambda *words: asked.append(words))
    monkeypatch.setattr(batch, "values_of", lambda lab, seed: {"d.X": [str(seed)]})
    asked: list = []
    assert batch.main(["d", str(tmp_path / "submissions"), str(tmp_path / "results"), "--container", "image"]) == 0
    mounts = [[word for word in words if ":/" in word] for words, *_ in asked]
    assert [len(each) for each in mounts] == [2, 2] and not {*mounts[0]} & {*mounts[1]}
    [seed] = {words[words.index("--seed") + 1] for words, *_ in asked}
    assert [json.loads(values) for _, values, _ in asked] == [{"d.X": [seed]}] * 2 and int(seed) > 0
    assert "the grader wrote no marks" in (tmp_path / "results" / "summary.csv").read_text()


def test_a_container_that_does_not_end_is_removed(tmp_path, docker, monkeypatch):
    monkeypatch.setattr(batch, "STUDENT_SECONDS", -59.9)
    with pytest.raises(JudgeError, match="not done after"):
        batch._run(["sleep", "60"], "", "its-name")
    assert docker() == [["rm", "--force", "its-name"]]


# ---- handing in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", load_labs())
def test_what_is_handed_in_is_the_exercises_files_and_reads_back_as_it_was(letter, tmp_path):
    lab = load_labs()[letter]
    starter.write_starter(lab, tmp_path / "work", missing=lab.exercises[1:])
    notes = submit.pack(lab, tmp_path / "work", tmp_path / "ada.zip")
    assert notes == [f"{exercise.id}: not started" for exercise in lab.exercises[1:]]
    work = batch.unpack(tmp_path / "ada.zip", tmp_path / "ada", lab)
    files = {path.relative_to(work) for path in work.rglob("*") if path.is_file()}
    assert files == {exercise.copy_in(Path()) for exercise in lab.exercises}
    assert submit.pack(lab, work, tmp_path / "again.zip") == notes


def test_what_cannot_be_handed_in_is_said(tmp_path, capsys):
    assert submit.main(["d", "--work", str(tmp_path)]) == 2
    assert "`make lab-d` writes the starter" in capsys.readouterr().err
    submission(tmp_path, "d", rotate="return (")
    assert submit.main(["d", "--work", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "submission-d.zip: " in said and "D.1: SyntaxError" in said and "D.2" not in said


# ---- lateness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handed_in", "days", "share"),
    [
        ("2026-10-01T23:59:00+02:00", 0, 1),
        ("2026-10-01T22:08:00Z", 0, 1),  # nine minutes, in another zone
        ("2026-10-02T00:10:00+02:00", 1, 0.9),
        ("2026-10-03T00:00:00+02:00", 2, 0.8),
        ("2026-10-06T23:58:00+02:00", 5, 0.5),
        ("2026-10-07T00:00:00+02:00", 6, 0),
    ],
)
def test_each_day_begun_costs_a_tenth_and_after_five_nothing_is_left(handed_in, days, share):
    late = Policy().days_late(moment(handed_in), moment("2026-10-01T23:59:00+02:00"))
    assert (late, Policy().share(late)) == (days, share)


def test_a_time_without_a_zone_is_refused():
    with pytest.raises(ValueError, match="has no time zone; write 2026-10-01T23:59:00"):
        moment("2026-10-01T23:59:00")


# ---- another system -----------------------------------------------------------------------------------------------

# A Python where there is neither Triton nor what Linux has.
ELSEWHERE = f"""
import sys
sys.modules["triton"] = None
sys.path.insert(0, {str(ROOT)!r})
from labs import sandbox
sandbox.LINUX = False
exec(sys.argv[-1])
"""


@pytest.mark.slow
def test_without_triton_and_linux_the_labs_are_judged_but_for_kernels(tmp_path, monkeypatch, interpreter):
    interpreter(ELSEWHERE)
    monkeypatch.setitem(sys.modules, "triton", None)
    keys = ("A.1", "B.1", "D.5", "E.4", "G.1", "H.1", "L.6")
    for key in keys:
        starter.write_starter(load_labs()[key[0].lower()], tmp_path / key, missing=[])
    assert [mark for mark in judge([(key, tmp_path / key) for key in keys]) if mark.state != "passed"] == []
    for key in ("D.6", "D.7", "H.5"):
        [mark] = grade(load_labs()[key[0].lower()], tmp_path / f"{key[0]}.{'1' if key[0] == 'H' else '5'}", [key]).marks
        assert mark.state == "not judged" and "Linux has one" in mark.reason


# ---- Gradescope ---------------------------------------------------------------------------------------------------

METADATA = {
    "created_at": "2026-10-03T09:00:00.000000-07:00",
    "assignment": {"due_date": "2026-10-01T23:00:00.000000-07:00", "title": "Lab D"},
    "users": [{"id": 7, "name": "Ada"}, {"id": 5, "name": "Bob"}],
}


def place_of(folder: Path, work: Path, metadata: dict = METADATA) -> Path:
    """Gradescope's folders, with the autograder of lab D unpacked and a submission handed in."""
    gradescope.pack("d", folder / "autograder.zip", Policy())
    place = folder / "autograder"
    (place / "results").mkdir(parents=True)
    with zipfile.ZipFile(folder / "autograder.zip") as archive:
        archive.extractall(place / "source", [n for n in archive.namelist() if not n.startswith("course")])
    submit.pack(LAB, work, folder / "submission.zip")
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        archive.extractall(place / "submission")
    (place / "submission_metadata.json").write_text(json.dumps(metadata))
    return place


def test_the_autograders_archive_has_two_executables_at_its_root_and_the_course(tmp_path):
    gradescope.pack("d", tmp_path / "a.zip", Policy())
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        names = archive.namelist()
        for name in ("setup.sh", "run_autograder"):
            assert archive.getinfo(name).external_attr >> 16 & 0o777 == 0o755
            text = archive.read(name)
            assert text.startswith(b"#!/usr/bin/env bash\n") and b"\r" not in text
            subprocess.run(["bash", "-n"], input=text, check=True)
        assert archive.getinfo("settings.json").external_attr >> 16 & 0o077 == 0
    assert {"course/labs/gradescope.py", "course/stage_d_paged/llm.py", "course/constraints.txt"} < {*names}
    assert not any("/work/" in name or "__pycache__" in name for name in names)


@pytest.mark.slow
@pytest.mark.skipif(not sandbox.walls(), reason=f"no wall: {sandbox.why_not()}")
def test_gradescope_gets_points_less_lateness_and_nobody_else_can_read_sources_or_marks(tmp_path):
    place = place_of(tmp_path, learners_folder(tmp_path / "work"))
    assert gradescope.run(place) == 0
    found = json.loads((place / "results" / "results.json").read_text())
    by_id = {test["number"]: test for test in found["tests"]}
    assert all(by_id[key]["status"] == "passed" for key in DONE), found
    points = sum(exercise_of(key).points for key in DONE)
    assert found["score"] == round(points * 0.8, 1) and found["output"].startswith("2 days late: 80% of the points")
    assert found["extra_data"]["days_late"] == 2 and found["extra_data"]["seed"] != 0
    for closed in ("source", "results", "submission_metadata.json"):
        assert stat.S_IMODE((place / closed).stat().st_mode) & 0o077 == 0


def test_a_submission_that_cannot_be_graded_still_has_a_result(tmp_path, monkeypatch):
    place = place_of(tmp_path, learners_folder(tmp_path / "work"))
    monkeypatch.setattr(sandbox, "walls", tuple)
    monkeypatch.setattr(sandbox, "why_not", lambda: "no such luck")
    assert gradescope.run(place) == 0
    found = json.loads((place / "results" / "results.json").read_text())
    assert found["score"] == 0 and "no answer is run without a wall (no such luck)" in found["output"]


def test_the_last_due_date_of_a_group_counts_and_no_due_date_means_no_lateness():
    extended = {"id": 1, "assignment": {"due_date": "2026-10-03T23:00:00.000000-07:00"}}
    assert gradescope.days_late(METADATA, Policy()) == 2
    assert gradescope.days_late(METADATA | {"users": [{"id": 5}, extended]}, Policy()) == 0
    assert gradescope.days_late(METADATA | {"assignment": {"due_date": None}}, Policy()) == 0


# ---- the edition without answers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def edition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The edition that ends with lab D, with the values of the two exercises that a test judges in it."""
    folder = tmp_path_factory.mktemp("edition") / "course"
    student_repo.write_edition("d", folder)
    lab = replace(LAB, exercises=(exercise_of("D.2"), exercise_of("D.3")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(student_repo, "load_labs", lambda: {"d": lab})
        student_repo.write_values(["d"], folder)
    return folder


def test_no_file_of_an_edition_shows_an_exercise(tmp_path):
    files = student_repo.write_edition("l", tmp_path)
    shown = []
    for path in (path for path in files if path.suffix not in (".safetensors", ".svg", ".png", ".webp", ".mo")):
        text = (tmp_path / path).read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "".join(line for cell in json.loads(text)["cells"] for line in cell["source"])
        for exercise in student_repo.shown(text):
            varied = exercise.path.startswith("labs/variants/") and path.name == "loop.py"  # it was made from this
            if not varied and not exercise.slow:
                shown.append((exercise.id, str(path)))
    assert shown == []


def test_an_edition_has_no_later_stage_no_answers_and_no_link_to_them(edition):
    names = {str(path.relative_to(edition)) for path in edition.rglob("*")}
    assert {"stage_d_paged/batch.py", "labs/lab_d.md", "labs/tests/test_lab_d.py", "notebooks/d_paged.ipynb"} < names
    forbidden = "stage_[ef]|beyond|^tests/|interview|lab_[e-p]|pack|templates|mutations|instructors|\\.git$"
    assert [name for name in names if re.search(forbidden, name)] == []
    page = (edition / "stage_d_paged" / "README.md").read_text()
    assert "# you write this: D.3" in page and "stage_e_batching" not in re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    notebook = json.loads((edition / "notebooks" / "d_paged.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"])


def test_the_labs_of_an_edition_are_graded_with_the_learners_other_answers(edition):
    def make(goal: str) -> str:
        line = ["make", goal, "VENV=", f"PYTHON={sys.executable}", "ONLY=D.2,D.3,D.11"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(line, cwd=edition, env=environment, capture_output=True, text=True).stdout

    assert "D.2" in make("lab-d")
    work = edition / "labs" / "work"
    shutil.rmtree(work / "stage_d_paged")
    starter.write_starter(LAB, work, force=True, missing=[exercise_of("D.2")])
    table = make("grade-d")
    assert re.search(r"D\.2 .* not started", table) and re.search(r"D\.3 .* passed", table), table
    assert "this edition has no broken engine" in table
