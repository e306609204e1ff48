"""A whole class: submissions as learning platforms export them, interrupted runs, and late days."""

from __future__ import annotations

import csv
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from labs import batch, sandbox, submit
from labs.exercises import Lab, load_labs
from labs.grade import Judge, JudgeError
from labs.lateness import FreeDays
from labs.report import Mark, Report, commit
from tests.test_labs import mark_of, submission

LAB = load_labs()["a"]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three submissions of lab A, and a judge that gives 10 points, and fails at the student in `stop`."""

    def report(judge: Judge, lab: Lab, work: Path) -> Report:
        stop = tmp_path / "stop"
        if stop.exists() and work.name == stop.read_text():
            raise JudgeError("no more memory")
        with (tmp_path / "asked").open("a") as log:
            print(work.name, file=log)
        return Report("a", "t", [Mark("A.1", "one", 10, "passed", seconds=1.5)])

    monkeypatch.setattr(batch, "values_of", lambda *_: {})
    monkeypatch.setattr(Judge, "report", report)
    for student in ("ada", "bob", "cay"):
        (tmp_path / "submissions" / student / "stage_a_naive").mkdir(parents=True)
    return tmp_path


def run(course: Path, *options: str) -> list[str]:
    """Grade; returns who was graded."""
    (course / "asked").unlink(missing_ok=True)
    assert batch.main(["a", str(course / "submissions"), str(course / "results"), *options]) == 0
    return (course / "asked").read_text().split() if (course / "asked").exists() else []


def rows(course: Path) -> dict[str, dict[str, str]]:
    with (course / "results" / "summary.csv").open() as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def test_moodles_folders_with_an_archive_in_each_are_unpacked_under_the_students_names(tmp_path):
    work = submission(tmp_path / "work", "a")
    submit.pack(LAB, work, tmp_path / "submission-a.zip")
    for name in ("Ada Lovelace_1234_assignsubmission_file_", "Bob_77_assignsubmission_file"):
        folder = tmp_path / "submissions" / name
        folder.mkdir(parents=True)
        shutil.copy(tmp_path / "submission-a.zip", folder)
        (folder / "onlinetext.html").write_text("My lab is in the archive.")
    found = batch.submissions_in(tmp_path / "submissions")
    assert [*found] == ["Ada Lovelace_1234", "Bob_77"]
    for student, path in found.items():
        copy = batch.unpack(path, tmp_path / student, LAB)
        assert (copy / "stage_a_naive" / "chat.py").read_text() == (work / "stage_a_naive" / "chat.py").read_text()


def test_a_run_goes_on_where_it_was_interrupted_and_a_student_can_be_graded_again(course, capsys):
    (course / "stop").write_text("bob")
    assert run(course) == ["ada", "cay"]
    assert rows(course)["bob"]["problem"] == "no more memory" and rows(course)["cay"]["A.1"] == "10"
    (course / "stop").unlink()
    assert run(course, "--resume") == ["bob"], "who has a row without a problem keeps it"
    assert run(course, "--resume") == []
    assert run(course, "--only", "cay") == ["cay"]
    assert run(course) == ["ada", "bob", "cay"], "without options all are graded anew"
    assert [row["points"] for row in rows(course).values()] == ["10", "10", "10"]
    with pytest.raises(SystemExit):
        run(course, "--only", "eve")
    assert "no submission of eve" in capsys.readouterr().err


def test_a_line_per_student_says_how_far_it_is_and_the_summary_is_whole_after_each(course, capsys, monkeypatch):
    sizes, write = [], batch.write_summary
    monkeypatch.setattr(batch, "write_summary", lambda *words: (write(*words), sizes.append(len(rows(course)))))
    run(course, "--seed", "5")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"lab a: 3 of 3 submissions, commit {commit()}, seed 5; answers run {sandbox.described()}"
    assert lines[:3] == [
        f"{i}/3  {student}: 10 points; about 0 min left" for i, student in enumerate(("ada", "bob", "cay"), 1)
    ]
    assert sizes == [1, 2, 3]
    report = json.loads((course / "results" / "ada.json").read_text())
    assert report["commit"] == commit() and report["walls"] == sandbox.described()


@pytest.mark.parametrize(
    ("walls", "said"),
    [
        ((), "WITHOUT A WALL (why): "),
        ((sandbox.NAMESPACES,), "but as your user: they can read what you can"),
        ((sandbox.USER,), "but without namespaces: they have the network"),
        ((sandbox.NAMESPACES, sandbox.USER), "in namespaces, as another user"),
    ],
)
def test_a_wall_that_is_missing_is_named(walls, said, monkeypatch):
    monkeypatch.setattr(sandbox, "why_not", lambda: "why")
    assert said in sandbox.described(walls)
    report = str(Report("a", "title", [Mark("A.1", "one", 10)], walls=sandbox.described(walls)))
    assert report.splitlines()[-1].endswith(f"answers ran {sandbox.described(walls)}")


def test_late_days_are_free_twice_a_lab_and_four_times_a_course(course):
    table, received = course / "free.csv", course / "received.csv"
    times = {"ada": "2026-10-01T10:00:00Z", "bob": "2026-10-04T10:00:00Z", "cay": "2026-10-02T10:00:00Z"}
    received.write_text("student,received\n" + "".join(f"{student},{time}\n" for student, time in times.items()))
    table.write_text("student,lab,days\ncay,b,2\ncay,c,2\nbob,a,1\n")  # of bob, what an earlier run of this lab wrote
    late = ["--due", "2026-10-01T12:00:00Z", "--received", str(received)]
    run(course, *late, "--free-days", str(table))
    found = {s: (row["days late"], row["free days"], row["points"]) for s, row in rows(course).items()}
    assert found == {"ada": ("0", "0", "10.0"), "bob": ("3", "2", "9.0"), "cay": ("1", "0", "9.0")}
    assert table.read_text().split() == ["student,lab,days", "bob,a,2", "cay,b,2", "cay,c,2"]
    run(course, *late)
    assert {row["free days"] for row in rows(course).values()} == {"0"}, "without a table no day is free"
    assert FreeDays(table, "d").take("bob", 5) == 2 and FreeDays(table, "e").take("bob", 5) == 0


def test_a_link_in_a_submission_is_refused(tmp_path):
    own, other = submission(tmp_path / "own", "a"), submission(tmp_path / "other", "a")
    shutil.rmtree(own / "stage_a_naive")
    (own / "stage_a_naive").symlink_to(other / "stage_a_naive", target_is_directory=True)
    mark = mark_of("A.1", own)
    assert mark.reason == "stage_a_naive/chat.py: stage_a_naive is a link; hand in the file itself"
    (own / "variants" / "floors.py").unlink()
    (own / "variants" / "floors.py").symlink_to(other / "variants" / "floors.py")
    assert mark_of("A.5", own).reason == "variants/floors.py: floors.py is a link; hand in the file itself"
    (tmp_path / "eve").symlink_to(other, target_is_directory=True)
    with pytest.raises(ValueError, match="eve is a link"):
        batch.unpack(tmp_path / "eve", tmp_path / "unpacked", LAB)
    with zipfile.ZipFile(tmp_path / "eve.zip", "w") as archive:
        link = zipfile.ZipInfo("stage_a_naive")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, str(other / "stage_a_naive"))
    assert not list(batch.unpack(tmp_path / "eve.zip", tmp_path / "eve unpacked", LAB).iterdir())
