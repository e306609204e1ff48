"""Grade the submissions of a whole course, with several judges at a time, or in a container per student.

    python -m labs.batch d submissions/ results/ --jobs 4
    python -m labs.batch d submissions/ results/ --resume        continue after an interruption
    python -m labs.batch d submissions/ results/ --only ada      one student again

`submissions/` holds one folder or one archive per student, as `make submit`, Moodle or a student's own system packs it.
`results/` gets one JSON per student, `summary.csv` with a row per student and the points and seconds of every exercise,
and `similarity.csv`. The summary is complete after every student, so a run that is interrupted loses none.

A run's inputs follow from a new random seed, the same for all students, so the reference's values are computed once.
The seed is in every report, and `--seed` repeats it.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import re
import secrets
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path, PurePosixPath
from queue import SimpleQueue

from labs import container, sandbox, similarity
from labs.exercises import Lab, load_labs
from labs.grade import Judge, JudgeError, values_of
from labs.lateness import FreeDays, Policy, moment
from labs.report import FORMS, Report, commit, write_json
from stage_a_naive.contract.errors import one_line
from stage_a_naive.entrypoints.interrupts import run_command

STUDENT_SECONDS = 1800.0
MOODLE = re.compile(r"_assignsubmission_file_?$")  # how Moodle's folders end: Ada Lovelace_1234_assignsubmission_file
UNPACKED_BYTES = 256 << 20  # the most that an archive may hold
ARCHIVES = (".tar.gz", ".tar.xz", ".tar.bz2", ".tgz", ".tar", ".zip")
# What the modules that unpack raise for an archive that is broken, encrypted or compressed in a way they do not know.
CANNOT_UNPACK = (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, zlib.error, lzma.LZMAError)
CANNOT_UNPACK += (RuntimeError, ValueError)


def new_seed() -> int:
    """Return a random seed."""
    return 1 + secrets.randbelow(2**40)


def submissions_in(folder: Path) -> dict[str, Path]:
    """Map each student to a folder or file. Every entry that is not hidden counts, so each one gets a row."""
    found: dict[str, Path] = {}
    for path in sorted(path for path in folder.iterdir() if not _is_clutter(path.name)):
        student = path.name.removesuffix(_ending(path)) if path.is_file() else MOODLE.sub("", path.name)
        found[path.name if student in found else student] = path
    return found


def _ending(file: Path) -> str:
    """Return the ending of an archive's name as it is written, "" if it is no archive."""
    found = next((ending for ending in ARCHIVES if file.name.lower().endswith(ending)), "")
    return file.name[len(file.name) - len(found) :]


def unpack(submission: Path, target: Path, lab: Lab) -> Path:
    """Return the folder with the submission's copy of the lab, in the folder itself or in the unpacked archive.

    Only files and folders are unpacked, never outside of `target`. The archive may also contain the folder around the
    copy, and the folder may contain a single archive.

    Raises:
        CANNOT_UNPACK: it is not an archive, or a broken one, one that is too large, or a link.
    """
    if submission.is_symlink():
        raise ValueError(f"{submission.name} is a link; a submission is a folder or an archive")
    if submission.is_dir():
        found = _with_copy(submission, lab)
        archives = [path for path in found.iterdir() if _ending(path) and path.is_file() and not path.is_symlink()]
        if len(archives) != 1 or _has_copy(found, lab):
            return found
        [submission] = archives
    target.mkdir()
    ending = _ending(submission).lower()
    if not ending:
        raise ValueError(f"{submission.name} is none of {', '.join(ARCHIVES)}")
    (_unpack_zip if ending == ".zip" else _unpack_tar)(submission, target)
    return _with_copy(target, lab)


def _has_copy(folder: Path, lab: Lab) -> bool:
    return (folder / lab.prefix / lab.package.replace(".", "/")).exists()


def _with_copy(folder: Path, lab: Lab) -> Path:
    """Return the folder that has the lab's copy: this one, or the only folder in it, and so on."""
    inner = folder
    while not _has_copy(inner, lab):
        folders = [p for p in inner.iterdir() if p.is_dir() and not (p.is_symlink() or _is_clutter(p.name))]
        if len(folders) != 1:
            return folder
        [inner] = folders
    return inner


def _is_clutter(name: str) -> bool:
    """Return whether a file or folder was added by a system, as macOS does to archives."""
    return name.startswith(".") or name == "__MACOSX"


def _check_size(sizes: list[int]) -> None:
    if sum(sizes) > UNPACKED_BYTES:
        raise ValueError(f"it holds {sum(sizes) >> 20} MiB, at most {UNPACKED_BYTES >> 20} are unpacked")


def _unpack_tar(file: Path, target: Path) -> None:
    with tarfile.open(file) as archive:
        # Links are not needed here: the link to the tutor in older packs points to nothing.
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
    """Grade one student, and write the report; returns the row of the summary."""
    target.unlink(missing_ok=True)  # marks of an earlier run
    try:
        report = (_in_container if args.container else _by_judge)(lab, work, args)
    except (JudgeError, OSError, ValueError) as error:
        return {"student": student, "points": 0, "problem": one_line(error)}
    report.commit, report.walls = report.commit or commit(), args.walls
    write_json(report, target, args.form)
    row: dict[str, object] = {"student": student, "points": report.points, "problem": ""}
    row |= {"notes": len(report.notes), "whole_stage": report.whole}
    for mark in report.marks:
        row |= {mark.id: mark.points, f"{mark.id} seconds": mark.seconds}
    return row


def _by_judge(lab: Lab, work: Path, args: argparse.Namespace) -> Report:
    """Let the first free judge make a report; a running judge serves one student after another."""
    judge = args.judges.get()
    try:
        judge.deadline = time.monotonic() + STUDENT_SECONDS
        report = judge.report(lab, work)
    finally:
        args.judges.put(judge)
    for mark in report.marks:
        mark.partial = args.partial
    return report


def _in_container(lab: Lab, work: Path, args: argparse.Namespace) -> Report:
    """Run the grader in a container. It reads the reference's values and writes a report.

    Raises:
        JudgeError: there are no marks.
    """
    options = ["--seed", str(args.seed), "--values", *["--partial"] * args.partial]
    name = f"six-engines-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="six-engines-marks-") as folder:
        results = Path(folder, "results")
        results.mkdir(mode=0o700)
        command = container.command(args.container, name, lab.letter, work, results, STUDENT_SECONDS, options)
        _run(command, json.dumps(args.values), name)
        marks = results / container.MARKS
        if not marks.is_file():
            raise JudgeError("the grader wrote no marks")
        return Report.from_json(json.loads(marks.read_text(encoding="utf-8")))


def _run(command: list[str], values: str, name: str) -> None:
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    try:
        run = subprocess.run(command, input=values, timeout=STUDENT_SECONDS + 60, **pipes, check=False)
    except subprocess.TimeoutExpired:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)
        raise JudgeError(f"not done after {STUDENT_SECONDS:.0f} s") from None
    if run.returncode:
        raise JudgeError((run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1])


def received_in(file: Path) -> dict[str, datetime]:
    """Read when each submission arrived, from the columns `student` and `received` of a table.

    Raises:
        ValueError: a time cannot be read, or has no time zone.
    """
    with file.open(newline="", encoding="utf-8") as table:
        return {row["student"]: moment(row["received"]) for row in csv.DictReader(table)}


def charge_lateness(
    row: dict[str, object],
    received: dict[str, datetime],
    due: datetime,
    policy: Policy,
    take_free_days: Callable[[str, int], int],
) -> None:
    """Subtract the points that lateness costs from a row; the row says if the time is unknown.

    Args:
        take_free_days: returns how many of a student's late days are free.
    """
    student = str(row["student"])
    if student not in received:
        row["problem"] = "; ".join(filter(None, [str(row["problem"]), "no time in the table of --received"]))
        return
    days, points = policy.days_late(received[student], due), float(str(row["points"]))
    free = take_free_days(student, days if points else 0)
    row |= {"days late": days, "free days": free, "points": round(points * policy.share(days - free), 1)}


def read_summary(file: Path) -> dict[str, dict[str, object]]:
    """Map each student to a row of the summary that an earlier run has written; empty if there is none."""
    if not file.is_file():
        return {}
    with file.open(newline="", encoding="utf-8") as table:
        return {row["student"]: dict(row) for row in csv.DictReader(table)}


def write_summary(file: Path, lab: Lab, rows: Iterable[dict[str, object]]) -> None:
    """Replace the summary in one operation, so that readers always find a complete file."""
    columns = ["student", "points", "problem", "days late", "free days", "notes", "whole_stage"]
    columns += [column for exercise in lab.exercises for column in (exercise.id, f"{exercise.id} seconds")]
    unfinished = file.with_suffix(".part")
    with unfinished.open("w", newline="", encoding="utf-8") as table:
        writer = csv.DictWriter(table, columns)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(file)


def grade_all(lab: Lab, works: dict[str, Path], results: Path, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Grade students, `args.jobs` at a time; yield each row when it is done, and print the progress."""
    begin, args.judges = time.monotonic(), SimpleQueue()
    walls = () if args.container else sandbox.walls()
    with ThreadPoolExecutor(args.jobs) as pool, ExitStack() as stack:
        judges = [stack.enter_context(Judge(args.seed, walls, args.values)) for _ in range(args.jobs)]
        for judge in judges:
            args.judges.put(judge)
        futures = [pool.submit(grade_one, lab, s, work, results / f"{s}.json", args) for s, work in works.items()]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                row = future.result()
                left = (time.monotonic() - begin) / done * (len(works) - done) / 60
                said = row["problem"] or f"{row['points']} points"
                print(f"{done}/{len(works)}  {row['student']}: {said}; about {left:.0f} min left", flush=True)
                yield row
        finally:
            for judge in judges:
                judge.deadline = 0.0  # of those that are interrupted
            pool.shutdown(cancel_futures=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.batch", description=__doc__.splitlines()[0])
    parser.add_argument("lab", choices=list(load_labs()))
    parser.add_argument("submissions", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="students at the same time")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the summary that have no problem")
    parser.add_argument("--only", help="a student, or several with commas; the others keep their rows")
    parser.add_argument("--seed", type=int, help="of the inputs, to repeat a run; a new one if it is not given")
    parser.add_argument("--form", choices=list(FORMS), default="plain", help="of each student's JSON")
    parser.add_argument("--partial", action="store_true", help="points in proportion to the tests that pass")
    parser.add_argument("--container", metavar="IMAGE", help="grade each student in a container of this image")
    parser.add_argument("--due", type=moment, help="the deadline, such as 2026-10-01T23:59:00+02:00")
    parser.add_argument("--received", type=Path, help="a table with the columns student and received, for --due")
    parser.add_argument("--late-percent", type=float, default=Policy.percent, help="of the points, per day begun")
    parser.add_argument("--late-days", type=int, default=Policy.days, help="after which nothing is left")
    parser.add_argument(
        "--free-days",
        type=Path,
        help=f"the course's table of late days that cost nothing ({FreeDays.per_course} per student, at most "
        f"{FreeDays.per_lab} for one lab), which this command keeps; for --due",
    )
    args = parser.parse_args(argv)
    if (args.due is None) != (args.received is None):
        parser.error("--due needs --received, and --received needs --due")
    if args.free_days and args.due is None:
        parser.error("--free-days needs --due and --received")
    received = received_in(args.received) if args.received else {}
    policy, free_days = Policy(args.late_percent, args.late_days), FreeDays(args.free_days, args.lab)
    args.walls = f"in containers of {args.container}" if args.container else sandbox.described()
    args.seed = new_seed() if args.seed is None else args.seed
    lab, results = load_labs()[args.lab], args.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    summary, submissions = results / "summary.csv", submissions_in(args.submissions.resolve())
    again = args.only.split(",") if args.only else list(submissions)
    unknown = [student for student in again if student not in submissions]
    if unknown:
        parser.error(
            f"no submission of {', '.join(unknown)} in {args.submissions}: --only takes {', '.join(submissions)}"
        )
    rows = {student: row for student, row in read_summary(summary).items() if student in submissions}
    if args.resume or args.only:
        again = [student for student in again if not (args.resume and student in rows and not rows[student]["problem"])]
    else:
        rows = {}
    judges = commit() or "unknown"
    print(
        f"lab {args.lab}: {len(again)} of {len(submissions)} submissions, commit {judges}, seed {args.seed}; "
        f"answers run {args.walls}",
        flush=True,
    )
    try:
        args.values = values_of(lab, args.seed) if again else {}
    except JudgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def enter(row: dict[str, object]) -> None:
        if args.due:
            charge_lateness(row, received, args.due, policy, free_days.take)
        rows[str(row["student"])] = row
        write_summary(summary, lab, (rows[student] for student in submissions if student in rows))

    with tempfile.TemporaryDirectory(prefix="six-engines-batch-") as folder:
        works = {}
        for student, path in submissions.items():
            try:
                works[student] = unpack(path, Path(folder) / student, lab)
            except CANNOT_UNPACK as error:
                if student in again:
                    enter({"student": student, "points": 0, "problem": f"cannot be unpacked: {one_line(error)}"})
        for row in grade_all(lab, {student: works[student] for student in again if student in works}, results, args):
            enter(row)
        pairs = similarity.similar_pairs(lab, works)
    with (results / "similarity.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["exercise", "student", "other", "similarity"])
        writer.writerows(pairs)
    print(f"{len(rows)} submissions, {sum(bool(r['problem']) for r in rows.values())} with problems: {summary}")
    return 0


if __name__ == "__main__":
    sandbox.hide()
    sys.exit(run_command(main))
