'''The renderer: studies declare their tables and pictures as data, and this module makes them.

A study's module has a TOML text with a section for each marker of a lesson:

    TABLES = """
    [kernel-table]
    corner = "rows"
    line = "{rows}"
    column = "{variant}: µs, × the floor"
    cell = "{us:.1f}, {seconds / floor:n} ×"
    let.floor = "num_bytes / ceilings['copy_bytes_per_s']"
    """

A longer text is a `.toml` file next to the module: `[tables.NAME]`, `[pictures.NAME]`.
A table is made of *records*: the rows of a results file, each with the file's own fields and the median of its samples
as `seconds`, `ms` and `us`. A format holds Python expressions (without `:` and `!`) over a record, `let`'s names and
the module. Besides Python's format specifications there are `n` (three digits) and `x` (times). A field that a record
(`row`) lacks becomes a dash.
'''

from __future__ import annotations

import statistics
import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Self

from benchmarks.results import made_from
from benchmarks.text import counted, markdown, number, spread, times

Record = dict[str, object]
WORDS = {"n": number, "x": times}
HELPERS = {"number": number, "times": times, "counted": counted, "spread": spread, "median": statistics.median}


def write(form: str, record: Mapping, missing: str = "–") -> str:
    """Fill a format's expressions; `missing` replaces expressions that name a missing field."""
    found = []
    try:
        for text, expression, spec, _ in string.Formatter().parse(form):
            value = eval(expression, dict(record)) if expression else ""
            found += [text, WORDS[spec](value) if spec in WORDS else format(value, spec or "")]
    except (NameError, TypeError, KeyError):
        return missing
    return "".join(found)


def facts(result: dict) -> Record:
    """Return the names that a format may use of a whole file: its fields, its device, its copy bandwidth in TB/s."""
    copy = result.get("ceilings", {}).get("copy_bytes_per_s", 0) / 1e12
    device = result["environment"]["device"]
    own = {"device": device["name"], "is_cpu": device["type"] == "cpu"}
    return {**result, "result": result, "copy": copy, "copies": f"copies {copy:.2f} TB/s"} | own


def records(result: dict) -> list[Record]:
    """Return the rows of a file, each with the file's fields and the median of its samples."""
    found = [{**facts(result), **row} for row in result["rows"]]
    for row in (row for row in found if row.get("samples")):
        middle = statistics.median(row["samples"])
        row |= {"seconds": middle, "ms": 1e3 * middle, "us": 1e6 * middle}
    return found


HELPERS |= {"records": records, "short": lambda model: model.removeprefix("random:")}


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The records of a table or picture, and their results files.

    Args:
        rows: an expression over the file that returns the records, if they are not its rows.
        where: an expression; records for which it is false are left out.
        let: {name: expression}; names for the formats. `at(model=model, way='plain')` is the record with these fields,
            and `every` is all of them.
        part: of the study, where its files hold parts.
    """

    study: ModuleType
    rows: str = ""
    where: str = "True"
    let: Mapping[str, str] = field(default_factory=dict)
    part: str = ""

    @property
    def names(self) -> Record:
        """Return the names that every format may use."""
        return HELPERS | vars(self.study)

    def of_part(self, results: Sequence[dict]) -> list[dict]:
        return [result for result in results if result.get("part", "") == self.part]

    def records(self, result: dict) -> list[Record]:
        own = eval(self.rows, self.names | facts(result)) if self.rows else records(result)
        every = [self.names | facts(result) | row for row in own]

        def at(**keys: object) -> Record | None:
            return next((row for row in every if all(row.get(key) == value for key, value in keys.items())), None)

        for row in every:
            row |= {"at": at, "row": row, "every": every}
        found = [row for row in every if eval(self.where, row)]
        for name, expression in self.let.items():
            for row in found:
                row[name] = eval(expression, row)
        return found

    def said(self, text: str, result: dict) -> str:
        """Fill a format with the names of a whole file."""
        return write(text, self.names | facts(result))

    @classmethod
    def read(cls, study: ModuleType, name: str) -> dict[str, list[Self]]:
        """Parse a study's `TABLES` or `PICTURES` by section name; a section may occur several times."""
        file = Path(getattr(study, "__file__", "")).with_suffix(".toml") if hasattr(study, "__file__") else None
        if file and file.is_file():
            found = tomllib.loads(file.read_text(encoding="utf-8")).get(name.lower(), {})
        else:
            found = tomllib.loads(getattr(study, name, ""))
        sections = {section: one if isinstance(one, list) else [one] for section, one in found.items()}
        return {section: [cls(study=study, **own) for own in several] for section, several in sections.items()}


@dataclass(frozen=True, kw_only=True)
class Table(Chosen):
    """A table as data.

    Args:
        corner: head of the first column, which names the lines.
        line: first cell of a line. Records with the same first cell share a line if there is a `column`.
        columns, after: {head: format}, placed before and after the columns made from records.
        column: head of a record's column; `cell` is its content; `order` sorts the columns.
        section: records with the same value form a separate table, below `heading`.
        note: text about the measurement, added to the line below the table with machine, versions and commit.
        below: replaces this line.
        behind: a sentence between the table and the line below it.
        each: make a table for each results file instead of only the newest; the expression `files` selects them.

    A column with only dashes is left out. Without `line` there is no table, and the bars of a picture or the
    heading have the figures.
    """

    corner: str = ""
    line: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    column: str = ""
    cell: str = ""
    after: Mapping[str, str] = field(default_factory=dict)
    order: str = "[]"
    section: str = ""
    heading: str = ""
    missing: str = "–"
    note: str = ""
    below: str = ""
    behind: str = ""
    each: bool = False
    files: str = ""

    def of(self, rows: Sequence[Record]) -> list[str]:
        """Return the lines of the tables of these records."""
        found: list[str] = []
        for name in dict.fromkeys(write(self.section, row) for row in rows):
            own = [row for row in rows if write(self.section, row) == name]
            found += [write(self.heading, own[0]), ""] if self.heading else []
            found += [*self.one(own), ""] if self.line else []
        return found

    def one(self, rows: Sequence[Record]) -> list[str]:
        """Return the lines of one table."""
        body: dict[object, tuple[list[str], dict[str, str], list[str]]] = {}
        for i, row in enumerate(rows):
            first = [write(form, row, self.missing) for form in (self.line, *self.columns.values())]
            after = [write(form, row, self.missing) for form in self.after.values()]
            _, cells, _ = body.setdefault(tuple(first) if self.column else i, (first, {}, after))
            if self.column:
                cells[write(self.column, row)] = write(self.cell, row, self.missing)
        made = dict.fromkeys(head for _, cells, _ in body.values() for head in cells)
        heads = list(eval(self.order, rows[0])) or list(made)
        own, after = ([write(head, rows[0]) for head in columns] for columns in (self.columns, self.after))
        lines = [[write(self.corner, rows[0]), *own, *heads, *after]]
        for first, cells, after in body.values():
            lines.append([*first, *(cells.get(head, self.missing) for head in heads), *after])
        shown = (column for column in zip(*lines, strict=True) if set(column[1:]) != {"–"})
        head, *lines = zip(*shown, strict=True)
        return markdown(head, lines)


def tables(study: ModuleType, results: list[dict]) -> dict[str, list[str]]:
    """Return the lines of each marker of a study, from its results files, the newest first."""
    return {marker: lines_of(own, results) for marker, own in Table.read(study, "TABLES").items()}


def lines_of(parts: Sequence[Table], results: list[dict]) -> list[str]:
    """Return the lines of one marker: its tables, which share the line below them."""
    found, last = [], parts[-1]
    results = last.of_part(results)
    usual = "results" if last.each else "results[:1]"
    chosen = [eval(part.files or usual, {"results": results}) for part in parts]
    for result in max(chosen, key=len):
        rows: list[Record] = []
        for part, files in zip(parts, chosen, strict=True):
            rows = part.records(result) if result in files else []
            found += part.of(rows) if rows else []
        if rows:
            found += [last.said(last.behind, result), ""] if last.behind else []
            found += [last.said(last.below, result) or caption(result, last.said(last.note, result)), ""]
    return found


def caption(result: dict, *more: str) -> str:
    """Return the line below a table: how it was measured."""
    where = result["environment"]
    device, versions = where["device"], where["versions"]
    found = [f"{name} {versions[name]}" for name in ("torch", "triton", "flash-attn") if versions.get(name)]
    found.append(made_from(where) + " with changes" * where["dirty"])
    text = "; ".join([", ".join([device["name"], *found]), *filter(None, more)])
    command = f"{result['kind']} part={result['part']}" if "part" in result else result["kind"]
    return f"{text}. `python -m benchmarks.micro {command}`."
