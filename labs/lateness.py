"""How late a submission is, and what that costs: from the times that somebody else has recorded, never the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta


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
        """The days that have begun since the deadline; 0 if it was kept. Both times have a time zone."""
        late = handed_in - due
        return 0 if late <= timedelta(minutes=self.grace) else math.ceil(late / timedelta(days=1))

    def share(self, days_late: int) -> float:
        """The share of the points that is left."""
        return 0.0 if days_late > self.days else max(0.0, 1 - self.percent / 100 * days_late)


def moment(text: str) -> datetime:
    """A time as ISO 8601 has it, such as 2026-10-01T23:59:00+02:00.

    Raises:
        ValueError: it is none, or has no time zone.
    """
    found = datetime.fromisoformat(text.strip())
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; write {text.strip()}+02:00 or {text.strip()}Z")
    return found
