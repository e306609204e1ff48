"""Both editions of a page, `X.md` and `X.zh-CN.md`, have the same parts; the test names any difference."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
CHINESE = sorted(
    path
    for room in (".", "docs/**", "labs", "labs/templates", "stage_*/**", "beyond/**", "benchmarks/**", "models/**")
    for path in ROOT.glob(f"{room}/*.zh-CN.md")
)
CODE = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
TYPED = re.compile(r"make|python|pip|source|from|import")  # what a line begins with that a reader types
prose = partial(CODE.sub, "")


def headings(text: str, page: Path) -> list[str]:
    return [f"{i}: {marks}" for i, marks in enumerate(re.findall(r"^(#+) ", prose(text), re.MULTILINE))]


def anchors(page: Path) -> list[str]:
    """What a link to each heading of a page says, as GitHub makes it."""
    titles = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def links(text: str, page: Path) -> list[str]:
    """Links and pictures, with the number of the heading each leads to; not those between the editions."""
    found = []
    for target in re.findall(r"\]\(([^)]+)\)", prose(without_results(text))):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if anchor and path.suffix == ".md":
            anchor = str(anchors(path).index(anchor)) if anchor in anchors(path) else f"no heading {anchor}"
        if not name or english(path).resolve() != english(page).resolve():
            found.append(f"{english(path).name if not name else name.replace('.zh-CN.', '.')}#{anchor}")
    return found


def english(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh-CN.", "."))


def typed(text: str, page: Path) -> list[str]:
    """Lines of code and commands, without comments; and code in sentences."""
    code = [line for block in CODE.findall(text) for line in block.splitlines()]
    code += re.findall(r"^    (\S.*)", prose(text), re.MULTILINE)
    lines = [line.split("  #")[0].strip() for line in code]
    inline = {re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose(without_results(text)))}
    return [line for line in lines if TYPED.match(line)] + sorted(inline)


def programs(text: str, page: Path) -> list[str]:
    """Lines of code in blocks that name a language, without comments."""
    blocks = re.findall(r"^ *```\w+\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"(^| +)(#|//) .*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def without_results(text: str) -> str:
    """A page without the tables that `make report` fills in."""
    return re.sub(r"(<!-- ([\w:-]+) -->)\n.*?(<!-- /\2 -->)", r"\1\3", text, flags=re.DOTALL)


def tables(text: str, page: Path) -> list[str]:
    """The cells in each row of a table, and the markers of what is filled in."""
    rows = re.findall(r"^\|.*\||<!-- [\w:-]+ --><!-- /[\w:-]+ -->", prose(without_results(text)), re.MULTILINE)
    return [f"{number}: {row.count('|') if row[0] == '|' else row}" for number, row in enumerate(rows)]


def numbers(text: str, page: Path) -> list[str]:
    """Numbers with their markers; how long a page takes to read is each edition's own."""
    return re.findall(r"[\d.,]*<!--(?!minutes)[=\w][\w. ]*-->", prose(text))


def excerpts(text: str, page: Path) -> list[str]:
    return re.findall(r"<!-- code: .*? -->\n.*?<!-- end of code -->", text, re.DOTALL)


PARTS = (headings, links, excerpts, typed, programs, tables, numbers)


def drifted(chinese: Path) -> list[str]:
    """What one edition of a page has and the other lacks."""
    pages, said = {"only in English": english(chinese), "only in Chinese": chinese}, []
    for part in PARTS:
        found = {where: Counter(part(page.read_text(encoding="utf-8"), page)) for where, page in pages.items()}
        one, other = found.values()
        said += [f"{part.__name__}, {where}: {item}" for where in found for item in found[where] - (one & other)]
    return said


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))
def test_both_editions_have_the_same_parts(page: Path) -> None:
    assert not drifted(page)


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_links_to_chinese_pages_and_shows_chinese_pictures_where_there_are_some(page: Path) -> None:
    pattern = r"\]\(([^)#:]+)\.(md|svg|png|webp|ipynb)(?:#[^)]*)?\)"
    targets = re.findall(pattern, prose(page.read_text(encoding="utf-8")))
    paths = [page.parent / f"{target}.zh-CN.{kind}" for target, kind in targets]
    assert [str(path.name) for path in paths if path.exists() and path.resolve() != page.resolve()] == []


PAGE = "# T\n\n## U\n\n[a](b.md#c) ![d](e.svg) `make x` 3<!--=f.x-->\n\n| a | b |\n|---|---|\n| c | d |\n"
PAGE += "\n```\nmake y  # z\n```\n<!-- code: f.py::g -->\n```python\ng = 1\n```\n<!-- end of code -->\n"
PAGE += "\n- a\n\n  ```python\n  h = 1  # i\n  ```\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("## U", "### U", "headings, only in English: 1: ##"),
        ("[a](b.md#c)", "a", "links, only in English: b.md#no heading c"),
        ("e.svg", "i.svg", "links, only in Chinese: i.svg#"),
        ("g = 1", "g = 2", "excerpts, only in English: <!-- code: f.py::g -->\n```python\ng = 1\n"),
        ("make y", "make w", "typed, only in Chinese: make w"),
        ("h = 1", "h = 2", "programs, only in English: h = 1"),
        ("`make x`", "`make v`", "typed, only in English: make x"),
        ("| c | d |", "| c |", "tables, only in Chinese: 2: 2"),
        ("3<!--=f.x-->", "4<!--=f.x-->", "numbers, only in Chinese: 4<!--=f.x-->"),
    ],
)
def test_what_has_drifted_is_named(old: str, new: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# B\n")
    (tmp_path / "a.md").write_text(PAGE)
    page = tmp_path / "a.zh-CN.md"
    page.write_text(PAGE.replace("[a](b.md#c)", "[a](b.md#c) [English](a.md)"))
    assert drifted(page) == []
    page.write_text(PAGE.replace(old, new))
    assert any(line.startswith(said) for line in drifted(page))
