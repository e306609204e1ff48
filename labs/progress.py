"""Show what a learner has done over all labs: `make progress`.

Every grading, of a whole lab or of one exercise, writes its marks to `labs/work/progress.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from labs.exercises import WORK, load_labs
from labs.report import Report
from stage_a_naive.entrypoints.interrupts import run_command
from stage_a_naive.entrypoints.language import tr

FILE = "progress.json"
BAR = 20  # characters


def remember(report: Report, work: Path) -> None:
    """Keep the latest state of each exercise that was judged."""
    states = read(work) | {mark.id: mark.state for mark in report.marks}
    (work / FILE).write_text(json.dumps(states, indent=1) + "\n", encoding="utf-8")


def read(work: Path) -> dict[str, str]:
    """Read the latest state of each exercise that was judged, by its id."""
    file = work / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def table(work: Path) -> str:
    """Return one line per lab, and the first exercise that is not done."""
    states, lines = read(work), []
    for lab in load_labs().values():
        done = [exercise for exercise in lab.exercises if states.get(exercise.id) == "passed"]
        points = sum(exercise.points for exercise in done)
        bar = "█" * round(BAR * points / lab.points)
        lines.append(f"  {lab.letter.upper()}  {bar:·<{BAR}} {points:3}/{lab.points}  {tr(lab.title)}")
    missing = [e for lab in load_labs().values() for e in lab.exercises if states.get(e.id) != "passed"]
    started = [e for e in missing if e.copy_in(work).exists()]
    if missing:
        upcoming = (started or missing)[0]
        line = tr("next: {id} {title} ({minutes} minutes, labs/lab_{lab}.md)")
        line = line.format(id=upcoming.id, title=tr(upcoming.title), minutes=upcoming.minutes, lab=upcoming.lab)
        lines.append(f"\n  {line}")
    return "\n".join(lines)


def main() -> int:
    print(table(WORK))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
