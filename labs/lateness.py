"""Compute how late a submission is and what that costs, from recorded times and never from the clock."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Policy:
    """What lateness costs.

    Attributes:
        percent: of the points, for each day that has begun.
        days: after which a submission counts as not handed in.
        grace: minutes that cost nothing.
    """

    percent: float = 10.0
    days: int = 5
    grace: float = 10.0

    def days_late(self, handed_in: datetime, due: datetime) -> int:
        """Return the days begun since the deadline, 0 if it was met. Both times have a time zone."""
        late = handed_in - due
        return 0 if late <= timedelta(minutes=self.grace) else math.ceil(late / timedelta(days=1))

    def share(self, days_late: int) -> float:
        """Return the share of the points that is left."""
        return 0.0 if days_late > self.days else max(0.0, 1 - self.percent / 100 * days_late)


@dataclass(frozen=True)
class FreeDays:
    """The free late days of a course, which a table stores from lab to lab.

    Attributes:
        table: a file with the columns `student`, `lab` and `days`, created if it is missing; None: no free days.
        lab: the letter of the lab that is graded.
    """

    per_course: ClassVar[int] = 4
    per_lab: ClassVar[int] = 2

    table: Path | None
    lab: str

    def take(self, student: str, days_late: int) -> int:
        """Return how many of a student's late days are free, and record them in the table."""
        if self.table is None:
            return 0
        taken: dict[tuple[str, str], int] = {}
        if self.table.is_file():
            with self.table.open(newline="", encoding="utf-8") as file:
                taken = {(row["student"], row["lab"]): int(row["days"]) for row in csv.DictReader(file)}
        taken.pop((student, self.lab), None)  # of an earlier run
        others = sum(days for (name, _), days in taken.items() if name == student)
        free = max(0, min(days_late, self.per_lab, self.per_course - others))
        rows = [(*key, days) for key, days in [*taken.items(), ((student, self.lab), free)] if days]
        with self.table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("student", "lab", "days"), *sorted(rows)])
        return free


def moment(text: str) -> datetime:
    """Parse a time in ISO 8601, such as 2026-10-01T23:59:00+02:00.

    Raises:
        ValueError: it is not a time, or has no time zone.
    """
    found = datetime.fromisoformat(text.strip())
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; write {text.strip()}+02:00 or {text.strip()}Z")
    return found
