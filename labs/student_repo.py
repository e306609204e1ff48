"""Write a student edition of the course, without the answers: `make student-repo UPTO=d OUT=…`.

    python -m labs.student_repo d ../course-d

The edition ends with the stage of one lab. In it every exercise's function is its starter, and lessons and notebooks
say "you write this: D.3" instead of showing it. It has no tests, no model answers, no bugs of the break-it exercises,
no later stages and labs, no outputs of notebooks and no git history. In an edition the judge takes missing functions
from the learner's other answers (`labs.tree`), and compares with the values that the reference gave when the edition
was written (`labs/values/`).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from functools import cache
from itertools import chain
from pathlib import Path, PurePath

from labs import bodies
from labs.exercises import LABS, ROOT, STAGES, Exercise, all_exercises, load_labs
from labs.grade import RECORDED, JudgeError, values_of
from stage_a_naive.entrypoints.interrupts import run_command
from tools.export import imported_files

# Lab P is a slow copy of finished engines, so it is handed out as what `make lab-p` writes.
LETTERS = [letter for letter in load_labs() if letter != "p"]
PAGES = ["README", "docs/course", "docs/glossary", "docs/bibliography", "docs/debugging", "docs/installing"]
LESSONS = [f"{page}{end}" for page in PAGES for end in (".md", ".zh-CN.md")] + ["LICENSE"]
TOPS = ["csrc", "labs", "benchmarks", "notebooks", "models", ".devcontainer", "Makefile"]
TOPS += ["CITATION.cff", "pyproject.toml", "constraints.txt", ".gitignore", ".dockerignore", *LESSONS]
TOPS += ["tools/__init__.py", "tools/doctor.py"]
LEFT_OUT = {"__pycache__", "work", "pack", "build", "templates", "history", "local", "mutations.toml"}
FOR_TEACHERS = (
    "instructors.md",
    "instructors.zh-CN.md",
    "pack.py",
    "batch.py",
    "container.py",
    "gradescope.py",
    "lateness.py",
    "similarity.py",
)
TARGETS = {"test", "test-fast", "test-all", "report", "slides", "lint"}  # and those that run missing files
MINE_FIRST = "from labs.edition import mine_first; mine_first(__name__, __path__)  # your copies come first\n"
TRIVIAL = 12  # a line of at most this many characters, without spaces, does not identify an exercise
SHOWN = 0.6  # the share of an exercise's lines from which on code shows the answer
FENCED = re.compile(
    r"(?:<!-- code: ([^\s:]+)(?:::(\S+))?(?: from .*?)? -->\n)?^```\w*\n(.*?)^```$(?:\n<!-- end of code -->)?",
    re.DOTALL | re.MULTILINE,
)
RULE = re.compile(r"^([a-z][a-z -]*):(?![:=]).*\n((?:\t.*\n)*)", re.MULTILINE)
FIRST_CELL = b"    sys.path.insert(0, str(ROOT / folder))\n"
GO_ON = b"""    if folder == "notebooks":
        import labs.edition  # a cell says what is not written yet
"""
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()#\s]*)(#[^()\s]*)?\)")


def code_lines(text: str) -> list[str]:
    """Return the lines that identify a function, without spaces and comments."""
    lines = [re.sub(r"\s+|(#|//) .*", "", line) for line in text.splitlines()]
    return [line for line in lines if len(line) > TRIVIAL]


@cache
def _lines_of(exercise: Exercise) -> list[str]:
    source = exercise.reference.read_text(encoding="utf-8")
    span = bodies.find(source, exercise.name, exercise.path)
    return code_lines(source[span.body_start : span.body_end])


def shown(text: str) -> list[Exercise]:
    """Return the exercises that a text answers: it has most of the reference's lines."""
    there = set(code_lines(text))

    def share(exercise: Exercise) -> float:
        wanted = _lines_of(exercise)
        return sum(line in there for line in wanted) / len(wanted) if wanted else 0.0

    return [exercise for exercise in all_exercises() if share(exercise) >= SHOWN]


def files_of(letter: str) -> list[Path]:
    """Return the files of the edition that ends with a lab, relative to the repository."""
    letters = LETTERS[: LETTERS.index(letter) + 1]
    packages = [package for package in STAGES if package == "beyond" or package[6] in letters]
    if letter in "abcdef":
        packages.remove("beyond")
    others = {exercise.path for exercise in all_exercises() if exercise.lab not in letters}
    tops = [ROOT / top for top in [*packages, *TOPS]]
    found = [path.relative_to(ROOT) for top in tops for path in sorted([top, *top.rglob("*")]) if path.is_file()]
    kept = []
    for file in found:
        of_lab = re.fullmatch(r"(?:test_)?(?:lab|break)_(\w)\.[\w.-]+", file.name)
        of_stage = next((part[6] for part in file.parts if re.fullmatch(r"stage_[a-f]", part)), "a")
        is_later = (
            file.parts[0] == "notebooks"
            and file.suffix == ".ipynb"
            and f"stage_{file.name.partition('.')[0]}" not in packages
        )
        is_later = is_later and "beyond" not in packages
        is_later |= of_stage not in letters or (of_lab is not None and of_lab[1] not in letters)
        is_later |= str(file) in others and file.parts[0] == "labs"
        is_later |= file.parts[0] == "labs" and file.name in (*FOR_TEACHERS, "student_repo.py")
        if not (is_later or LEFT_OUT.intersection(file.parts)):
            kept.append(file)
    return _closed(kept)


def _closed(files: list[Path]) -> list[Path]:
    """Keep the files whose imports exist: measurements of later stages are not in this edition."""
    modules = {file: imported_files(file) for file in files if file.suffix == ".py"}
    while True:
        there = set(files)
        left = [file for file in files if all(map(there.__contains__, modules.get(file, ())))]
        if len(left) == len(files):
            return files
        files = left


def exercises_in(file: PurePath, files: frozenset[Path] | None = None) -> list[Exercise]:
    """Return the exercises whose functions are missing from a copy of a file.

    Args:
        files: of an edition; a stage keeps functions that it runs and that only a later lab asks for. None: all.
    """
    found = [exercise for exercise in all_exercises() if exercise.path == str(file) and not exercise.slow]
    if files is None or not file.parts[0].startswith("stage_"):
        return found
    packages = {letter: lab.package for letter, lab in load_labs().items()}
    return [e for e in found if Path(f"labs/lab_{e.lab}.md") in files or file.parts[0] == packages[e.lab]]


def without_answers(file: Path, files: frozenset[Path]) -> bytes:
    """Return a file's text in the edition."""
    data = (ROOT / file).read_bytes()
    exercises = exercises_in(file, files)
    if exercises:
        text = data.decode()
        for exercise in exercises:
            text = exercise.starter_text(text)
        return text.encode()
    if file.suffix == ".md":
        text = _without_targets(data.decode(), missing_targets(files))
        return _with_links_to(files, file, FENCED.sub(unless_answer, text)).encode()
    if file.suffix == ".ipynb":
        return _notebook(json.loads(data)).encode()
    if file == Path("labs/exercises.toml"):
        return _list(data.decode(), files).encode()
    if file == Path("Makefile"):
        return _makefile(data.decode(), missing_targets(files)).encode()
    if file == Path("labs/first_cell.py"):
        return data.replace(FIRST_CELL, FIRST_CELL + GO_ON)
    if str(file) in {
        f"{folder}/__init__.py" for lab in load_labs().values() for folder in (*lab.folders, "labs/variants")
    }:
        return data + MINE_FIRST.encode()
    return data


@cache
def missing_targets(files: frozenset[Path]) -> frozenset[str]:
    """Return the targets of `make` that need missing files, and those of later stages and labs."""
    found = set(TARGETS)
    for names, recipe in RULE.findall((ROOT / "Makefile").read_text(encoding="utf-8")):
        modules = [
            m.replace(".", "/") for m in re.findall(r"\b((?:benchmarks|beyond|docs|labs|tools)\.[\w.]+)", recipe)
        ]
        if any(files.isdisjoint({Path(f"{module}.py"), Path(f"{module}/__main__.py")}) for module in modules):
            found.update(names.split())
    for letter in load_labs():
        if not any(file.match(f"stage_{letter}_*/__init__.py") for file in files):
            found.add(f"stage-{letter}")
        if Path(f"labs/lab_{letter}.md") not in files:
            found.update((f"lab-{letter}", f"grade-{letter}"))
    return frozenset(found)


def _makefile(text: str, missing: frozenset[str]) -> str:
    """Return the Makefile without these targets' rules and without their names in its lists."""
    text = RULE.sub(lambda rule: "" if missing.issuperset(rule[1].split()) else rule[0], text)
    lists = re.compile(r"^(?:\.PHONY:|\w+_TARGETS :=)(?:.*\\\n)*.*\n", re.MULTILINE)
    text = lists.sub(lambda found: re.sub(rf" (?:{_any_of(missing)})(?=\s)", "", found[0]), text)
    return _up_to_last(text, missing)


def _any_of(targets: frozenset[str]) -> str:
    return "|".join(map(re.escape, sorted(targets, key=len, reverse=True)))


def _up_to_last(text: str, missing: frozenset[str]) -> str:
    """Let `stage-a … stage-f` and similar lists in a text end with the edition's last stage or lab."""
    for kind, end in (("stage", "f"), ("lab", "p"), ("grade", "p")):
        last = [letter for letter in load_labs() if f"{kind}-{letter}" not in missing][-1]
        text = re.sub(rf"({kind}-a`? … (?:`make )?{kind}-){end}\b", rf"\g<1>{last}", text)
    return text


def _without_targets(text: str, missing: frozenset[str]) -> str:
    """Return a text without the commands, rows and sentences that name a missing target."""
    text = _up_to_last(text, missing)
    text = re.sub(rf"^make (?:{_any_of(missing)})(?![\w-]).*\n", "", text, flags=re.MULTILINE)
    named = re.compile(rf"`make (?:{_any_of(missing)})(?![\w-])")
    text = re.sub(rf"[,、] ?{named.pattern}`(?= \|)", "", text)  # the last of a list
    kept = []
    for block in re.split(r"(^```.*?^```\n|^\|[^\n]*\n|\n\s*\n|\n(?=[-*] ))", text, flags=re.DOTALL | re.MULTILINE):
        if not named.search(block) or block.startswith("```"):
            kept.append(block)
        elif block.startswith("|"):
            *cells, last, _ = block.split("|")
            rest = _without_sentences(last, named)
            kept += [] if named.search("|".join(cells)) or not rest.strip() else ["|".join([*cells, f"{rest} ", "\n"])]
        else:
            kept.append(_without_sentences(block, named))
    return "".join(kept)


def _without_sentences(text: str, named: re.Pattern[str]) -> str:
    sentences = re.split(r"(?<=[.?!])[ \n](?=[A-Z`*\[(])|(?<=。)", text)
    return " ".join(sentence for sentence in sentences if not named.search(sentence))


def unless_answer(block: re.Match[str]) -> str:
    """Return a lesson's block of code, or instead of it what the learner writes."""
    path, name, code = block.groups()
    named = (exercise for exercise in all_exercises() if (exercise.path, exercise.name) == (path, name))
    exercise = next(chain(named, shown(code)), None)
    if exercise is None:
        return block[0]
    text = exercise.reference.read_text(encoding="utf-8")
    span = bodies.find(text, exercise.name, exercise.path)
    head = textwrap.dedent(text[span.start : span.body_start])
    if exercise.is_python:
        return f"```python\n{head}    # you write this: {exercise.id}\n```"
    return f"```cpp\n{head}\n    // you write this: {exercise.id}\n}}\n```"


def _with_links_to(files: frozenset[Path], lesson: Path, text: str) -> str:
    """Replace a lesson's links to missing files with plain words."""
    there = files | {parent for file in files for parent in file.parents}

    def plain(link: re.Match[str]) -> str:
        image, words, target, _ = link.groups()
        found = (ROOT / lesson.parent / target).resolve()
        if not target or re.match(r"\w+:", target) or (found.is_relative_to(ROOT) and found.relative_to(ROOT) in there):
            return link[0]
        return "" if image else words

    return LINK.sub(plain, text)


def _notebook(notebook: dict) -> str:
    """Return a notebook without outputs, and without cells that show an answer."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
            for exercise in shown("".join(cell["source"])):
                cell["source"] = [f"# you write this: {exercise.id}"]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _list(text: str, files: frozenset[Path]) -> str:
    """Return the list of exercises of the edition's labs."""
    head, *parts = re.split(r"^(?=\[\w\]$)", text.partition("# Spoilers!")[0], flags=re.MULTILINE)
    return head + "".join(part for part in parts if Path(f"labs/lab_{part[1]}.md") in files)


def write_edition(letter: str, out: Path) -> list[Path]:
    """Write the edition that ends with a lab; return its files.

    Raises:
        FileExistsError: `out` exists.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; choose a new folder: OUT=…")
    files = files_of(letter)
    for file in files:
        target = out / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(without_answers(file, frozenset(files)))
        target.chmod((ROOT / file).stat().st_mode)
    shutil.copy(LABS / "templates" / "edition.py", out / "labs" / "edition.py")
    return [*files, Path("labs/edition.py")]


def write_values(letters: list[str], out: Path) -> None:
    """Write the values that the drivers find on the reference, which an edition lacks. It takes a minute or more."""
    folder = out / RECORDED.relative_to(ROOT)
    folder.mkdir()
    for letter in letters:
        found = json.dumps(values_of(load_labs()[letter], seed=0))
        (folder / f"{letter}.json").write_text(found, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.student_repo", description=__doc__.splitlines()[0])
    parser.add_argument("upto", choices=LETTERS, help="the last lab of the edition")
    parser.add_argument("out", type=Path, help="a new folder")
    args = parser.parse_args(argv)
    try:
        files = write_edition(args.upto, args.out)
        write_values(LETTERS[: LETTERS.index(args.upto) + 1], args.out)
    except (OSError, JudgeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(files)} files in {args.out}; `make lab-{args.upto}` works there")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
