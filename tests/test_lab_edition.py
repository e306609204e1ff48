"""The student edition runs: every command of its pages and its notebooks, before a lab is done and after."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labs import bodies, student_repo
from labs.exercises import load_labs

# What a page shows and a test does not run: it installs, downloads, opens a program, takes minutes, or needs a GPU.
WORDS = (
    "pip |git |docker|nvidia|cuda|nsys|ncu|MODEL=|random:|jupyter|benchmarks|<|my_|FORCE|SHOW|measure[.]py|PYTHON=|hint"
)
GOALS = "lab|bench|bench-gpu|compare|notebooks|real-model|clean|ext|submit"
NOT_HERE = re.compile(rf"{WORDS}|make (?:{GOALS})\b(?!-)|--compile|fused")


@pytest.fixture(scope="module")
def editions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {letter: tmp_path_factory.mktemp("edition") / letter for letter in "bd"}
    for letter, folder in folders.items():
        student_repo.write_edition(letter, folder)
    return folders


@pytest.mark.fast
@pytest.mark.parametrize("letter", "abcdef")
def test_every_edition_can_run_its_notebooks(letter: str) -> None:
    assert {Path("notebooks/run.py"), Path("notebooks/a_naive.ipynb")} < set(student_repo.files_of(letter))


def run(edition: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a page in an edition, with this interpreter."""
    words = line.replace("make ", f"make VENV= PYTHON={sys.executable} ", 1) if "make " in line else line
    words = re.sub(r"(?:^|(?<= ))python ", f"{sys.executable} ", words)
    environment = os.environ | {"PYTHONPATH": str(edition), "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(["sh", "-c", words], cwd=edition, env=environment, capture_output=True, text=True)


def solve(letter: str, work: Path) -> None:
    """Write the answers of a lab into an edition's starter."""
    for exercise in load_labs()[letter].exercises:
        file, answer = exercise.copy_in(work), exercise.reference.read_text(encoding="utf-8")
        file.write_text(bodies.transplant(file.read_text(encoding="utf-8"), answer, exercise.name, exercise.path))


def pages(edition: Path) -> dict[str, str]:
    files = [
        *edition.glob("*.md"),
        *edition.glob("labs/*.md"),
        *edition.glob("docs/*.md"),
        *edition.glob("stage_*/*.md"),
    ]
    return {str(file.relative_to(edition)): file.read_text(encoding="utf-8") for file in files}


def commands(text: str) -> list[str]:
    """The commands of a page: lines of code blocks, and code in sentences."""
    blocks = re.findall(r"^(?:```\w*\n|    )((?:make|python|PYTHON\w+=).*?)(?:\s+#.*)?$", text, re.MULTILINE)
    inline = re.findall(r"`((?:make|python|PYTHONSAFEPATH)[^`\n]*)`", text)
    return list(dict.fromkeys(line.strip() for line in [*blocks, *inline]))


@pytest.mark.parametrize("letter", "bd")
def test_no_page_and_no_notebook_names_a_target_that_is_not_there(letter, editions):
    edition = editions[letter]
    makefile = (edition / "Makefile").read_text()
    there = {name for names, _ in student_repo.RULE.findall(makefile) for name in names.split()}
    there |= {
        name
        for kind in ("STAGE", "LAB", "GRADE")
        for name in re.search(rf"^{kind}_TARGETS := (.*)", makefile, re.M)[1].split()
    }
    texts = pages(edition) | {str(file): file.read_text() for file in edition.glob("**/*.ipynb")}
    named = [(page, target) for page, text in texts.items() for target in re.findall(r"`make ([a-z][a-z-]*)", text)]
    named += [
        (page, target) for page, text in texts.items() for target in re.findall(r"^make ([a-z][a-z-]*)", text, re.M)
    ]
    assert [(page, target) for page, target in named if target not in there] == []
    assert "loops" in there and "test" not in there and "serve" not in there


def test_every_lab_of_an_edition_has_its_tests_and_the_grader(editions):
    for letter, folder in editions.items():
        there = {file.name for file in (folder / "labs" / "tests").glob("test_lab_*.py")}
        assert there == {f"test_lab_{name}.py" for name in "abcd"[: "abcd".index(letter) + 1]}
        assert all((folder / "labs" / f"{name}.py").exists() for name in ("grade", "judge", "starter", "submit"))


@pytest.mark.slow
def test_the_learners_copies_come_first_and_the_grader_takes_their_functions_alone(editions, tmp_path):
    edition = Path(shutil.copytree(editions["b"], tmp_path / "course"))
    student_repo.write_values(["a"], edition)
    first = run(edition, "make stage-a")
    assert "error: Lab A.7: the loop behind the contract" in first.stderr and "Traceback" not in first.stderr
    assert run(edition, "make lab-a").returncode == 0
    loop = run(edition, "python -m stage_a_naive.loop")
    assert loop.returncode == 4 and loop.stdout.startswith("generate_uncached 124 tokens")
    assert (
        loop.stderr.splitlines()[-1]
        == "not written yet: A.6, prefill and decode (generate in labs/work/stage_a_naive/loop.py)"
    )
    file = edition / "labs" / "work" / "stage_a_naive" / "chat.py"
    file.write_text(file.read_text() + '\nprint("mine")\n')
    assert "mine" in run(edition, "python -c 'import stage_a_naive.chat'").stdout
    graded = run(edition, "make grade-a ONLY=A.1").stdout
    assert "not started" in graded and "given code was changed" in graded and "__init__" not in graded


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("solved", [False, True], ids=["unsolved", "solved"])
@pytest.mark.parametrize("letter", "bd")
def test_all_commands_of_the_pages_and_the_notebooks_run(letter, solved, editions, tmp_path):
    edition = Path(shutil.copytree(editions[letter], tmp_path / "course"))
    labs = list("abcd"[: "abcd".index(letter) + 1])
    student_repo.write_values(labs, edition)
    results = edition / "benchmarks" / "results.py"  # other tests run at the same time, and here no time is kept
    results.write_text(results.read_text(encoding="utf-8").replace("BUSY = 0.5", "BUSY = 1000"), "utf-8")
    for name in labs:
        assert run(edition, f"make lab-{name}").returncode == 0
        if solved:
            solve(name, edition / "labs" / "work")
    lines = [line for text in pages(edition).values() for line in commands(text) if not NOT_HERE.search(line)]
    lines = [line for line in dict.fromkeys(lines) if not re.match(r"make lab-|make stage-.*LAB", line)]
    assert len(lines) > 10
    wrong = []
    for line in lines:
        done = run(edition, line)
        if solved and line in ("make grade-b", "make grade-d") and "on the tutor: right" not in done.stdout:
            wrong.append((line, done.stdout))
        if done.returncode and (solved or not re.search("not written yet: |Lab [A-D][.]", done.stderr + done.stdout)):
            wrong.append((line, done.returncode, (done.stderr.strip().splitlines() or [""])[-1]))
    for notebook in sorted((edition / "notebooks").glob("*.ipynb")):
        done = run(edition, f"python notebooks/run.py {notebook.stem}")
        if done.returncode:
            wrong.append((notebook.name, done.returncode, done.stderr[-300:]))
        said = notebook.read_text()
        if ("not written yet" in said) == solved:
            wrong.append(
                (notebook.name, "says that something is missing" if solved else "says nothing of what is missing")
            )
    assert wrong == []
