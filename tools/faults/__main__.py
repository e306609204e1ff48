"""Check that tests detect faults: put one fault at a time into a copy of the tree and run the tests that should fail.

    python -m tools.faults                      # all of them, two at a time: about half an hour
    python -m tools.faults sampler penalties    # those whose file or name contains one of these words
    python -m tools.faults --list

`kernels_and_processes.toml` defines the faults: the text that a regular expression matches exactly once in a function
is replaced, and one of `tests` (arguments of pytest) must fail.

    in = "folder/file.cu::function", replace = "…", by = "…", tests = ["…"]

A fault is *caught* when a test fails or does not end within the time limit. It *survived* when all tests pass: then a
test is missing. A fault with `equivalent = "…"` changes nothing that a caller could see; the text says why, and it is
not run. The same tests run on an unchanged copy first, because a test that always fails catches nothing.

`tools.mutants` generates faults in Python code; this list has the faults that it cannot generate.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.changed_tree import ROOT, Change, outcomes, spans_of

LIST = Path(__file__).with_name("kernels_and_processes.toml")


@dataclass(frozen=True)
class Fault:
    """A change of the code, and the tests that should fail."""

    name: str  # what the fault breaks
    place: str  # a file, or `file::function`
    replace: str  # a regular expression, which matches once there
    by: str  # as in `re.sub`
    tests: tuple[str, ...]
    equivalent: str = ""  # why no behaviour changes, if so

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]

    def change(self) -> Change:
        """Return the file with the fault in it.

        Raises:
            ValueError: the text to replace is not there exactly once, or nothing would change.
        """
        file, _, function = self.place.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        parts = [(start, text[start:end]) for start, end in spans_of(file, text, function)]
        found = [(start, part) for start, part in parts for _ in re.finditer(self.replace, part, re.MULTILINE)]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {self.replace!r} is {len(found)} times in {self.place}, not once")
        start, part = found[0]
        changed = re.sub(self.replace, self.by, part, flags=re.MULTILINE)
        if changed == part:
            raise ValueError(f"{self.name}: nothing changes")
        return Change(file, text[:start] + changed + text[start + len(part) :], self.tests)


def load_faults() -> list[Fault]:
    """Return the faults of the list, in order."""
    return [fault_of(entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]]


def fault_of(entry: dict[str, object]) -> Fault:
    """Read an entry."""
    rest = {key: value for key, value in entry.items() if key not in ("in", "tests")}
    return Fault(place=entry["in"], tests=tuple(entry["tests"]), **rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose file or name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at the same time (default 2)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds of processor time for tests (default 300)")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    options = parser.parse_args()
    words = options.words or [""]
    chosen = [fault for fault in load_faults() if any(word in fault.file or word in fault.name for word in words)]
    if options.list:
        print(*(f"{fault.file}: {fault.name}" for fault in chosen), sep="\n")
        return 0
    real = [fault for fault in chosen if not fault.equivalent]
    survived = 0
    results = outcomes([fault.change() for fault in real], options.jobs, options.timeout)
    for fault, outcome in zip(real, results, strict=True):
        survived += outcome == "passed"
        told = "survived" if outcome == "passed" else f"caught ({outcome})"
        print(f"{told:17} {fault.file}: {fault.name}", flush=True)
    print(f"{len(real) - survived} of {len(real)} caught, {survived} survived, {len(chosen) - len(real)} equivalent")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
