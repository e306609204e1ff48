"""Lessons lead somewhere: their links, their headings, and the figures that are drawn for them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import benchmarks.pictures.__main__ as pictures
from benchmarks.engines import select
from benchmarks.pictures import served
from benchmarks.run import build_parser
from labs import notebook, pack

ROOT = Path(__file__).resolve().parent.parent
BESIDE = [ROOT / "docs" / name for name in ("bibliography.md", "debugging.md", "interview.md")]
SLIDES = sorted(ROOT.glob("docs/slides/*.md"))
LESSONS = sorted([*ROOT.glob("stage_*/**/*.md"), *ROOT.glob("beyond/**/*.md"), *BESIDE])
PAGES = sorted(
    {*LESSONS, *(page for room in (".", "docs", "labs", "benchmarks") for page in ROOT.glob(f"{room}/*.md"))}
)


def anchors(text: str) -> set[str]:
    """The names by which the headings of a page can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings_that_are_there(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{target} has no such heading"


PAPER = re.compile(r"(?:arxiv\.org/(?:abs|pdf)/|arxiv:)(\d{4}\.\d{4,5})|doi\.org/([^\s)>\"]+)", re.IGNORECASE)


def test_every_paper_that_a_lesson_or_a_program_links_to_is_in_the_bibliography():
    programs = ("stage_*/**/*.py", "beyond/**/*.py", "benchmarks/**/*.py", "labs/*.py", "csrc/**/*.cu*", "csrc/**/*.h")
    files = [*PAGES, *(path for pattern in programs for path in ROOT.glob(pattern))]
    cited = {str(file.relative_to(ROOT)): set(PAPER.findall(file.read_text(encoding="utf-8"))) for file in files}
    known = cited.pop("docs/bibliography.md")
    assert len(known) > 20 and {name: papers - known for name, papers in cited.items() if papers - known} == {}


NOT_CITED = {"keepachangelog.com"}  # the form of the changelog


def of_whom(address: str) -> str:
    """The owner of a page: a host, or a repository on GitHub."""
    host, *path = address.partition("://")[2].split("/")
    return "/".join([host, *path[:2]]).lower() if host == "github.com" else host


def test_every_system_that_a_lesson_links_to_is_in_the_bibliography():
    link = re.compile(r"\]\((https?://[^)#\s]+)")
    cited = {page.name: {of_whom(a) for a in link.findall(page.read_text(encoding="utf-8"))} for page in PAGES}
    cited["slides"] = {of_whom(a) for page in SLIDES for a in link.findall(page.read_text(encoding="utf-8"))}
    known = {
        of_whom(a) for a in link.findall((ROOT / "docs" / "bibliography.md").read_text(encoding="utf-8"))
    } | NOT_CITED
    assert {name: hosts - known for name, hosts in cited.items() if hosts - known} == {}


@pytest.mark.parametrize("name", pictures.FIGURES)
def test_a_figure_is_drawn_and_shown_by_a_lesson_beside_it(name):
    file = ROOT / name
    assert any(
        (lesson.parent / target).resolve() == file
        for lesson in LESSONS
        for target in re.findall(r"!\[[^]]+\]\(([^)]+)\)", lesson.read_text(encoding="utf-8"))
    )
    assert file.is_file()
    picture = pictures.FIGURES[name]()
    assert b"</text>" in picture.svg and picture.text


def measurements() -> set[str]:
    """The arguments with which a page tells its reader to run the benchmark."""
    found: set[str] = set()
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        found |= {" ".join(arguments.split()) for arguments in re.findall(r"make bench [^`\n]*ARGS='([^']+)'", text)}
        found |= {line.strip() for line in re.findall(r"python -m benchmarks\.run ([^`\n#]+)", text)}
    return found


@pytest.mark.parametrize("arguments", sorted(measurements()))
def test_the_benchmark_takes_what_a_page_tells_its_reader_to_type(arguments):
    if "--help" not in arguments and "=my_module:" not in arguments:
        args = build_parser().parse_args(shlex.split(arguments))
        select(args.engines)


@pytest.mark.parametrize(
    ("module", "folder"), [(pictures, "ROOT"), (served, "ROOT"), (pack, "PACK"), (notebook, "FOLDER")]
)
def test_a_command_that_writes_files_writes_none_for_help(module, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, folder, tmp_path)
    with pytest.raises(SystemExit, match="^0$"):
        module.main(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: python -m {module.__name__.removesuffix('.__main__')} ")
    assert not list(tmp_path.iterdir())
