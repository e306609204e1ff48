"""Read a learner's answers from a submission, and nothing else.

Only the functions that `exercises.toml` lists are taken. Everything around them comes from the reference. The judge
never imports a changed helper, a `conftest.py` or a module that shadows PyTorch, but it reports them.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from labs import bodies
from labs.exercises import Exercise, Lab

SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h")
EDITION = "labs.edition"  # what a student edition adds to given code (`labs.student_repo`)
OWN = (
    "beyond",
    "models",
    "slow",
    "mini",
    "break_it",
    "variants",
    "csrc",
    "old",
    "build",
    "__pycache__",
)  # folders that labs write
TAKES_OVER = ("sitecustomize.py", "usercustomize.py", "conftest.py", "pytest.ini")  # what Python or pytest would run


class Unusable(ValueError):
    """The submission has no answer that can be judged: the function is missing or broken."""


@dataclass(frozen=True)
class Answer:
    """A learner's function.

    Attributes:
        source: its definition, decorators included, as it is in the file; in C++ and CUDA from its name on.
        line: the line of the file where the definition begins, from 1.
        body: what the learner wrote; `body_line` is its first line in the file.
    """

    exercise: Exercise
    file: Path
    source: str
    line: int
    body: str
    body_line: int


def read_answer(exercise: Exercise, work: Path) -> Answer | None:
    """Return the learner's function, or None if its body is still missing.

    Raises:
        Unusable: the function cannot be judged; the message says why, with file and line.
    """
    file = exercise.copy_in(work)
    try:
        return _read(file, file.relative_to(work), exercise)
    except (RecursionError, MemoryError):  # as Python's parser says it
        raise Unusable(f"{file.relative_to(work)}: it is nested too deeply") from None


def _read(file: Path, shown: Path, exercise: Exercise) -> Answer | None:
    link = next((path for path in [file, *file.parents][: len(shown.parts)] if path.is_symlink()), None)
    if link is not None:
        raise Unusable(f"{shown}: {link.name} is a link; hand in the file itself")
    if not file.is_file():
        raise Unusable(f"{shown} is not there")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        span = _span(text, exercise, shown)
    except bodies.BodyNotFound as error:
        raise Unusable(f"{shown}: {error}") from None
    if exercise.is_stub(text[span.body_start : span.body_end]):
        return None
    answer = Answer(
        exercise,
        file,
        text[span.start : span.end],
        _line(text, span.start),
        text[span.body_start : span.body_end],
        _line(text, span.body_start),
    )
    reference = exercise.reference.read_text(encoding="utf-8")
    if exercise.is_python:
        _check_signature(answer, bodies.definition(reference, exercise.name, exercise.path), shown)
    return answer


def _span(text: str, exercise: Exercise, shown: Path) -> bodies.Span:
    try:
        return bodies.find(text, exercise.name, exercise.path)
    except SyntaxError as error:
        problem = f"SyntaxError: {error.msg} ({shown}:{error.lineno})"
    # The error may be in another function of the file; then this one can still be judged.
    start, end = bodies.find_in_broken(text, exercise.name)
    first = _line(text, start)
    outer = "".join(f"{' ' * 4 * depth}class {name}:\n" for depth, name in enumerate(exercise.name.split(".")[:-1]))
    try:
        inner = bodies.find(outer + text[start:end], exercise.name, exercise.path)
    except SyntaxError as error:
        here = first + (error.lineno or 1) - 1 - outer.count("\n")
        raise Unusable(f"SyntaxError: {error.msg} ({shown}:{here})") from None
    except bodies.BodyNotFound:
        raise Unusable(problem) from None
    shift = start - len(outer)
    return bodies.Span(start, end, inner.body_start + shift, inner.body_end + shift, inner.indent)


def _check_signature(answer: Answer, reference: str, shown: Path) -> None:
    theirs, ours = (_signature(source) for source in (answer.source, reference))
    if theirs != ours:
        raise Unusable(
            f"the signature must stay as it is given: expected `{ours}`, got `{theirs}` ({shown}:{answer.line})"
        )


def _signature(source: str) -> str:
    """Return a definition's decorators, name, parameters and result, without its body."""
    node = parse_definition(source)
    node.body = [ast.Pass()]
    return ast.unparse(node).removesuffix("pass").strip()


def parse_definition(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Parse one function, which may be indented like a method."""
    indented = source[:1] in (" ", "\t")
    module = ast.parse(f"if True:\n{source}" if indented else source)
    return module.body[0].body[0] if indented else module.body[0]


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def changes_in_given_code(lab: Lab, work: Path) -> list[str]:
    """List where the learner's copy differs from the reference outside of the exercises, as `file:line: …`."""
    by_file: dict[str, list[Exercise]] = {}
    for exercise in lab.exercises:
        by_file.setdefault(exercise.path, []).append(exercise)
    found = []
    for path in _files_of(lab):
        copy = lab.copy_of(path, work)
        if not copy.is_file():
            continue  # a submission needs only the exercises' files; missing ones are reported there
        theirs = copy.read_text(encoding="utf-8", errors="replace")
        ours = (lab.root / path).read_text(encoding="utf-8")
        if theirs == ours:
            continue
        exercises = by_file.get(path, [])
        try:
            given, lines = _given_lines(theirs, exercises)
        except (SyntaxError, RecursionError, MemoryError, bodies.BodyNotFound):
            continue  # its exercises say so
        expected, _ = _given_lines(ours, exercises)
        matcher = difflib.SequenceMatcher(None, expected, given, autojunk=False)
        changed = [opcode for opcode in matcher.get_opcodes() if opcode[0] != "equal"]
        for _, _, _, begin, _ in changed[:3]:
            at = lines[min(begin, len(lines) - 1)] if lines else 1
            found.append(f"{copy.relative_to(work)}:{at}: given code was changed; the judge uses the reference's")
    return found


def _files_of(lab: Lab) -> list[str]:
    files = [
        path
        for folder in lab.folders
        for path in sorted((lab.root / folder).rglob("*"))
        if path.suffix in SOURCES and "__pycache__" not in path.parts
    ]
    return [str(path.relative_to(lab.root)) for path in files]


def _given_lines(text: str, exercises: list[Exercise]) -> tuple[list[str], list[int]]:
    """Return the lines outside of exercises' bodies, and their numbers."""
    inside: set[int] = set()
    for exercise in exercises:
        span = bodies.find(text, exercise.name, exercise.path)
        # The last line of a body in braces holds the closing brace too; one in Python ends with its newline.
        last = _line(text, span.body_end) - (1 if exercise.is_python else 0)
        inside.update(range(_line(text, span.body_start), last + 1))
    numbered = [(line, i) for i, line in enumerate(text.splitlines(), 1) if i not in inside and EDITION not in line]
    return [line.rstrip() for line, _ in numbered], [i for _, i in numbered]


def intruders(work: Path) -> list[str]:
    """List files that could take over the judge if they were on Python's path, which they never are."""
    found = [path.relative_to(work) for name in TAKES_OVER for path in sorted(work.rglob(name))]
    for path in sorted(work.iterdir()):
        name = path.stem if path.suffix == ".py" else path.name
        own = name.startswith("stage_") or name in OWN
        if own or not name.isidentifier() or path.relative_to(work) in found:
            continue
        if name == "labs" or importlib.util.find_spec(name) is not None:
            found.append(path.relative_to(work))
    return [f"{path}: ignored; it would replace a module of the judge" for path in found if path.parts[0] != "old"]
