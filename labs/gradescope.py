"""Pack and run the autograder for Gradescope, which isolates the answers.

    python -m labs.gradescope pack d autograder.zip
    python -m labs.gradescope run                      what the packed `run_autograder` calls

Gradescope runs a submission as root in a container with a network, so `run` closes the autograder's sources, the
metadata and the results to all other users and lets each answer run as a user who owns nothing
(`sandbox.become_nobody`). Every grading has new inputs, so its output does not help in a later one. It reads the times
of submission and deadline from `submission_metadata.json`; a group is one submission. The format of files and folders
is defined at https://gradescope-autograders.readthedocs.io/.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

from labs import batch, sandbox
from labs.exercises import ROOT, load_labs
from labs.grade import JudgeError, grade
from labs.lateness import Policy, moment
from labs.report import commit
from stage_a_naive.entrypoints.interrupts import run_command

PLACE = Path("/autograder")  # Gradescope's folder
SETTINGS = "settings.json"
# The files of the repository that grading needs.
FOLDERS = ("stage_*", "beyond", "csrc", "labs", "models", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
LEFT_OUT = {"__pycache__", "work", "pack", "notebooks", "build"}
# Gradescope's image has Python 3.10 and its home is root's alone: another Python, where every user may read it.
SETUP = """#!/usr/bin/env bash
set -euo pipefail
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ binutils python3 python3-pip
python3 -m pip install uv
export UV_PYTHON_INSTALL_DIR=/opt/python
uv venv --python 3.12 /opt/venv
cd /autograder/source/course
uv pip install --python /opt/venv/bin/python --torch-backend cpu -c constraints.txt -r pyproject.toml --extra labs
cp -r /autograder/source/course /opt/course
chmod -R a+rX /opt/course /opt/venv /opt/python
chmod 700 /opt/course/stage_* /opt/course/beyond /opt/course/csrc /opt/course/labs  # the reference
"""
RUN = """#!/usr/bin/env bash
set -euo pipefail
cd /opt/course
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
exec /opt/venv/bin/python -m labs.gradescope run
"""


def pack(letter: str, target: Path, policy: Policy) -> None:
    """Write the archive that is uploaded as the autograder."""
    settings = {"lab": letter, "policy": asdict(policy), "commit": commit()}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("setup.sh", SETUP), ("run_autograder", RUN), (SETTINGS, json.dumps(settings))):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o755 if text.startswith("#!") else 0o600) << 16
            archive.writestr(entry, text)
        for top in (path for pattern in FOLDERS for path in sorted(ROOT.glob(pattern))):
            for file in [top, *sorted(top.rglob("*"))]:
                if file.is_file() and not LEFT_OUT.intersection(file.relative_to(ROOT).parts):
                    archive.write(file, Path("course") / file.relative_to(ROOT))


def days_late(metadata: dict, policy: Policy) -> int:
    """Return how many days late a submission is; the latest of a group's deadlines, extensions included, counts."""
    own = [user["assignment"] for user in metadata.get("users", []) if "assignment" in user]
    dues = [entry["due_date"] for entry in [metadata["assignment"], *own] if entry.get("due_date")]
    return policy.days_late(moment(metadata["created_at"]), max(map(moment, dues))) if dues else 0


def results_of(place: Path) -> dict[str, object]:
    """Grade the submission in Gradescope's folders; return the content of `results.json`."""
    source, results = place / "source", place / "results"
    settings = json.loads((source / SETTINGS).read_text(encoding="utf-8"))
    metadata = json.loads((place / "submission_metadata.json").read_text(encoding="utf-8"))
    for closed in (source, results):
        closed.chmod(0o700)
    (place / "submission_metadata.json").chmod(0o600)
    walls = sandbox.walls()
    if not walls:
        raise JudgeError(f"no answer is run without a wall ({sandbox.why_not()})")
    lab, policy = load_labs()[settings["lab"]], Policy(**settings["policy"])
    work = batch.unpack(place / "submission", place, lab)
    report = grade(lab, work, walls=walls, seed=batch.new_seed())
    late = days_late(metadata, policy)
    found = report.as_gradescope()
    if late:
        share = policy.share(late)
        found["score"] = round(report.points * share, 1)
        found["output"] = f"{late} days late: {share:.0%} of the points\n{found['output']}"
    found["extra_data"] |= {"days_late": late, "commit": settings["commit"]}  # what is packed is no checkout
    return found


def run(place: Path) -> int:
    """Grade, and write `results.json` whatever happens."""
    try:
        found = results_of(place)
    except (JudgeError, OSError, ValueError, KeyError) as error:
        found = {"score": 0, "output": f"this submission could not be graded: tell the course's staff ({error})"}
    target = place / "results" / "results.json"
    target.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.gradescope", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the archive to upload")
    packing.add_argument("lab", choices=list(load_labs()))
    packing.add_argument("output", type=Path)
    packing.add_argument("--late-percent", type=float, default=Policy.percent, help="of the points, per day begun")
    packing.add_argument("--late-days", type=int, default=Policy.days, help="after which nothing is left")
    commands.add_parser("run", help="grade the submission in /autograder")
    args = parser.parse_args(argv)
    if args.command == "run":
        return run(PLACE)
    pack(args.lab, args.output, Policy(args.late_percent, args.late_days))
    print(f"{args.output}: {args.output.stat().st_size >> 20} MiB; upload it as the assignment's autograder")
    return 0


if __name__ == "__main__":
    sandbox.hide()
    sys.exit(run_command(main))
