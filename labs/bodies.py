"""Find the body of a function in a file's text, and put another in its place.

Only the lines of the body change. Everything else stays byte for byte, including decorators, signature, docstring and
their comments, because these are the learner's specification. Python is read with `ast`; in C++ and CUDA a definition
is a name, a parameter list and a brace, and its body ends at the brace that matches.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass


class BodyNotFound(LookupError):
    """There is no such function in the text, or more than one."""


@dataclass(frozen=True)
class Span:
    """The position of a function: character offsets into the text.

    Attributes:
        start, end: of the whole definition; in Python with its decorators, in C++ from the name on.
        body_start, body_end: of the body, without the docstring; whole lines in Python, between the braces in C++.
        indent: of the body's lines.
    """

    start: int
    end: int
    body_start: int
    body_end: int
    indent: str


def find(text: str, name: str, path: str) -> Span:
    """Find where the function `name` (`function` or `Class.method`) is defined in the text of `path`."""
    return _find_python(text, name) if path.endswith(".py") else _find_braces(text, name)


def stub(text: str, name: str, path: str, message: str) -> str:
    """Return the text with the function's body replaced by one that fails with `message`.

    Python raises `NotImplementedError`, and so does C++ called from Python. In CUDA it is a compile-time error: a
    kernel cannot raise, and its output is often lost when it fails.
    """
    span = find(text, name, path)
    body = f"{span.indent}{stub_statement(path, message)}\n"
    return text[: span.body_start] + ("" if path.endswith(".py") else "\n") + body + text[span.body_end :]


def stub_statement(path: str, message: str) -> str:
    """Return the statement that replaces a missing body."""
    if path.endswith(".py"):
        return f'raise NotImplementedError("{message}")'
    if path.endswith((".cu", ".cuh")):
        return f'static_assert(false, "{message}");'
    return f'TORCH_CHECK_NOT_IMPLEMENTED(false, "{message}");'


def transplant(text: str, donor: str, name: str, path: str) -> str:
    """Return the text with the function's body from another version of the file."""
    here, there = find(text, name, path), find(donor, name, path)
    return text[: here.body_start] + donor[there.body_start : there.body_end] + text[here.body_end :]


def definition(text: str, name: str, path: str) -> str:
    """Return the whole function as it is in the text."""
    span = find(text, name, path)
    return text[span.start : span.end]


def find_in_broken(text: str, name: str) -> tuple[int, int]:
    """Find a Python function in a file that does not parse, by its indentation; return its offsets.

    The function ends where a later line is indented no deeper, so a syntax error elsewhere in the file does not matter.
    """
    lines = text.splitlines(keepends=True)
    found = [i for i, line in enumerate(lines) if re.match(rf"\s*def {name.split('.')[-1]}\(", line)]
    if len(found) != 1:
        raise BodyNotFound(f"{len(found)} definitions of {name}, expected one")
    first = last = found[0]
    indent = _indent(lines[first])
    while first and lines[first - 1].lstrip().startswith("@") and _indent(lines[first - 1]) == indent:
        first -= 1
    for i in range(last + 1, len(lines)):
        if lines[i].strip() and _indent(lines[i]) <= indent and not lines[i].lstrip().startswith((")", "#")):
            break
        last = i
    return len("".join(lines[:first])), len("".join(lines[: last + 1]))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _find_python(text: str, name: str) -> Span:
    scope: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = [node for node in scope.body if getattr(node, "name", None) == part]
        if len(found) != 1:
            raise BodyNotFound(f"{len(found)} definitions of {name}, expected one")
        [scope] = found
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        raise BodyNotFound(f"{name} is not a function")
    starts = [0]  # offset of each line
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
    if ast.get_docstring(scope, clean=False) is not None:
        before_body = scope.body[0].end_lineno
    else:
        before_body = _signature_end(text, scope.lineno)
    if before_body >= scope.end_lineno:
        raise BodyNotFound(f"{name} has no separate body")
    indent = " " * scope.body[0].col_offset
    return Span(starts[first - 1], starts[scope.end_lineno], starts[before_body], starts[scope.end_lineno], indent)


def _signature_end(text: str, lineno: int) -> int:
    """Return the last line of the `def` statement that starts at `lineno`."""
    lines = text.splitlines(keepends=True)[lineno - 1 :]
    for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
        if token.type == tokenize.NEWLINE:
            return lineno - 1 + token.end[0]
    raise BodyNotFound(f"the statement at line {lineno} has no end")


def _find_braces(text: str, name: str) -> Span:
    code = _blank_comments_and_strings(text)
    found = []
    for match in re.finditer(rf"\b{re.escape(name)}\s*\(", code):
        closed = _matching(code, match.end() - 1, "()")
        opening = re.compile(r"\s*(?:const\s*|noexcept\s*)*\{").match(code, closed)
        if opening:
            found.append((match.start(), opening.end() - 1))
    if len(found) != 1:
        raise BodyNotFound(f"{len(found)} definitions of {name}, expected one")
    [(start, brace)] = found
    end = _matching(code, brace, "{}")
    return Span(start, end, brace + 1, end - 1, "  ")


def _matching(code: str, at: int, pair: str) -> int:
    """Return the offset after the bracket that closes the one at `at`."""
    depth = 0
    for offset in range(at, len(code)):
        depth += (code[offset] == pair[0]) - (code[offset] == pair[1])
        if depth == 0:
            return offset + 1
    raise BodyNotFound(f"the bracket at offset {at} is never closed")


def _blank_comments_and_strings(text: str) -> str:
    """Replace everything that is not code by spaces, so that a brace in a comment does not count."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match.group()), text, flags=re.DOTALL)
