"""Answers that attack the judge: whatever one does, it costs its own exercise, and the grader goes on."""

from __future__ import annotations

import ast
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from labs import batch, grade, sandbox, values
from labs.exercises import ROOT, exercise_of, load_labs
from labs.report import Mark, Report
from tests.test_labs import ATTACKS as BODIES
from tests.test_labs import judge, submission
from tests.test_labs_first_steps import LEFT_OUT

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


# Bodies of A.1, and how the reason of its failure begins.
FORGE_ALL = BODIES["forge_all"]
ATTACKS = {a["name"]: (a["body"].replace("FORGE_ALL", FORGE_ALL), a["reason"]) for a in BODIES["attack"]}


linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux has the means")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Mark]]:
    """For each attack the marks of its exercise and of a right one that is judged after it."""
    keys = []
    for body, _ in ATTACKS.values():
        folder = tmp_path_factory.mktemp("attack")
        work = submission(folder / "work", "a", chatml=body.replace("MARKER", str(folder / "marker")))
        keys += [("A.1", work), ("A.5", work)]
    marks = judge(keys, seed=7)
    markers = [work.parent / "marker" for _, work in keys]
    sizes = [marker.stat().st_size for marker in markers if marker.exists()]
    time.sleep(0.5)
    assert sizes == [marker.stat().st_size for marker in markers if marker.exists()], "a daemon still writes"
    return {name: marks[2 * number : 2 * number + 2] for number, name in enumerate(ATTACKS)}


@pytest.mark.slow
@linux
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_its_own_exercise_alone_and_is_named(name, judged):
    attack, honest = judged[name]
    assert attack.state == "failed" and attack.reason.startswith(ATTACKS[name][1]), attack
    assert honest.state == "passed", honest


def judged_behind(key: str, work: Path, walls: tuple[str, ...] = ()) -> Mark:
    mark, lab = Mark(key, "", 10, partial=True), load_labs()[key[0].lower()]
    with grade.Judge(7, walls) as found:
        found.enter(mark, lab, [exercise_of(key)], work)
    return mark


@pytest.mark.slow
def test_an_answer_that_kills_the_judge_and_speaks_for_it_earns_nothing(tmp_path):
    work = submission(tmp_path, "a", chatml=f"import os\n{FORGE_ALL}", **WRONG)
    report = grade.grade(load_labs()["a"], work)
    assert report.points == 0 and report.whole == "", report


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
    ("read the reference", "open('ROOT/stage_a_naive/chat.py')", "FileNotFoundError", "done"),
    ("read the drivers of the checkout", "os.listdir('ROOT/labs')[0]", "IndexError", "done"),
    ("read the submission", "open('WORK/stage_a_naive/chat.py')", "FileNotFoundError", "PermissionError"),  # pytest's
    ("write beside the submission", "open('OUTSIDE', 'w')", "OSError", "PermissionError"),
    ("write into the grader's checkout", "open('ROOT/labs/grade.py', 'a')", *["PermissionError"] * 2),
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
    except (OSError, IndexError, subprocess.CalledProcessError) as error:
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
        mark = judged_behind("A.1", submission(work, "a", chatml=body), walls)
    expected = {what: behind if walls == NAMESPACES else other for what, _, behind, other in TRIES}
    if len(walls) == 2:
        of_namespaces = (
            "read the reference",
            "read the drivers of the checkout",
            "use the network",
            "signal the grader",
        )
        expected |= {what: behind for what, _, behind, _ in TRIES if what in of_namespaces}
    got = ast.literal_eval(mark.reason.removeprefix("RuntimeError: ").partition(" (")[0])
    assert dict(zip(expected, got, strict=True)) == expected, mark
    assert (work / "stage_a_naive" / "chat.py").exists()
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert b"sleep\x0054321\x00" not in commands


NATIVE = 'for (int fd = 3; fd < 100; ++fd) dprintf(fd, "passed\\n");'


@pytest.mark.slow
@pytest.mark.compiler
def test_cpp_that_writes_to_every_descriptor_earns_nothing(tmp_path):
    work = submission(tmp_path, "c", normalise=NATIVE)
    assert judged_behind("C.3", work).reason == values.NO_DRIVER


@pytest.mark.slow
@behind_each_wall
def test_a_sandbox_ends_with_what_is_in_it_and_as_it_does(walls, tmp_path):
    ends = {"os.abort()": "SIGABRT", "os.kill(os.getpid(), 9)": "SIGKILL", "os.kill(os.getppid(), 9)": ""}
    bodies = [f"import os\n{end}\nreturn ''" for end in ends]
    works = [submission(tmp_path / str(number), "a", chatml=body) for number, body in enumerate(bodies)]
    marks = [judged_behind("A.1", work, walls) for work in works]
    taken_down = [f"it took the process down ({name}) in test_one_message" for name in ("SIGABRT", "SIGKILL")]
    assert [mark.reason for mark in marks[:2]] == taken_down
    unharmed = ("one message of the user", "PermissionError: ")  # it was no signal, or was refused one
    assert marks[2].reason.startswith(unharmed), "its parent is out of its reach"


CLOSED = """
import sys
from pathlib import Path
sys.path.insert(0, CLONE)
from labs import grade
from labs.exercises import exercise_of, load_labs
from labs.report import Mark
with grade.Judge(7, ("user",)) as judge:
    for work in ("reads", "right"):
        mark = Mark("A.1", "", 10)
        judge.enter(mark, load_labs()["a"], [exercise_of("A.1")], Path(WORK, work))
        print(mark.state, mark.reason)
"""
READS = "open('CLONE/README.md').read()\nreturn open('CLONE/stage_a_naive/chat.py').read()"


@pytest.mark.slow
@pytest.mark.skipif(sandbox.USER not in HERE, reason=f"here: {HERE}")
def test_another_user_reads_no_reference_in_a_checkout_that_is_closed(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # as a checkout that all may enter
        clone = Path(shutil.copytree(ROOT, Path(folder, "clone"), ignore=LEFT_OUT))
        for closed in (*clone.glob("stage_*"), clone / "beyond", clone / "csrc", clone / "labs"):
            closed.chmod(0o700)
        submission(tmp_path / "reads", "a", chatml=READS.replace("CLONE", str(clone)))
        submission(tmp_path / "right", "a")
        program = CLOSED.replace("CLONE", repr(str(clone))).replace("WORK", repr(str(tmp_path)))
        done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    reads, right = done.stdout.splitlines()
    assert reads.startswith("failed PermissionError: ") and right.strip() == "passed", done.stdout


THREADS = """
import threading
threading.stack_size(1 << 16)
stop, started = threading.Event(), 0
try:
    while started < 9000:
        threading.Thread(target=stop.wait, daemon=True).start()
        started += 1
except RuntimeError:
    stop.set()
raise RuntimeError(started)
"""


@pytest.mark.slow
@linux
def test_an_answer_starts_so_many_threads_and_no_more(tmp_path):
    if os.getuid() == 0 and sandbox.USER not in HERE:
        assert "start any number of processes" in sandbox.described(NAMESPACES)
        pytest.skip("no limit binds root, and this Python is no other user's to read")
    reason = judged_behind("A.1", submission(tmp_path, "a", chatml=THREADS), HERE).reason
    started = int(reason.removeprefix("RuntimeError: ").split()[0])
    running = len(list(Path("/proc").glob("[0-9]*/task/*")))
    assert sandbox.PROCESSES // 2 < started < min(9000, sandbox.PROCESSES + running + 100), reason


@pytest.mark.slow
@needs_a_wall
def test_in_a_sandbox_a_right_lab_is_right(tmp_path, capsys):
    work = submission(tmp_path / "work", "a")
    assert grade.main(["a", "--work", str(work), "--sandbox"]) == 0
    table = capsys.readouterr().out
    assert "100/100" in table and "on the tutor: right" in table


def test_where_there_is_no_sandbox_none_is_promised(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "why_not", lambda: "no such luck")
    monkeypatch.setattr(sandbox, "walls", tuple)
    monkeypatch.setattr(batch, "values_of", lambda *_: {})
    work = submission(tmp_path / "submissions" / "ada", "a", chatml="return 0")
    assert grade.main(["a", "--work", str(work), "--sandbox"]) == 2
    assert "--sandbox cannot be had here (no such luck); grade without it" in capsys.readouterr().err
    monkeypatch.setattr(grade.Judge, "report", lambda judge, *_: Report("a", str(judge.walls), [Mark("A.1", "one", 9)]))
    assert batch.main(["a", str(tmp_path / "submissions"), str(tmp_path / "results")]) == 0
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.endswith("answers run WITHOUT A WALL (no such luck): they can do what you can; use --container")
    assert '"title": "()"' in (tmp_path / "results" / "ada.json").read_text()
