"""Write tables, numbers and pictures from the committed results files, and code from the sources; none by hand.

    python -m benchmarks.report            # write the READMEs' tables, numbers and code, and the pictures
    python -m benchmarks.report --check    # change nothing; exit status 1 if something would change

A pair of hidden comments in a README marks the place of a table: `<!-- bench:table -->` …
`<!-- /bench:table -->`. The tables of engines come from `tables.py`, the others from the modules of `micro`. See
`excerpts.py` for code, `numbers.py` for numbers in sentences, and `reading.py` for reading times. Chinese READMEs get
the same tables and pictures with Chinese texts (`chinese.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import excerpts, micro, reading, render, tables
from benchmarks.chinese import chinese_svg, chinese_table
from benchmarks.groups import Group, group_results, two_values
from benchmarks.loops import PROGRAMS
from benchmarks.numbers import Numbers
from benchmarks.pictures.picture import pictures as pictures_of
from benchmarks.pictures.rates import draw_roofline, plot_rates
from benchmarks.results import RESULTS, ROOT, ResultsError, few_repeats, load_all, made_from, mixture, table_of
from benchmarks.text import markdown
from stage_a_naive.entrypoints.interrupts import run_command

CHINESE = ".zh-CN."
CHINESE_SVG = re.compile(rf"\]\(([^)]+{re.escape(CHINESE)}svg)\)")
MARKER = re.compile(r"<!-- ([\w:-]+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)
NOTHING = ["Not measured yet: `python -m benchmarks.run --help` and `python -m benchmarks.micro` say how."]


def write_report(root: Path = ROOT, check: bool = False) -> list[Path]:
    """Fill in all READMEs under `root` from its results files, and draw; returns what changed, or would with `check`.

    A check reports missing pictures. It compares none, because other versions of matplotlib write other bytes.

    Raises:
        ResultsError: a results file that must not be shown, a marker that no table belongs to, or a number that has no
            measurement.
        LookupError: code that is not there any more.
    """
    files = load_all(root / "benchmarks" / "results")
    groups = group_results(files)
    refuse(files, groups)
    plain, plots = [group for group in groups if not group.study], root / "benchmarks" / "plots"
    drawn = {plots / f"{group.slug}.svg": plot_rates(group) for group in plain}
    drawn |= {plots / f"{g.slug}-roof.svg": draw_roofline(g) for g in plain[:1]}  # the one that stage A's lesson shows
    bodies = tables.engine_tables(groups) | soak_tables([file for file in files if file["kind"] == "soak"])
    for name in micro.names():
        module, results = micro.study(name), [file for file in files if file["kind"] == name]
        bodies |= render.tables(module, results) if results else {}
        drawn |= {root / file: picture for file, picture in pictures_of(module, results).items()}
    changed, pictures = {}, {path: picture.svg for path, picture in drawn.items() if picture}
    numbers = Numbers(root / "benchmarks" / "numbers.toml", files + load_all(root / "benchmarks" / "history"), bodies)
    for page in [*readmes(root), *programs(root)]:
        before = text = page.read_text(encoding="utf-8")
        if page.suffix == ".md":
            own = bodies | {"bench:table": front_page(plain, list(pictures), page)}
            if CHINESE in page.name:
                own = {marker: chinese_table(lines or NOTHING) for marker, lines in own.items()}
            text = fill(excerpts.fill(before, root), own, page)
            text = reading.fill(text, root)
        text = numbers.fill(text, page.name)
        if text != before:
            changed[page] = text.encode()
    numbers.refuse_unused()
    for path, drawing in pictures.items():
        if not (path.is_file() and (check or path.read_bytes() == drawing)):
            changed[path] = drawing
    for path, content in changed.items() if not check else ():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return [*changed, *write_chinese_pictures(root, check)]


def write_chinese_pictures(root: Path, check: bool) -> list[Path]:
    """Write the pictures that Chinese READMEs show, `X.zh-CN.svg` from `X.svg`; returns what changed."""
    pages = [page for page in readmes(root) if CHINESE in page.name]
    shown = {(page.parent / name).resolve() for page in pages for name in CHINESE_SVG.findall(page.read_text("utf-8"))}
    changed = []
    for path in sorted(shown):
        text = chinese_svg(path.with_name(path.name.replace(CHINESE, ".")).read_text("utf-8"))
        if not path.is_file() or path.read_text("utf-8") != text:
            changed.append(path)
            if not check:
                path.write_text(text, "utf-8")
    return changed


def refuse(files: Sequence[dict], groups: Sequence[Group]) -> None:
    """Refuse files that are not one table (one commit, clean, three repeats, today's work) or that no code measures."""
    problems = {tuple(f["file"] for f in group.own): group.problem for group in groups}
    for file in (f for f in files if f["kind"] not in ("engines", "elsewhere")):
        unknown = file["kind"] not in ("soak", *micro.names()) and f"no code measures {file['kind']!r}: a history"
        problems[file["file"],] = unknown or mixture([file]) or few_repeats(file)
    if two := two_values(groups):
        raise ResultsError(f"two values for one figure: {two}")
    for names, problem in problems.items():
        if problem:
            raise ResultsError(f"{', '.join(names)}: not one table: {problem}")


def fill(text: str, bodies: dict[str, list[str]], readme: Path) -> str:
    """Replace the text between each pair of markers in a README.

    Raises:
        ResultsError: a marker that no table belongs to, or one that is not closed.
    """
    opened, closed = (set(re.findall(rf"<!-- {slash}([\w:-]+) -->", text)) for slash in ("", "/"))
    wrong = (opened | closed) - (opened & closed & set(bodies))
    if wrong:
        raise ResultsError(f"{readme.name}: no table, or no end, for the marker {', '.join(sorted(wrong))}")

    def body(match: re.Match[str]) -> str:
        lines = "\n".join(bodies[match[1]] or NOTHING).strip()
        return f"<!-- {match[1]} -->\n{lines}\n<!-- /{match[1]} -->"

    return MARKER.sub(body, text)


def readmes(root: Path) -> list[Path]:
    """Return every README that may have markers, in both languages."""
    front = [file for end in (".md", ".zh-CN.md") if (file := root / f"README{end}").is_file()]
    rooms = ("benchmarks/**", "stage_*/**", "beyond/**", "labs", "docs/**")
    return front + sorted(file for room in rooms for file in root.glob(f"{room}/*.md"))


def programs(root: Path) -> list[Path]:
    """Return the one-screen programs, whose last lines have numbers."""
    return [file for path in PROGRAMS if (file := root / path).is_file()]


def front_page(groups: list[Group], pictures: list[Path], readme: Path) -> list[str]:
    """Return the overview: one table per machine and model, and its picture. The front page has only the first."""
    lines, is_front = [], readme.parent.name != "benchmarks"
    for group in groups[:1] if is_front else groups:
        lines += [*tables.caption(group), *tables.front_table(group, "" if is_front else "../"), ""]
        for path in (path for path in pictures if path.stem == group.slug):
            link = Path(os.path.relpath(path, readme.parent)).as_posix()
            lines += [f"![{group.model} on {group.device}: tokens per second of every stage]({link})", ""]
    return lines


def soak_tables(files: list[dict]) -> dict[str, list[str]]:
    """Return the tables of soak tests by marker: their work, and growth from the first quarter to the end."""
    heads = ["model, device, time", "requests", "answers that differ", "memory in use, MiB", "blocks left in use"]
    bodies: dict[str, list[list[object]]] = {"soak": [], "soak-http": []}
    for file in sorted(files, key=lambda file: file["file"]):
        tally, samples, options = file["tally"], file["rows"], file["options"]
        first, last = samples[len(samples) // 4], samples[-1]
        grown = "; ".join(
            f"{name} {first[key] / 2**20:.1f} → {last[key] / 2**20:.1f}"
            for name, key in (("host", "resident_bytes"), ("device", "device_allocated_bytes"))
            if last[key]
        )
        if options.get("http"):
            ends = "{finished} answered, {aborted} left by their client, {refused} refused"
        else:
            ends = "{finished} finished, {aborted} aborted, {errors} steps failed on purpose"
        what = f"{options['model']}, {options['device']}, {options['minutes']:g} minutes"
        differ = f"{tally['different']} of {tally['compared']}"
        bodies["soak-http" if options.get("http") else "soak"].append(
            [what, ends.format(**tally), differ, grown, last["used_blocks"]]
        )
    return {marker: markdown(heads, body) if body else [] for marker, body in bodies.items()}


def made_of(files: Sequence[dict]) -> list[str]:
    """Return a line for each table: the version or commit of its results files, and the date of the newest one."""
    made = {table_of(file["file"].removesuffix(".json")): file for file in reversed(files)}
    return [f"{name}: {made_from(file['environment'])}" for name, file in sorted(made.items())]


def main(argv: list[str] | None = None) -> int:
    """Write the report; returns 1 if a results file is refused, or if `--check` finds a file out of date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where something would change")
    args = parser.parse_args(argv)
    try:
        changed = write_report(check=args.check)
    except ResultsError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    for file in changed:
        print(f"{'out of date' if args.check else 'written'}: {file.relative_to(ROOT)}")
    if not changed:
        print("everything is up to date")
    if not args.check:
        print(*made_of(load_all(RESULTS)), "`make figures` lists those that are stale", sep="\n")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
