"""Pack the files with a lab's exercises: `make submit LAB=d`.

The archive has only the exercises' files, because the grader takes only the listed functions from a submission.
A `.zip`, because every system can open one, with the paths that the files have in `labs/work/`.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

from labs.exercises import WORK, Lab, load_labs
from labs.submission import Unusable, read_answer
from stage_a_naive.entrypoints.interrupts import run_command


def files_of(lab: Lab, work: Path) -> list[Path]:
    """Return the existing files with the lab's exercises."""
    return [file for file in dict.fromkeys(e.copy_in(work) for e in lab.exercises) if file.is_file()]


def pack(lab: Lab, work: Path, target: Path) -> list[str]:
    """Write the archive; return notes for its owner: exercises without a body, and those that cannot be read.

    Raises:
        FileNotFoundError: there are no files to pack.
    """
    files = files_of(lab, work)
    if not files:
        raise FileNotFoundError(f"{work} has no copy of lab {lab.letter}; `make lab-{lab.letter}` writes the starter")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.relative_to(work))
    found = []
    for exercise in lab.exercises:
        try:
            if read_answer(exercise, work) is None:
                found.append(f"{exercise.id}: not started")
        except Unusable as error:
            found.append(f"{exercise.id}: {error}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.submit", description=__doc__.splitlines()[0])
    parser.add_argument("lab", choices=list(load_labs()), help="its letter")
    parser.add_argument("--work", type=Path, default=WORK, help="where the learner's copies are")
    parser.add_argument("--output", type=Path, help="the archive (default: submission-d.zip beside the copies)")
    args = parser.parse_args(argv)
    lab = load_labs()[args.lab]
    target = args.output or args.work / f"submission-{lab.letter}.zip"
    try:
        notes = pack(lab, args.work, target)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{target}: {len(files_of(lab, args.work))} files; hand in this archive")
    print(*(f"  {note}" for note in notes), sep="\n", end="\n" * bool(notes))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
