"""Run tests on copies of the tree with one change each, for `tools.faults` and `tools.mutants`."""

from __future__ import annotations

import ast
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
MEMORY = 8 * 2**30  # bytes of address space of a test run: a change may make a loop endless
# A copy's bytecode is never written: two changes of a second might have the same.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Change:
    """A changed file, and the tests that should notice: arguments of pytest."""

    file: str
    text: str  # all of it
    tests: tuple[str, ...]


def outcomes(changes: list[Change], jobs: int, seconds: int) -> Iterator[str]:
    """Run each change's tests; yield "failed", "passed" or "timeout", in the order of the changes.

    All tests first run on an unchanged copy, because a test that always fails detects nothing.

    Args:
        jobs: test runs at the same time, each on its own copy of the tree.
        seconds: limit of a run's processor time. Its elapsed time may be five times as long.

    Raises:
        RuntimeError: the tests do not pass without a change, or pytest could not run them.
    """
    with tempfile.TemporaryDirectory(prefix="changed-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            trees.put(copy_tree(Path(folder) / str(i)))

        def run(change: Change) -> str:
            tree = trees.get()
            path = tree / change.file
            text = path.read_text(encoding="utf-8")
            try:
                path.write_text(change.text, encoding="utf-8")
                return run_tests(tree, change.tests, seconds)
            finally:
                path.write_text(text, encoding="utf-8")
                trees.put(tree)

        texts = {change.file: (ROOT / change.file).read_text(encoding="utf-8") for change in changes}
        unchanged = {change.tests: replace(change, text=texts[change.file]) for change in changes}
        for tests, outcome in zip(unchanged, pool.map(run, unchanged.values()), strict=True):
            if outcome != "passed":
                raise RuntimeError(f"without any change: {' '.join(tests)} {outcome}")
        print(f"the tests pass without a change ({len(unchanged)} runs)", flush=True)
        yield from pool.map(run, changes)


def copy_tree(target: Path) -> Path:
    """Copy the files that git tracks or would add; link built files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    if (ROOT / "build").exists() and not (target / "build").exists():
        (target / "build").symlink_to(ROOT / "build")
    return target


def run_tests(tree: Path, tests: tuple[str, ...], seconds: int) -> str:
    """Run pytest in `tree`: "passed", "failed", or "timeout"."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))

    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no_shrinking", *tests]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests")])}
    own = {"cwd": tree, "env": environment, "preexec_fn": limit, "start_new_session": True}
    log = tree.with_name(f"{tree.name}.log")
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, **own) as process:
        try:
            code = process.wait(5 * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that the tests have started
            return "timeout"
    if code == -signal.SIGXCPU:
        return "timeout"
    if code not in (0, 1, 2):  # neither a test that failed nor one that could not be collected
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {code}:\n{log.read_text()[-2000:]}")
    return "failed" if code else "passed"


# ---- where a function is -------------------------------------------------------------------------------------------


def spans_of(file: str, text: str, function: str) -> list[tuple[int, int]]:
    """Return where in a file's `text` a function, method or class begins and where it ends, its decorators included.

    Args:
        file: its name tells the language: Python, or C++ and CUDA.
        function: `name` or `Class.method`, as deep as needed; "" is the whole file. In C++ a name alone, for all
            functions that have it.

    Raises:
        ValueError: the file has no such function.
    """
    if not function:
        return [(0, len(text))]
    spans = _python_spans(text, function) if file.endswith(".py") else _c_spans(text, function)
    if not spans:
        raise ValueError(f"{file} has no function {function}")
    return spans


def _python_spans(text: str, function: str) -> list[tuple[int, int]]:
    found: list[ast.AST] = [ast.parse(text)]
    for name in function.split("."):
        named = (child for parent in found for child in ast.walk(parent) if isinstance(child, DEFINITIONS))
        found = [child for child in named if child.name == name]
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first_lines = [min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) for node in found]
    return [(starts[first - 1], starts[node.end_lineno]) for first, node in zip(first_lines, found, strict=True)]


def _c_spans(text: str, function: str) -> list[tuple[int, int]]:
    spans = []
    for match in re.finditer(rf"^[^\n;#/]*\b{function}\b", text, re.MULTILINE):
        end = match.end()
        if text[end : end + 1] == "(":
            end = _closed(text, end, "()")
        body = re.compile(r"[^;(){}]*\{").match(text, end)  # a call or a declaration has none
        if body:
            spans.append((match.start(), _closed(text, body.end() - 1, "{}")))
    return spans


def _closed(text: str, start: int, pair: str) -> int:
    """Return where the bracket at `start` ends, one of a `pair`."""
    depth = 0
    for bracket in re.compile(f"[{re.escape(pair)}]").finditer(text, start):
        depth += 1 if bracket[0] == pair[0] else -1
        if depth == 0:
            return bracket.end()
    return len(text)


def function_at(text: str, line: int) -> str:
    """Return the qualified name of the innermost function or class of a Python file at `line`, "" outside of all."""
    names: list[str] = []
    nodes = list(ast.parse(text).body)
    while nodes:
        node = nodes.pop()
        if not node.lineno <= line <= node.end_lineno:
            continue
        if isinstance(node, DEFINITIONS):
            names.append(node.name)
        nodes = [child for child in ast.iter_child_nodes(node) if hasattr(child, "lineno")]
    return ".".join(names)
