"""Grade the submissions of a whole course: one process, or one container, per student.

    python -m labs.batch d submissions/ results/ --jobs 4 --tests hidden/ --seed-secret file

`submissions/` holds one folder or one `.tar.gz` per student, as `instructors.md` says how to pack it. `results/` gets
one JSON per student, `summary.csv` with the points and seconds of every exercise, and `similarity.csv`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import hmac
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labs import similarity
from labs.exercises import ROOT, Lab, load_labs
from labs.report import FORMS
from labs.tests.support import SEED_VARIABLE
from stage_a_naive.errors import one_line
from stage_a_naive.interrupts import run_command

STUDENT_SECONDS = 1800.0


def student_seed(student: str, secret: str) -> int:
    """A number that only the holder of the secret can tell beforehand, the same in every run."""
    return int.from_bytes(hmac.digest(secret.encode(), student.encode(), hashlib.sha256)[:6], "big")


def submissions_in(folder: Path) -> dict[str, Path]:
    """Student -> folder or archive."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() or path.name.endswith((".tar.gz", ".tgz", ".tar")):
            found[path.name.split(".tar")[0].removesuffix(".tgz")] = path
    return found


def unpack(submission: Path, target: Path) -> Path:
    """A folder with the submission: the folder itself, or the archive's content, which cannot write outside of it."""
    if submission.is_dir():
        return submission
    with tarfile.open(submission) as archive:
        archive.extractall(target, filter="data")
    return target


def grade_one(lab: Lab, student: str, work: Path, target: Path, args: argparse.Namespace) -> dict[str, object]:
    """Grade one student in a process of its own; returns the row of the summary."""
    command = [sys.executable, "-m", "labs.grade", lab.letter, "--work", str(work), "--json", str(target)]
    command += ["--tests", str(args.tests.resolve())] if args.tests else []
    command += ["--partial"] if args.partial else []
    if args.run:  # such as: docker run --rm --network none -v {work}:{work} -v {results}:{results} IMAGE {command}
        words = {"work": str(work), "results": str(target.parent), "command": shlex.join(command)}
        command = shlex.split(args.run.format(**words))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if args.secret:
        environment[SEED_VARIABLE] = str(student_seed(student, args.secret))
    try:
        run = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=STUDENT_SECONDS, check=False
        )
        problem = "" if run.returncode == 0 else (run.stderr.strip().splitlines() or ["no reason given"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"not done after {STUDENT_SECONDS:.0f} s"
    row: dict[str, object] = {"student": student, "points": 0, "problem": problem}
    if not problem:
        report = json.loads(target.read_text(encoding="utf-8"))
        row |= {"points": report["points"], "notes": len(report["notes"]), "whole_stage": report["whole_stage"]}
        for mark in report["exercises"]:
            row |= {mark["id"]: mark["points"], f"{mark['id']} seconds": mark["seconds"]}
        if args.form != "plain":
            target.write_text(json.dumps(FORMS[args.form](similarity.report_of(report)), indent=2), encoding="utf-8")
    return row


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
    parser.add_argument("--run", help="how to run {command}: a container, with {work} and {results} mounted")
    args = parser.parse_args(argv)
    args.secret = args.seed_secret.read_text(encoding="utf-8").strip() if args.seed_secret else ""
    lab, results = load_labs()[args.lab], args.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="six-engines-batch-") as folder:
        works, rows = {}, []
        for student, path in submissions_in(args.submissions.resolve()).items():
            try:
                works[student] = unpack(path, Path(folder) / student)
            except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
                rows.append({"student": student, "points": 0, "problem": f"cannot be unpacked: {one_line(error)}"})
        with ThreadPoolExecutor(args.jobs) as pool:
            rows += pool.map(lambda s: grade_one(lab, s, works[s], results / f"{s}.json", args), works)
        pairs = similarity.similar_pairs(lab, works)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (results / "summary.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    with (results / "similarity.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["exercise", "student", "other", "similarity"])
        writer.writerows(pairs)
    print(f"{len(rows)} submissions, {sum(bool(row['problem']) for row in rows)} with problems: {results}/summary.csv")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
