"""Tables and pictures from the committed results files; no figure in this repository is typed by hand.

    python -m benchmarks.report            # write the READMEs' tables and the plots
    python -m benchmarks.report --check    # change nothing; exit status 1 where something would change

A README says with a pair of markers where its table goes, for example `<!-- bench:table -->` … `<!-- /bench:table -->`:
`bench:table` is the overview, `bench:details` every figure, `bench:stage_b` the rows of a stage and of the one before.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.markers import fill as fill_marker
from benchmarks.plot import plot_bars, plot_context
from benchmarks.results import ResultsError, load_all
from benchmarks.tables import STAGE_PACKAGES, Group, all_details, caption, group_results, overview

NOTHING = ["No results files yet: run `make bench`, then `make report`."]


def blocks(groups: list[Group], plots: dict[str, list[Path]], readme: Path) -> dict[str, list[str]]:
    """The text for each marker of a README, by the marker's name."""
    found = {"bench:table": table(groups, plots, readme), "bench:details": []}
    for group in groups:
        found["bench:details"] += [*all_details(group), ""]
    for before, package in zip([None, *STAGE_PACKAGES], STAGE_PACKAGES, strict=False):
        name = "_".join(package.split("_")[:2])
        found[f"bench:{name}"] = stage_table(groups, package, before)
    return found


def table(groups: list[Group], plots: dict[str, list[Path]], readme: Path) -> list[str]:
    """The overview: the listed engines of every group, and the pictures."""
    lines = []
    for group in groups:
        named = [engine for engine in group.engines if "[" not in engine]
        lines += [*caption(group), *overview(group, named), ""]
        for path in plots.get(group.slug, []):
            link = Path(os.path.relpath(path, readme.parent)).as_posix()
            lines += [f"![{group.model} on {group.device}: {path.stem.rpartition('-')[2]}]({link})", ""]
    return lines


def stage_table(groups: list[Group], package: str, before: str | None) -> list[str]:
    """The rows of a stage, with those of its variants, and of the stage before, with the spread of the samples."""
    lines = []
    for group in groups:
        packages = {row["engine"]: row["package"] for row in group.rows.values()}
        engines = [
            engine for engine in group.engines
            if packages[engine] == package or (packages[engine] == before and "[" not in engine)
        ]  # fmt: skip
        if any(packages[engine] == package for engine in engines):
            lines += [*caption(group), *overview(group, engines, spread=True), ""]
    return lines


def fill(text: str, found: dict[str, list[str]]) -> str:
    """A README with the text between each of its markers replaced.

    Raises:
        ResultsError: a marker that no table belongs to, or one that is not closed.
    """
    for name in re.findall(r"<!-- (bench:\w+) -->", text):
        if name not in found:
            raise ResultsError(f"there is no table for the marker {name!r}; there are: {', '.join(found)}")
        text = fill_marker(text, name, "\n".join(found[name] or NOTHING).strip())
    return text


def readmes(root: Path) -> list[Path]:
    """Every README that may have markers."""
    places = [root, root / "benchmarks", *(root / package for package in STAGE_PACKAGES)]
    files = [root / "README.zh-CN.md", *(place / "README.md" for place in places)]
    return [file for file in files if file.is_file()]


def write_report(root: Path = ROOT, check: bool = False) -> list[Path]:
    """Fill in all READMEs under `root` from its results files; returns those that changed (or would, with `check`).

    Raises:
        ResultsError: a results file that must not be shown.
    """
    files = load_all(root / "benchmarks" / "results")
    groups = group_results([payload for payload in files.values() if payload["kind"] == "engines"])
    directory = root / "benchmarks" / "plots"
    plots = {}
    for group in groups:
        names = [directory / f"{group.slug}-{kind}.png" for kind in ("bars", "context")]
        drawn = names if check else [plot_bars(group, directory), plot_context(group, directory)]
        plots[group.slug] = [path for path in drawn if path is not None and path.is_file()]
    changed = []
    for readme in readmes(root):
        old = readme.read_text(encoding="utf-8")
        new = fill(old, blocks(groups, plots, readme))
        if new != old:
            changed.append(readme)
            if not check:
                readme.write_text(new, encoding="utf-8")
    return changed


def main(argv: list[str] | None = None) -> int:
    """Write the report; returns 1 where a results file is refused, or where `--check` finds a README out of date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where something would change")
    args = parser.parse_args(argv)
    try:
        changed = write_report(check=args.check)
    except ResultsError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    for readme in changed:
        print(f"{'out of date' if args.check else 'written'}: {readme.relative_to(ROOT)}")
    if not changed:
        print("everything is up to date")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
