"""Grade the submissions of a whole course: one process, or one container, per student.

    python -m labs.batch d submissions/ results/ --jobs 4 --tests hidden/ --seed-secret file

`submissions/` holds one folder or one archive per student, as `make submit` or a student's own system packs it.
`results/` gets one JSON per student, `summary.csv` with a row per student and the points and seconds of every exercise,
and `similarity.csv`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import hmac
import json
import lzma
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path, PurePosixPath

from labs import container, sandbox, similarity
from labs.exercises import ROOT, Lab, load_labs
from labs.lateness import Policy, moment
from labs.report import FORMS
from labs.tests.support import SEED_VARIABLE
from stage_a_naive.contract.errors import one_line
from stage_a_naive.entrypoints.interrupts import run_command

STUDENT_SECONDS = 1800.0
UNPACKED_BYTES = 256 << 20  # that an archive may hold
ARCHIVES = (".tar.gz", ".tar.xz", ".tar.bz2", ".tgz", ".tar", ".zip")
# What the modules that unpack raise for an archive that is broken, encrypted or compressed in a way they do not know.
CANNOT_UNPACK = (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, zlib.error, lzma.LZMAError)
CANNOT_UNPACK += (RuntimeError, ValueError)


def student_seed(student: str, secret: str) -> int:
    """A number that only the holder of the secret can tell beforehand, the same in every run."""
    return int.from_bytes(hmac.digest(secret.encode(), student.encode(), hashlib.sha256)[:6], "big")


def submissions_in(folder: Path) -> dict[str, Path]:
    """Student -> folder or file. Each but the hidden ones is one, so that none is left out without a row."""
    found: dict[str, Path] = {}
    for path in sorted(path for path in folder.iterdir() if not _is_clutter(path.name)):
        student = path.name.removesuffix(_ending(path)) if path.is_file() else path.name
        found[path.name if student in found else student] = path
    return found


def _ending(file: Path) -> str:
    """The ending of an archive's name as it is written, "" if it is no archive."""
    found = next((ending for ending in ARCHIVES if file.name.lower().endswith(ending)), "")
    return file.name[len(file.name) - len(found) :]


def unpack(submission: Path, target: Path, lab: Lab) -> Path:
    """A folder with the submission's copy of the lab: of the folder itself, or of the archive's content.

    Of an archive only files and folders are taken, none of which can be written outside of `target`. An archive of the
    folder around the copy will do as well.

    Raises:
        CANNOT_UNPACK: it is no archive, a broken one, or one that is too large.
    """
    if submission.is_file():
        target.mkdir()
        ending = _ending(submission).lower()
        if not ending:
            raise ValueError(f"{submission.name} is none of {', '.join(ARCHIVES)}")
        (_unpack_zip if ending == ".zip" else _unpack_tar)(submission, target)
        submission = target
    return _with_copy(submission, lab)


def _with_copy(folder: Path, lab: Lab) -> Path:
    """The folder that has the lab's copy: this one, or the only one in it, and so on."""
    inner = folder
    while not (inner / lab.prefix / lab.package.replace(".", "/")).exists():
        folders = [path for path in inner.iterdir() if path.is_dir() and not _is_clutter(path.name)]
        if len(folders) != 1:
            return folder
        [inner] = folders
    return inner


def _is_clutter(name: str) -> bool:
    """Whether a file or folder is a system's own, such as macOS adds to an archive."""
    return name.startswith(".") or name == "__MACOSX"


def _check_size(sizes: list[int]) -> None:
    if sum(sizes) > UNPACKED_BYTES:
        raise ValueError(f"it holds {sum(sizes) >> 20} MiB, at most {UNPACKED_BYTES >> 20} are unpacked")


def _unpack_tar(file: Path, target: Path) -> None:
    with tarfile.open(file) as archive:
        # A link is of no use here: the one to the tutor, which older packs have, leads to nowhere.
        members = [member for member in archive if member.isfile() or member.isdir()]
        members = [m for m in members if not any(map(_is_clutter, PurePosixPath(m.name).parts))]
        _check_size([member.size for member in members])
        for member in members:  # Python 3.11.2 has no filter that would keep extractall() from leaving the folder
            path = target.joinpath(*(part for part in PurePosixPath(member.name).parts if part != "/"))
            (path if member.isdir() else path.parent).mkdir(parents=True, exist_ok=True)
            if member.isfile():
                path.write_bytes(archive.extractfile(member).read())


def _unpack_zip(file: Path, target: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if not stat.S_ISLNK(member.external_attr >> 16)]
        for member in members:
            member.filename = member.filename.replace("\\", "/")  # as some programs on Windows write it
        members = [m for m in members if not any(map(_is_clutter, PurePosixPath(m.filename).parts))]
        _check_size([member.file_size for member in members])
        for member in members:
            archive.extract(member, target)


def grade_one(lab: Lab, student: str, work: Path, target: Path, args: argparse.Namespace) -> dict[str, object]:
    """Grade one student in a process, or container, of its own; returns the row of the summary."""
    target.unlink(missing_ok=True)  # marks of an earlier run
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment |= {SEED_VARIABLE: str(student_seed(student, args.secret))} if args.secret else {}
    options = ["--partial"] if args.partial else []
    name = f"six-engines-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="six-engines-marks-") as folder:
        private = Path(folder)
        if args.container:
            tests = shutil.copytree(args.tests, private / "hidden") if args.tests else None
            (private / "results").mkdir(mode=0o700)
            for closed in filter(None, (tests, private / "results")):
                closed.chmod(0o700)
            marks = private / "results" / container.MARKS
            command = container.command(
                args.container, name, lab.letter, work, marks.parent, STUDENT_SECONDS, tests, options
            )
        else:
            marks = private / container.MARKS
            command = [sys.executable, "-m", "labs.grade", lab.letter, "--work", str(work), "--json", str(marks)]
            command += ["--tests", str(args.tests)] if args.tests else []
            command += ["--sandbox"] if args.sandbox else []
            command += options
        problem = _problem_of(command, environment, name if args.container else "")
        if not problem and not marks.is_file():
            problem = "the grader wrote no marks"
        report = {} if problem else json.loads(marks.read_text(encoding="utf-8"))
    row: dict[str, object] = {"student": student, "points": 0, "problem": problem}
    if report:
        row |= {"points": report["points"], "notes": len(report["notes"]), "whole_stage": report["whole_stage"]}
        for mark in report["exercises"]:
            row |= {mark["id"]: mark["points"], f"{mark['id']} seconds": mark["seconds"]}
        form = FORMS[args.form](similarity.report_of(report)) if args.form != "plain" else report
        target.write_text(json.dumps(form, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return row


def _problem_of(command: list[str], environment: dict[str, str], container_name: str) -> str:
    """Run a grader; returns why there are no marks, "" if there are."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    try:
        run = subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            text=True,
            errors="replace",
            timeout=STUDENT_SECONDS + 60,
            **pipes,
            check=False,
        )
    except subprocess.TimeoutExpired:
        if container_name:
            subprocess.run(["docker", "rm", "--force", container_name], capture_output=True, check=False)
        return f"not done after {STUDENT_SECONDS:.0f} s"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    return "" if run.returncode == 0 else (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]


def received_in(file: Path) -> dict[str, datetime]:
    """When each student's submission came: the columns `student` and `received` of a table.

    Raises:
        ValueError: a time is none, or has no time zone.
    """
    with file.open(newline="", encoding="utf-8") as table:
        return {row["student"]: moment(row["received"]) for row in csv.DictReader(table)}


def charge_lateness(row: dict[str, object], received: dict[str, datetime], due: datetime, policy: Policy) -> None:
    """Take off a row's points what its student's lateness costs; one without a time is named."""
    student = str(row["student"])
    if student not in received:
        row["problem"] = "; ".join(filter(None, [str(row["problem"]), "no time in the table of --received"]))
        return
    days = policy.days_late(received[student], due)
    row |= {"days late": days, "points": round(float(row["points"]) * policy.share(days), 1)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.batch", description=__doc__.splitlines()[0])
    parser.add_argument("lab", choices=list(load_labs()))
    parser.add_argument("submissions", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="students at the same time")
    parser.add_argument("--tests", type=Path, help="a directory with hidden tests")
    parser.add_argument("--form", choices=list(FORMS), default="plain", help="of each student's JSON")
    parser.add_argument("--partial", action="store_true", help="points in proportion to the tests that pass")
    parser.add_argument("--seed-secret", type=Path, help="a file; its text makes each student's seed for hidden tests")
    parser.add_argument("--container", metavar="IMAGE", help="grade each student in a container of this image")
    parser.add_argument("--due", type=moment, help="the deadline, such as 2026-10-01T23:59:00+02:00")
    parser.add_argument("--received", type=Path, help="a table with the columns student and received, for --due")
    parser.add_argument("--late-percent", type=float, default=Policy.percent, help="of the points, per day begun")
    parser.add_argument("--late-days", type=int, default=Policy.days, help="after which nothing is left")
    args = parser.parse_args(argv)
    if (args.due is None) != (args.received is None):
        parser.error("--due needs --received, and --received needs --due")
    received = received_in(args.received) if args.received else {}
    policy = Policy(args.late_percent, args.late_days)
    args.tests = args.tests and args.tests.resolve()
    why_not = "" if args.container else sandbox.why_not()
    args.sandbox = not args.container and not why_not
    if why_not:
        print(f"note: answers run without a sandbox ({why_not}): use --container", file=sys.stderr)
    args.secret = args.seed_secret.read_text(encoding="utf-8").strip() if args.seed_secret else ""
    lab, results = load_labs()[args.lab], args.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="six-engines-batch-") as folder:
        works, rows = {}, []
        for student, path in submissions_in(args.submissions.resolve()).items():
            try:
                works[student] = unpack(path, Path(folder) / student, lab)
            except CANNOT_UNPACK as error:
                rows.append({"student": student, "points": 0, "problem": f"cannot be unpacked: {one_line(error)}"})
        with ThreadPoolExecutor(args.jobs) as pool:
            rows += pool.map(lambda s: grade_one(lab, s, works[s], results / f"{s}.json", args), works)
        for row in rows if args.due else []:
            charge_lateness(row, received, args.due, policy)
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with (results / "summary.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        pairs = similarity.similar_pairs(lab, works)
    with (results / "similarity.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["exercise", "student", "other", "similarity"])
        writer.writerows(pairs)
    print(f"{len(rows)} submissions, {sum(bool(row['problem']) for row in rows)} with problems: {results}/summary.csv")
    return 0


if __name__ == "__main__":
    sandbox.hide()
    sys.exit(run_command(main))
