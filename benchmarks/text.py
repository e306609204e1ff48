"""Numbers and tables as text: every table of the benchmark is made with these."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def number(value: float | None) -> str:
    """Format a number with three significant digits, from 100 on as a whole number; None becomes a dash."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def against_floor(figure: str, value: float | None, floor: float | None) -> str:
    """Format the distance from the floor: `2.3 ×` for a time, a share for a rate."""
    if value is None or floor is None:
        return "–"
    return f"{100 * value / floor:.1f} %" if figure.endswith("_per_s") else f"{number(value / floor)} ×"


def spread(values: Sequence[float]) -> str:
    """Return the median, and the range if there are several values."""
    if not values:
        return "–"
    median = number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({number(min(values))}–{number(max(values))})"


def medians(rows: Iterable[dict], *keys: str) -> dict[tuple, float]:
    """Map each row's values of these keys to the median of its samples."""
    return {tuple(row[key] for key in keys): statistics.median(row["samples"]) for row in rows}


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table; all columns but the first are right-aligned."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 row`, `2 rows`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def times(factor: float) -> str:
    return f"{factor:.0f} ×" if factor >= 9.95 else f"{factor:.1f} ×" if factor >= 2 else f"{factor:.2f} ×"
