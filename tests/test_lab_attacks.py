"""Answers that attack the judge: whatever one does, it costs its own exercise, and the grader goes on."""

from __future__ import annotations

import ast
import os
import select
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from labs import batch, bodies, grade, sandbox
from labs.exercises import ROOT, exercise_of, load_labs
from labs.grade import PUBLIC_TESTS, enter, job_for
from labs.report import Mark
from tests.test_labs import ATTACKS as BODIES
from tests.test_labs import submission

WRONG = {  # lab A with nothing right in it
    name: "return 0"
    for name in (
        "generate_in_parts",
        "sample",
        "append_and_attend",
        "milliseconds",
        "answer_floor",
        "generate",
        "_generate_one",
    )
}


# Bodies of A.1, and how the reason of its failure begins. The audit is not asked: it is no wall.
FORGE_ALL = BODIES["forge_all"]
ATTACKS = {a["name"]: (a["body"].replace("FORGE_ALL", FORGE_ALL), a["reason"]) for a in BODIES["attack"]}


linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux has the means")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Mark]]:
    """For each attack the marks of its exercise and of a right one that is judged after it."""
    marks, jobs = [], []
    for name, (body, _) in ATTACKS.items():
        folder = tmp_path_factory.mktemp("attack")
        work = submission(folder / "work", "a", chatml=body.replace("MARKER", str(folder / "marker")))
        for key in ("A.1", "A.5"):
            jobs.append(replace(job_for(key, work, [PUBLIC_TESTS]), audited=False))
            marks.append(Mark(key, name, 10))
    for mark, lines in zip(marks, grade.judge(jobs), strict=True):
        enter(lines, mark)
    markers = [Path(job.work).parent / "marker" for job in jobs]
    sizes = [marker.stat().st_size for marker in markers if marker.exists()]
    time.sleep(0.5)
    assert sizes == [marker.stat().st_size for marker in markers if marker.exists()], "a daemon still writes"
    return {name: [mark for mark in marks if mark.title == name] for name in ATTACKS}


@pytest.mark.slow
@linux
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_its_own_exercise_alone_and_is_named(name, judged):
    attack, honest = judged[name]
    assert attack.state == "failed" and attack.reason.startswith(ATTACKS[name][1]), attack
    assert honest.state == "passed", honest


def judged_without_audit(key: str, work: Path, walls: tuple[str, ...] = ()) -> Mark:
    mark = Mark(key, "", 10, partial=True)
    enter(grade.judge([replace(job_for(key, work, [PUBLIC_TESTS], walls=walls), audited=False)])[0], mark)
    return mark


@pytest.mark.slow
def test_an_answer_that_kills_the_judge_and_speaks_for_it_earns_nothing(tmp_path):
    work = submission(tmp_path, "a", chatml=f"import random\nos = random._os\n{FORGE_ALL}", **WRONG)
    report = grade.grade(load_labs()["a"], work)
    assert report.points == 0 and report.whole == "", report


@pytest.mark.slow
def test_what_an_answer_changed_is_named_and_put_back_for_the_next_test(tmp_path):
    exercise = exercise_of("A.2")
    text = exercise.reference.read_text(encoding="utf-8")
    span = bodies.find(text, exercise.name, exercise.path)
    once = f"""
import os
if not os.path.exists({str(tmp_path / "flag")!r}):
    os.mkdir({str(tmp_path / "flag")!r})
    torch.tensor = lambda *_, **__: torch.zeros(1)
"""
    right = textwrap.dedent(text[span.body_start : span.body_end])
    mark = judged_without_audit("A.2", submission(tmp_path / "work", "a", sample=once + right))
    assert mark.reason == "not allowed: it changed torch.tensor" and mark.num_passed == mark.num_tests - 1


@linux
def test_a_judges_processes_end_with_their_grader_however_it_ends():
    program = (
        "import os, time\nfrom labs import sandbox\nif os.fork() == 0:\n    sandbox.die_with_parent()\n"
        "    print('ready', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        ended, _, _ = select.select([process.stdout], [], [], 60)
        assert ended, "nobody can write there any more"


# ---- behind a wall ------------------------------------------------------------------------------------------------

WHY_NOT, HERE = sandbox.why_not(), sandbox.walls()
NAMESPACES, USER = (sandbox.NAMESPACES,), (sandbox.USER,)
needs_a_wall = pytest.mark.skipif(bool(WHY_NOT), reason=f"no wall: {WHY_NOT}")
behind_each_wall = pytest.mark.parametrize(
    "walls",
    [
        pytest.param(
            walls, marks=pytest.mark.skipif(not {*walls} <= {*HERE}, reason=f"here: {HERE}"), id="+".join(walls)
        )
        for walls in (NAMESPACES, USER, NAMESPACES + USER)
    ],
)
# What an answer tries: its name, the code, and how it ends behind namespaces, and as another user.
TRIES = [
    ("write beside the submission", "open('OUTSIDE', 'w')", "OSError", "PermissionError"),
    ("write into the grader's checkout", "open('ROOT/labs/grade.py', 'a')", "OSError", "PermissionError"),
    ("delete the submission", "shutil.rmtree('WORK')", "OSError", "PermissionError"),
    ("delete by the shell", "subprocess.run('rm -rf WORK', shell=True, check=True)", *["CalledProcessError"] * 2),
    ("use the network", "socket.create_connection(('127.0.0.1', PORT), 5)", "ConnectionRefusedError", "done"),
    ("signal the grader", "os.kill(PID, 0)", "ProcessLookupError", "PermissionError"),
    ("signal the judge", "os.kill(os.getppid(), 0)", "done", "PermissionError"),  # namespaces: their own first process
    ("open the judge's output", "os.readlink('/proc/PID/fd/1')", "PermissionError", "PermissionError"),
    ("be root again", "os.setuid(0)", "done", "PermissionError"),  # namespaces: the user is who it was
    ("mount", "subprocess.run(['mount', '-t', 'tmpfs', 'x', '.'], check=True)", *["CalledProcessError"] * 2),
    ("write to its folder", "open('mine', 'w')", "done", "done"),
]
ATTEMPT = """
import os, shutil, socket, subprocess
subprocess.Popen(["sleep", "54321"], start_new_session=True)
said = []
for attempt in TRIES:
    try:
        exec(attempt)
        said.append("done")
    except (OSError, subprocess.CalledProcessError) as error:
        said.append(type(error).__name__)
raise RuntimeError(repr(said))
"""


@pytest.mark.slow
@behind_each_wall
def test_an_answer_behind_a_wall_reaches_no_file_and_no_process_and_leaves_none(walls, tmp_path):
    work = tmp_path / "work"
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = {"OUTSIDE": tmp_path / "outside", "ROOT": ROOT, "WORK": work, "PID": os.getpid()}
        body = ATTEMPT.replace("TRIES", repr([code for _, code, *_ in TRIES]))
        for name, value in (known | {"PORT": server.getsockname()[1]}).items():
            body = body.replace(name, str(value))
        mark = judged_without_audit("A.1", submission(work, "a", chatml=body), walls)
    expected = {what: behind if walls == NAMESPACES else other for what, _, behind, other in TRIES}
    if len(walls) == 2:
        expected |= {what: behind for what, _, behind, _ in TRIES if what in ("use the network", "signal the grader")}
        expected |= {"signal the judge": "PermissionError"}
    got = ast.literal_eval(mark.reason.removeprefix("RuntimeError: ").partition(" (")[0])
    assert dict(zip(expected, got, strict=True)) == expected, mark
    assert (work / "stage_a_naive" / "chat.py").exists()
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert b"sleep\x0054321\x00" not in commands


@pytest.mark.skipif(sandbox.USER not in HERE, reason=f"here: {HERE}")
def test_another_user_cannot_read_the_hidden_tests_that_judge(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    test = "class TestChatPrompt:\n    def test_hidden(self):\n        from stage_a_naive.chat import chatml\n"
    (hidden / "test_lab_a.py").write_text(f"{test}        chatml([])\n")
    body = f"return open({str(hidden / 'test_lab_a.py')!r}).read()"
    job = job_for("A.1", submission(tmp_path / "work", "a", chatml=body), [PUBLIC_TESTS, hidden], walls=USER)
    mark = Mark("A.1", "", 10)
    enter(grade.judge([replace(job, audited=False)])[0], mark)
    assert mark.reason.startswith("PermissionError") and mark.num_tests > 1, mark


NATIVE = "for (int fd = 3; fd < 100; ++fd) dprintf(fd, \"{'event': 'done'}\\n\");"


@pytest.mark.slow
@pytest.mark.compiler
def test_cpp_that_writes_to_every_descriptor_is_refused_and_without_the_audit_heard_by_nobody(tmp_path):
    work = submission(tmp_path, "c", normalise=NATIVE)
    [mark] = grade.grade(load_labs()["c"], work, only=["C.3"]).marks
    assert mark.reason.startswith("not allowed: `dprintf(fd"), mark
    assert judged_without_audit("C.3", work).reason.startswith("not allowed: it wrote to the judge")


@pytest.mark.slow
@behind_each_wall
def test_a_sandbox_ends_with_what_is_in_it_and_as_it_does(walls, tmp_path):
    ends = {"os.abort()": "SIGABRT", "os.kill(os.getpid(), 9)": "SIGKILL", "os.kill(os.getppid(), 9)": ""}
    jobs = []
    for number, end in enumerate(ends):
        work = submission(tmp_path / str(number), "a", chatml=f"import os\n{end}\nreturn ''")
        jobs.append(replace(job_for("A.1", work, [PUBLIC_TESTS], walls=walls), audited=False))
    marks = [Mark("A.1", "", 10) for _ in jobs]
    for mark, lines in zip(marks, grade.judge(jobs), strict=True):
        enter(lines, mark)
    taken_down = [f"it took the process down ({name}) in test_one_message" for name in ("SIGABRT", "SIGKILL")]
    assert [mark.reason for mark in marks[:2]] == taken_down
    unharmed = ("expected ", "PermissionError: ")  # it was no signal, or was refused one
    assert marks[2].reason.startswith(unharmed), "its parent is out of its reach"


@pytest.mark.slow
@needs_a_wall
def test_in_a_sandbox_a_right_lab_is_right(tmp_path, capsys):
    work = submission(tmp_path / "work", "a")
    assert grade.main(["a", "--work", str(work), "--sandbox"]) == 0
    table = capsys.readouterr().out
    assert "100/100" in table and "on the tutor: right" in table


def test_where_there_is_no_sandbox_none_is_promised(tmp_path, monkeypatch, interpreter, capsys):
    monkeypatch.setattr(sandbox, "why_not", lambda: "no such luck")
    monkeypatch.setattr(sandbox, "walls", tuple)
    work = submission(tmp_path / "submissions" / "ada", "a", chatml="return 0")
    assert grade.main(["a", "--work", str(work), "--sandbox"]) == 2
    assert "--sandbox cannot be had here (no such luck); grade without it" in capsys.readouterr().err
    interpreter("import sys; sys.exit(f'error: started with {sys.argv[1:]}')")
    assert batch.main(["a", str(tmp_path / "submissions"), str(tmp_path / "results")]) == 0
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.endswith("answers run WITHOUT A WALL (no such luck): they can do what you can; use --container")
    summary = (tmp_path / "results" / "summary.csv").read_text()
    assert "error: started with" in summary and "--sandbox" not in summary
