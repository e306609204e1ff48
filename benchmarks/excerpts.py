"""Code in the READMEs: a lesson shows the code that runs, not a copy typed by hand.

`python -m benchmarks.report` copies it. A lesson names a file, or a function or class in it, between two comments that
readers do not see. `from` and `to` select lines: from the first line that contains the one text to the next that
contains the other.

    <!-- code: stage_a_naive/loop.py::generate -->
    whatever is here is replaced
    <!-- end of code -->

    <!-- code: stage_d_paged/llm.py::LLM.step from `try:` to `raise` -->
    <!-- end of code -->
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from benchmarks.results import ROOT

EXCERPT = re.compile(r"(<!-- code: (\S+)(?: from `(.+?)` to `(.+?)`)? -->\n).*?(<!-- end of code -->)", re.DOTALL)


def excerpt(at: str, root: Path = ROOT) -> str:
    """Return the source of `file`, `file::function` or `file::Class.method`; a method is dedented.

    Raises:
        LookupError: the file has no such function or class.
    """
    path, _, name = at.partition("::")
    source = (root / path).read_text(encoding="utf-8")
    if not name:
        return source.rstrip()
    node: ast.AST | None = ast.parse(source)
    for part in name.split("."):
        node = next((child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part), None)
        if node is None:
            raise LookupError(f"{path} has no {name}")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines)


def cut(source: str, first: str, last: str) -> str:
    """Return the lines from the first that contains `first` to the next that contains `last`, dedented.

    Lines of `#pragma` are left out.

    Raises:
        LookupError: the lines do not exist.
    """
    lines = source.splitlines()
    start = next((i for i, line in enumerate(lines) if first in line), len(lines))
    end = next((i for i, line in enumerate(lines) if i >= start and last in line), None)
    if end is None:
        raise LookupError(f"no lines from {first!r} to {last!r} in: {lines[0]}")
    return textwrap.dedent("\n".join(line for line in lines[start : end + 1] if not line.startswith("#pragma")))


def fill(text: str, root: Path = ROOT) -> str:
    """Replace the code between each pair of comments in a lesson."""

    def block(match: re.Match[str]) -> str:
        opening, at, first, last, closing = match.groups()
        source = excerpt(at, root)
        language = "python" if at.partition("::")[0].endswith(".py") else "cpp"
        return f"{opening}```{language}\n{cut(source, first, last) if first else source}\n```\n{closing}"

    return EXCERPT.sub(block, text)
