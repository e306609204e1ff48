"""Numbers in sentences: a lesson names the measurement, and `python -m benchmarks.report` writes its value.

In a README a hidden comment after a number has its name: `takes 0.349<!--=f.step--> ms`. The
name is defined in `numbers.toml`:

    [f]
    step = "{h200-qwen2.5-0.5b > F > single > samples > tpot_ms} | .3f"

The braces contain the address of a measurement: a file in `results` (files that end in -1, -2, … are read as one) or
the marker of a table, and the steps to the value. A step is a key, or a text that a row must contain, or `key=value`
for the rows with that value. A number is an index from 0; in a text it counts the numbers there. `sum` adds up. Several
samples give their median. Operators may stand around the braces. After the bar is a Python format or, for words
(`half<!--=c.share--> of it`), a range such as `0.45..0.55`: then nothing is written, and a value outside it is refused.
A format that ends in ` or –` writes a dash until there is a measurement.

`[last lines]` has the bracketed texts in the last lines of the one-screen programs. Definitions, limits and figures
from elsewhere are marked `<!--=given-->`.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from pathlib import Path

from benchmarks.results import ResultsError

MARKED = re.compile(r"(?P<number>\d[\d,.]*|–)?(?P<marker><!--=(?P<name>[\w.]+)-->)")
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
ADDRESS, RANGE = re.compile(r"\{(.+?)\}"), re.compile(r"(-?[\d.]+)\.\.([\d.]+)")


class Numbers:
    """The figures of `numbers.toml`, from results files and from the lines of tables by marker.

    Raises:
        ResultsError: an address that leads nowhere or to different rows, a figure outside its range, or one that is
            defined twice.
    """

    def __init__(self, path: Path, files: list[dict], tables: dict[str, list[str]]) -> None:
        defined = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.lines: dict[str, str] = defined.pop("last lines", {})
        self.texts: dict[str, str | None] = {"given": None}  # None: the words before the marker stay
        self.unused = {f"{part}.{name}" for part, names in defined.items() for name in names}
        self._files, self._tables = files, tables
        meant: dict[str, str] = {}
        for name in sorted(self.unused):
            part, _, own = name.partition(".")
            expression, _, form = defined[part][own].rpartition(" | ")
            form, until_measured, _ = form.partition(" or –")
            if not RANGE.fullmatch(form) and (other := meant.setdefault(expression, name)) != name:
                raise ResultsError(f"numbers.toml: {other} and {name} are one figure; give it one name and one format")
            try:
                self.texts[name] = written(self.value(expression), form)
            except (LookupError, ValueError) as error:
                if until_measured and str(error).endswith("leads to nothing"):
                    self.texts[name] = "–"
                    continue
                raise ResultsError(f"numbers.toml: {name}: {error}") from error

    def value(self, expression: str) -> float:
        """Evaluate arithmetic with addresses."""
        arithmetic = ADDRESS.sub(lambda match: repr(self.at(match[1])), expression)
        if not re.fullmatch(r"[-+*/(). \de]+", arithmetic):
            raise ValueError(f"{expression!r} is not arithmetic with addresses in braces")
        return eval(arithmetic)  # digits and operators alone

    def at(self, address: str) -> float:
        """Return the median of the values at an address.

        Raises:
            LookupError: nothing is there, or the rows are not repeats of one measurement.
        """
        source, *steps = address.split(" > ")
        found: list = [file for file in self._files if re.fullmatch(re.escape(source) + r"(-\d+)?\.json", file["file"])]
        found.sort(key=lambda file: file["file"])
        if found and steps[0] not in found[0]:
            steps.insert(0, "rows")
        found = found or table_rows(self._tables.get(source, []))
        for step in steps:
            found = taken(found, step)
        values = [figures(item) for item in found]
        if not values or any(len(value) != 1 for value in values):
            raise LookupError(f"{{{address}}} leads to {'what is not one figure' if values else 'nothing'}")
        return statistics.median(value for [value] in values)

    def fill(self, text: str, file: str) -> str:
        """Write the numbers of a README or a program."""

        def number(match: re.Match[str]) -> str:
            if match["name"] not in self.texts:
                raise ResultsError(f"{file}: numbers.toml defines no {match['name']!r}")
            self.unused.discard(match["name"])
            new = self.texts[match["name"]]
            if new and not match["number"]:
                raise ResultsError(f"{file}: no number is before {match['marker']}")
            return (new or match["number"] or "") + match["marker"]

        for counted, template in self.lines.items():
            last_line = re.compile(rf"({re.escape(counted)}: .*\[)[^\]]*")
            if last_line.search(text):
                text = last_line.sub(rf"\g<1>{self.line(template)}", text)
        return MARKED.sub(number, text)

    def refuse_unused(self) -> None:
        """Refuse numbers that no README uses, after all have been filled."""
        if self.unused:
            raise ResultsError(f"numbers.toml: no README has {', '.join(sorted(self.unused))}")

    def line(self, template: str) -> str:
        """Return a program's line about a measurement elsewhere: its template with the numbers filled in."""
        names = set(re.findall(r"\{(.+?)\}", template))
        self.unused -= names
        if missing := names - self.texts.keys():
            raise ResultsError(f"numbers.toml defines no {', '.join(sorted(missing))}")
        return re.sub(r"\{(.+?)\}", lambda match: self.texts[match[1]], template)


def table_rows(lines: list[str]) -> list[dict[str, str]]:
    """Return the rows of a marker's tables by column head, with the bold line before a table as `title`."""
    rows, title, heads = [], "", None
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            title, heads = (re.findall(r"^\*\*(.+?)\*\*", line) or [title])[0], None
        elif heads is None:
            heads = cells
        elif not line.startswith("|---"):
            rows.append({"title": title} | dict(zip(heads, cells, strict=True)))
    return rows


def taken(found: list, step: str) -> list:
    """Follow one step of an address.

    Raises:
        LookupError: the step takes a value from rows of several measurements.
    """
    rows = [row for row in found if isinstance(row, dict)]
    if holders := [row for row in rows if step in row]:
        first, repeated = holders[0], ("file", "repeat", step)
        for key in (k for row in holders for k, v in row.items() if isinstance(v, str | int) and k not in repeated):
            if any(row.get(key) != first.get(key) for row in holders):
                raise LookupError(f"{step!r} is in several rows; say which {key!r}")
        values = [row[step] for row in holders]
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    if rows:
        key, equal, value = step.partition("=")
        return [row for row in rows if step in row.values() or (equal and str(row.get(key)) == value)]
    if found and step == "sum":
        return [sum(found)]
    if not found or not re.fullmatch(r"-?\d+", step):
        return []
    if isinstance(found[0], list):
        return [item[int(step)] for item in found]
    return [[figure for item in found for figure in figures(item)][int(step)]]


def figures(item: object) -> list[float]:
    """Return a number, or the numbers in a text."""
    if isinstance(item, str):
        return [float(text.replace(",", "")) for text in FIGURE.findall(item)]
    return [item] if isinstance(item, int | float) else []


def written(value: float, form: str) -> str | None:
    """Format a figure for a sentence; None if the sentence uses words for a range of values.

    Raises:
        ValueError: it is outside the range, or `form` is not a format.
    """
    if not (words := RANGE.fullmatch(form)):
        return format(value, form)
    if not float(words[1]) <= value <= float(words[2]):
        raise ValueError(f"{value:.4g} is outside {form}: the sentence is not true any more")
    return None
