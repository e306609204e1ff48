"""Give the next hint for an exercise: `make hint D.3`. Each says more than the one before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from labs.exercises import WORK, all_exercises, load_labs
from stage_a_naive.entrypoints.interrupts import run_command
from stage_a_naive.entrypoints.language import tr

FILE = "hints.json"  # how many were given, by exercise


def next_hints(exercise_id: str, work: Path = WORK) -> list[str]:
    """Return the hints given so far and one more, if there is one.

    Raises:
        ValueError: there is no such exercise.
    """
    exercises = {exercise.id: exercise for exercise in all_exercises()}
    if exercise_id.upper() not in exercises:
        labs = (f"{lab.exercises[0].id} to {lab.exercises[-1].id}" for lab in load_labs().values())
        said = f"there is no exercise {exercise_id!r};" if exercise_id else "no exercise was named;"
        raise ValueError(f"{said} say `make hint D.3`: there are {', '.join(labs)}")
    exercise = exercises[exercise_id.upper()]
    file = work / FILE
    given = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    given[exercise.id] = min(given.get(exercise.id, 0) + 1, len(exercise.hints))
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
    return list(exercise.hints[: given[exercise.id]])


def main(argv: list[str]) -> int:
    try:
        hints = next_hints(argv[0] if argv else "")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    [exercise] = [e for e in all_exercises() if e.id == argv[0].upper()]
    print(f"{exercise.id} {tr(exercise.title)}")
    for number, hint in enumerate(hints, 1):
        print(f"  {number}. {tr(hint)}")
    left = len(exercise.hints) - len(hints)
    again = tr("({left} more: `make hint {id}` again)").format(left=left, id=exercise.id)
    print(f"  {again if left else tr('(that was the last one)')}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
