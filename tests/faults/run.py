"""Do the tests notice? Put one fault at a time into a copy of the tree and run the tests that should fail.

    python tests/faults/run.py                      # all of them, two at a time: about half an hour
    python tests/faults/run.py sampler penalties    # those whose file or name contains one of these words
    python tests/faults/run.py --list

`faults.toml` says what a fault is: in `file`, the text `old`, which is there exactly once, becomes `new`, and one of
`tests` (arguments of pytest) must fail. A fault is *caught* when a test fails or does not end within the time limit. It
*survived* when all of them pass: then a test is missing. One with `equivalent = "…"` changes nothing that a caller
could see; it says why, and is not run. The same tests run on an unchanged copy first, because a test that always fails
catches nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = Path(__file__).with_name("faults.toml")
MEMORY = 8 * 2**30  # bytes of address space of a test run: a fault may make a loop endless


@dataclass(frozen=True)
class Fault:
    """One changed line, and the tests that should notice."""

    name: str  # what is wrong then
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""  # why no behaviour changes, where none does

    def matches(self, words: list[str]) -> bool:
        return not words or any(word in self.file or word in self.name for word in words)


def load_faults() -> list[Fault]:
    """The list, in the order of the file."""
    entries = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]
    return [Fault(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def copy_tree(target: Path) -> Path:
    """Copy what git knows of or would add; the models and what was built are linked."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    if (ROOT / "build").exists():
        (target / "build").symlink_to(ROOT / "build")
    return target


def run_tests(tree: Path, tests: tuple[str, ...], timeout: float) -> str:
    """Run pytest in `tree`: "passed", "failed", or "timeout"."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no_shrinking", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(Path(__file__).parent)])
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "timeout"
    if process.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {process.returncode}:\n{output[-2000:]}")
    return "failed" if process.returncode else "passed"


def try_fault(fault: Fault, trees: SimpleQueue[Path], timeout: float) -> str:
    """Run a fault's tests on a copy with the fault in it: "caught" or "survived"."""
    tree = trees.get()
    path = tree / fault.file
    text = path.read_text(encoding="utf-8")
    try:
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.name}: {fault.old!r} is {text.count(fault.old)} times in {fault.file}, not once")
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        outcome = run_tests(tree, fault.tests, timeout)
    finally:
        path.write_text(text, encoding="utf-8")
        trees.put(tree)
    return "survived" if outcome == "passed" else f"caught ({outcome})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose file or name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at the same time (default 2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a test run (default 300)")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    options = parser.parse_args()
    chosen = [fault for fault in load_faults() if fault.matches(options.words)]
    if options.list:
        print(*(f"{fault.file}: {fault.name}" for fault in chosen), sep="\n")
        return 0
    real = [fault for fault in chosen if not fault.equivalent]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.jobs):
            trees.put(copy_tree(Path(folder) / str(i)))
        if not options.no_baseline:
            check_baseline(real, trees, options.timeout, pool)
        outcomes = pool.map(lambda fault: try_fault(fault, trees, options.timeout), real)
        survived = []
        for fault, outcome in zip(real, outcomes, strict=True):
            print(f"{outcome:17} {fault.file}: {fault.name}", flush=True)
            if outcome == "survived":
                survived.append(fault)
    caught = len(real) - len(survived)
    share = f" ({caught / len(real):.0%})" if real else ""
    print(f"{caught} of {len(real)} caught{share}, {len(survived)} survived, {len(chosen) - len(real)} equivalent")
    return int(bool(survived))


def check_baseline(faults: list[Fault], trees: SimpleQueue[Path], timeout: float, pool: ThreadPoolExecutor) -> None:
    """Raise `RuntimeError` if one of the tests does not pass without a fault."""

    def passes(tests: tuple[str, ...]) -> str:
        tree = trees.get()
        try:
            return run_tests(tree, tests, timeout)
        finally:
            trees.put(tree)

    groups = sorted({fault.tests for fault in faults})
    for tests, outcome in zip(groups, pool.map(passes, groups), strict=True):
        if outcome != "passed":
            raise RuntimeError(f"without any fault: {' '.join(tests)} {outcome}")
    print(f"the tests pass without a fault ({len(groups)} runs)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
