"""Make the labs' notebooks for Colab, Kaggle or JupyterLab: handout, answer and grade in one document.

    python -m labs.notebook        writes labs/notebooks/lab_a.ipynb, lab_a.zh-CN.ipynb … from handouts and starters

It also writes the course's address, if `labs/first_cell.py` has one, into all other notebooks.
The cells of a lab's notebook call the functions below.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from labs import bodies
from labs.exercises import LABS, ROOT, WORK, Exercise, Lab, exercise_of, load_labs
from labs.first_cell import FIRST_CELL, REPOSITORY, with_address, with_badge
from labs.hint import next_hints
from labs.starter import AlreadyThere, write_starter
from stage_a_naive.entrypoints.interrupts import run_command

FOLDER = LABS / "notebooks"
EDITIONS = ("", ".zh-CN")  # of a handout: each edition has its own text and the same code
LAB_CELL = (
    FIRST_CELL.replace("{folder}", ".")
    + """
from labs.notebook import answer, grade, hint, run, start

start("{letter}")"""
)


def start(letter: str) -> None:
    """Write the lab's starter to `labs/work/`, unless it is there already."""
    try:
        write_starter(load_labs()[letter])
        print(f"lab {letter.upper()}: your copy is in labs/work/")
    except AlreadyThere:
        print(f"lab {letter.upper()}: your copy was there already, with what you have done")


def answer(exercise_id: str, source: str) -> None:
    """Copy the function's body from a cell into `labs/work/`."""
    exercise = exercise_of(exercise_id)
    file = exercise.copy_in(WORK)
    text, name = file.read_text(encoding="utf-8"), exercise.name.split(".")[-1]
    source = textwrap.dedent(source).strip("\n") + "\n"
    span, theirs = bodies.find(text, exercise.name, exercise.path), bodies.find(source, name, exercise.path)
    body = source[theirs.body_start : theirs.body_end]
    if exercise.is_python:
        body = textwrap.indent(textwrap.dedent(body), span.indent)
    file.write_text(text[: span.body_start] + body + text[span.body_end :], encoding="utf-8")


def grade(key: str, show: bool = False) -> None:
    """Grade one exercise, or a whole lab by its letter."""
    whole = key.lower() in load_labs()
    options = [] if whole else ["--only", key.upper(), *(["--show"] if show else [])]
    _python("-m", "labs.grade", key[0].lower(), *options)


def hint(exercise_id: str) -> None:
    """Print the hints so far, and the next one."""
    print(*next_hints(exercise_id), sep="\n")


def run(module: str, *arguments: str) -> None:
    """Run a stage with your copies instead of the reference."""
    _python("-m", module, *arguments, path=[WORK, ROOT])


def _python(*arguments: str, path: tuple[Path, ...] | list[Path] = (ROOT,)) -> None:
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout + done.stderr)


def cells_of(lab: Lab, edition: str = "") -> list[tuple[str, str]]:
    """Return the cells of a lab's notebook as pairs of "markdown" or "code", and text."""
    handout = (LABS / f"lab_{lab.letter}{edition}.md").read_text(encoding="utf-8")
    handout = re.sub(r"\]\((?!http)", "](../", handout)  # links from a subfolder
    parts = re.split(r"(?=^### [A-Z]\.\d+ )", handout, flags=re.MULTILINE)
    title = with_badge(parts[0].strip(), path_of(lab, edition).relative_to(ROOT), REPOSITORY)
    cells = [("markdown", title), ("code", LAB_CELL.replace("{letter}", lab.letter))]
    for exercise, part in zip(lab.exercises, parts[1:], strict=True):
        text, *rest = re.split(r"(?=^##+ )", part[3:], maxsplit=1, flags=re.MULTILINE)
        cells.append(("markdown", f"###{text.rstrip()}"))
        if exercise.slow:
            note = f'# Repair the function in labs/work/slow with the editor; hint("{exercise.id}") helps.'
            cells.append(("code", f'{note}\ngrade("{exercise.id}")'))
        else:
            cells.append(("code", f"answer(\"{exercise.id}\", r'''\n{_stub(exercise)}''')\ngrade(\"{exercise.id}\")"))
        cells += [("markdown", block.strip()) for block in rest]
    cells.append(("code", f'grade("{lab.letter}")'))
    if lab.package.startswith("stage_"):
        cells.append(("code", f'run("{lab.package}", "--prompt", "What is a KV cache?")'))
    return cells


def _stub(exercise: Exercise) -> str:
    text = exercise.starter_text(exercise.reference.read_text(encoding="utf-8"))
    stub = textwrap.dedent(bodies.definition(text, exercise.name, exercise.path)).rstrip() + "\n"
    if "'''" in stub:
        raise ValueError(f"{exercise.id}: a cell is quoted in ''' and cannot hold another")
    return stub


def path_of(lab: Lab, edition: str = "") -> Path:
    """Return the path of a lab's notebook."""
    return FOLDER / f"lab_{lab.letter}{edition}.ipynb"


def notebook(lab: Lab, edition: str = "") -> str:
    """Return the notebook as JSON."""
    cells = []
    for number, (kind, text) in enumerate(cells_of(lab, edition)):
        cell: dict[str, object] = {"cell_type": kind, "id": f"{lab.letter}-{number}", "metadata": {}}
        cells.append(
            cell
            | {"source": text.splitlines(keepends=True)}
            | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        )
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps(
            {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


def write_address(repository: str) -> None:
    """Write the course's address and a badge into the notebooks that are not labs."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        course = json.loads(path.read_text(encoding="utf-8"))
        texts = [with_address("".join(cell["source"]), repository) for cell in course["cells"]]
        texts[0] = with_badge(texts[0], path.relative_to(ROOT), repository)
        for cell, text in zip(course["cells"], texts, strict=True):
            cell["source"] = text.splitlines(keepends=True)
        path.write_text(json.dumps(course, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    description = "Write the labs as notebooks, from the handouts and the starters, into labs/notebooks/."
    argparse.ArgumentParser(prog="python -m labs.notebook", description=description).parse_args(argv)
    FOLDER.mkdir(exist_ok=True)
    for lab, edition in itertools.product(load_labs().values(), EDITIONS):
        path_of(lab, edition).write_text(notebook(lab, edition), encoding="utf-8")
    write_address(REPOSITORY)
    print(f"{len(load_labs()) * len(EDITIONS)} notebooks in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
