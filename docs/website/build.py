"""`make site`: the course as a website, from the same Markdown.

The pages lie beside the code that they explain, and link to it. This script gathers them into `build/website/pages`, as
MkDocs wants them, and MkDocs writes `build/website/site`:

    README.md          -> index.md; X.zh-CN.md is the Chinese edition of X.md, and an untranslated page stays English
    figures            are copied
    notebooks          become pages, with their outputs
    links to code      lead to a page with that file, or with `--repository URL` to the file there
    English, 中文       lead from a page to its other edition; all other links stay in the reader's language
    --students         leaves out instructors' pages and the answers to exercises, in lessons, notebooks and code
    Colab              opens a notebook of `--repository`: a link below its title, as no picture comes from elsewhere
    stages' classes    have pages made from their docstrings, without importing them
"""

from __future__ import annotations

from stage_a_naive.entrypoints.interrupts import run_command  # before all other imports

# isort: split
import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from labs import student_repo
from labs.first_cell import REPOSITORY, with_badge

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "website"
LINK = re.compile(r"(\]\(|(?:src|srcset|href)=\")([^)\"\s]+)")
EDITION = re.compile(r"\[([^\[\]]+)\]\(([^)\s#]+)\)")  # perhaps a link to the page in the other language
BADGE = re.compile(r"\[!\[(.*?)\]\(http.*?\)\]")
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2", re.MULTILINE | re.DOTALL)
LIST = re.compile(r"^((?! *(?:[-*]|1\.) | *$|[|#<]).+)\n(?=(?:[-*]|1\.) )", re.MULTILINE)  # begins below a line of text
LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda", ".cpp": "cpp", ".h": "cpp", ".toml": "toml"}
FIGURES = (".svg", ".png", ".gif", ".webp")
FOR_TEACHERS = {PurePosixPath(f"labs/instructors{end}") for end in (".md", ".zh-CN.md")}
LEFT_OUT = ("labs/templates", "tests", ".github")  # no pages for readers


def tracked(suffix: str) -> list[PurePosixPath]:
    """Files of the repository whose names end so."""
    done = subprocess.run(["git", "ls-files", f"*{suffix}"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [PurePosixPath(line) for line in done.stdout.splitlines()]
    return [file for file in files if not str(file).startswith(LEFT_OUT)]


def place_of(file: PurePosixPath) -> PurePosixPath:
    """Where a page of the repository lies in the site's sources."""
    return file.with_name(re.sub(r"^README\b", "index", file.stem).replace(".zh-CN", ".zh") + ".md")


def figure_place(file: PurePosixPath) -> PurePosixPath:
    """Where a figure lies: without `.zh-CN`, which MkDocs would take for a language that the site does not have."""
    return file.with_name(file.name.replace(".zh-CN.", "_zh-CN."))


def address_of(place: PurePosixPath) -> PurePosixPath:
    """Where MkDocs writes what lies there in the site's sources: pages in Chinese in the folder `zh`."""
    page = place.with_suffix(".html") if place.suffix == ".md" else place
    return PurePosixPath("zh", page.with_name(page.name.replace(".zh.", "."))) if ".zh" in place.suffixes else page


def source_place(file: PurePosixPath) -> PurePosixPath:
    """Where the page of a file of code lies: without a dot, behind which MkDocs would look for a language."""
    return PurePosixPath("source", str(file).replace(".", "_") + ".md")


class Gatherer:
    """Copies pages and what they show and link to.

    Args:
        pages: the folder of the site's sources.
        repository: where links to code lead; "" is a page of the site for each file.
        students: without instructors' pages and the answers to exercises.
    """

    def __init__(self, pages: Path, repository: str, students: bool = False) -> None:
        self.pages = pages
        self.repository = repository.rstrip("/")
        self.students = students
        self.places = {file: place_of(file) for file in (*tracked(".md"), *tracked(".ipynb"))}
        if students:
            self.places = {file: place for file, place in self.places.items() if file not in FOR_TEACHERS}
        self.sources: set[PurePosixPath] = set()  # files that a page links to, and folders

    def gather(self) -> None:
        """Write all pages.

        Raises:
            ValueError: a link leads to nothing; all such links are named.
        """
        missing: list[str] = []
        for file, place in self.places.items():
            text = self.text_of(file, place)
            self.write(place, self.with_links(text, file, missing))
        for file in sorted(self.sources):
            self.write(source_place(file), source_text(file, self.students))
        for package in sorted(ROOT.glob("stage_?_*")):
            self.write(PurePosixPath("api", f"{package.name}.md"), f"# {package.name}\n\n{api_text(package)}")
        shutil.copy(ROOT / "docs" / "website" / "wide.css", self.pages)
        self.add_slides(ROOT / "build" / "slides")
        if missing:
            raise ValueError("links that lead nowhere:\n" + "\n".join(missing))

    def text_of(self, file: PurePosixPath, place: PurePosixPath) -> str:
        """Return a page's text, with the repository's links still; a notebook's pictures are written."""
        if file.suffix == ".ipynb":
            text = notebook_text(file, self.pages / place, self.students)
            text = with_badge(text, Path(file), self.repository or REPOSITORY)
        else:
            text = (ROOT / file).read_text("utf-8")
        if self.students:
            text = student_repo.FENCED.sub(student_repo.unless_answer, text)
        return BADGE.sub(r"[\1]", text)

    def add_slides(self, folder: Path) -> None:
        """Put the slides that `make slides` has built beside their pages, and name them on the first of these."""
        for page, end, said in (("index.md", "", "\nAs PDF: {}.\n"), ("index.zh.md", ".zh-CN", "\nPDF：{}\n")):
            decks = sorted(folder.glob(f"week?{end}.pdf"))
            for deck in decks:
                shutil.copy(deck, self.pages / "docs" / "slides")
            if decks:
                links = ", ".join(f"[{deck.stem[4]}]({deck.name})" for deck in decks)
                with open(self.pages / "docs" / "slides" / page, "a", encoding="utf-8") as file:
                    file.write(said.format(links))

    def write(self, place: PurePosixPath, text: str) -> None:
        path = self.pages / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def with_links(self, text: str, file: PurePosixPath, missing: list[str]) -> str:
        """Return a page's text with links that hold in the site; code between fences stays as it is."""

        def mended(prose: str) -> str:
            linked = LINK.sub(replace, EDITION.sub(to_other_edition, prose))
            return LIST.sub(r"\1\n\n", linked)  # MkDocs wants an empty line before a list

        def to_other_edition(match: re.Match[str]) -> str:
            """Return a link to the other edition as HTML: MkDocs would keep it in the reader's language."""
            words, name = match.groups()
            other = PurePosixPath(os.path.normpath(file.parent / name))
            same = str(other).replace(".zh-CN.", ".") == str(file).replace(".zh-CN.", ".")
            return f'<a href="{name}">{words}</a>' if same and other != file else match[0]

        def replace(match: re.Match[str]) -> str:
            before, target = match.groups()
            if re.match(r"[a-z]+:|#|data:", target):
                return match[0]
            name, hash_sign, anchor = unquote(target).partition("#")
            found = PurePosixPath(os.path.normpath(file.parent / name))
            if self.students and found in FOR_TEACHERS:
                return f"{before}#"
            if not (ROOT / found).exists():
                if not (self.pages / found).is_file():  # as a notebook's picture is
                    missing.append(f"{file}: {target}")
                return match[0]
            return before + self.target(found, place_of(file), hash_sign + anchor, is_html=before != "](")

        pieces, end = [], 0
        for fence in FENCE.finditer(text):
            pieces += [mended(text[end : fence.start()]), fence[0]]
            end = fence.end()
        return "".join([*pieces, mended(text[end:])])

    def target(self, found: PurePosixPath, page: PurePosixPath, anchor: str, is_html: bool) -> str:
        """Return what a page's link to a file or folder of the repository becomes; MkDocs leaves HTML alone."""
        if (ROOT / found).is_dir() and found / "README.md" in self.places:
            found /= "README.md"
        if found.suffix in FIGURES:
            place = figure_place(found)
            (self.pages / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / found, self.pages / place)
        elif found in self.places:
            place = self.places[found]
        elif self.repository:
            return f"{self.repository}/{'tree' if (ROOT / found).is_dir() else 'blob'}/main/{found}{anchor}"
        else:
            self.sources.add(found)
            place, anchor = source_place(found), re.sub(r"^#L", "#__codelineno-0-", anchor)
        if is_html:
            place, page = address_of(place), address_of(page)
        return os.path.relpath(place, page.parent) + anchor


def notebook_text(file: PurePosixPath, path: Path, students: bool) -> str:
    """Return a notebook as Markdown; its pictures are written beside `path`."""
    import nbconvert
    import nbformat

    notebook = nbformat.read(ROOT / file, as_version=4)
    for cell in notebook.cells if students else []:
        said = [str(text) for output in cell.get("outputs", []) for text in (output.get("text"), output.get("data"))]
        for exercise in student_repo.shown("\n".join([cell.source, *said])):
            cell.source, cell["outputs"] = f"# you write this: {exercise.id}", []
    exporter = nbconvert.MarkdownExporter()
    folder = path.with_suffix("").name + "_files"
    text, resources = exporter.from_notebook_node(notebook, resources={"output_files_dir": folder})
    for name, content in resources["outputs"].items():
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).write_bytes(content)
    return text


def source_text(file: PurePosixPath, students: bool) -> str:
    """Return the page of a file of code, or of a folder."""
    if (ROOT / file).is_dir():
        names = sorted(path.name for path in (ROOT / file).iterdir() if not path.name.startswith((".", "__py")))
        return f"# {file}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    language = LANGUAGES.get(file.suffix, "text")
    text = (ROOT / file).read_text(encoding="utf-8")
    for exercise in student_repo.exercises_in(file) if students else []:
        text = exercise.starter_text(text)
    ticks = "`" * (1 + max([2, *map(len, re.findall("`+", text))]))  # a fence that the text does not end
    return f'# {file.name}\n\n`{file}`\n\n{ticks}{language} linenums="1"\n{text}\n{ticks}\n'


def api_text(package: Path) -> str:
    """Return the directives that make a stage's reference from its docstrings."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(package.glob("*.py"))]
    return "\n\n".join(f"::: {name}" for name in names if not name.endswith(("__init__", "__main__", "loop")))


def for_students(config: str) -> str:
    """Return MkDocs' settings for a file in `BUILD`, without the entry of instructors' pages."""
    kept = [line for line in config.splitlines() if not any(str(page) in line for page in FOR_TEACHERS)]
    return "\n".join(kept).replace("../../build/website/", "") + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m docs.website.build", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--repository", default="", help="address that links to code lead to (default: pages of the site)"
    )
    parser.add_argument("--students", action="store_true", help="without instructors' pages and answers to exercises")
    arguments = parser.parse_args(argv)
    shutil.rmtree(BUILD, ignore_errors=True)
    try:
        Gatherer(BUILD / "pages", arguments.repository, arguments.students).gather()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = ROOT / "docs" / "website" / "mkdocs.yml"
    if arguments.students:
        config = BUILD / "mkdocs.yml"
        config.write_text(for_students((ROOT / "docs" / "website" / "mkdocs.yml").read_text(encoding="utf-8")))
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        str(config),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the versions are pinned
    status = subprocess.run(command, env=environment, check=False).returncode
    if status == 0:
        print(f"open {(BUILD / 'site' / 'index.html').relative_to(ROOT)}, or let a web server show it for the search")
    return status


if __name__ == "__main__":
    raise SystemExit(run_command(main))
