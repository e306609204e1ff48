"""`make site`: the gathered pages are consistent."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import pytest

from docs.website.build import FENCE, LINK, Gatherer, address_of, for_students, main
from labs.student_repo import shown

pytest.importorskip("nbconvert", reason="makes pages of notebooks: pip install -e .[site]")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    Gatherer(folder, "").gather()
    return folder


def test_every_link_and_figure_of_a_page_leads_to_a_file_of_the_site(pages):
    places = {PurePosixPath(file.relative_to(pages)) for file in pages.rglob("*") if file.is_file()}
    addresses, lost = {address_of(place) for place in places}, []
    for page in [place for place in places if place.suffix == ".md"]:
        for before, target in LINK.findall(FENCE.sub("", (pages / page).read_text(encoding="utf-8"))):
            start, there = (page, places) if before == "](" else (address_of(page), addresses)
            found = PurePosixPath(os.path.normpath(start.parent / target.partition("#")[0]))
            if not re.match(r"[a-z]+:|#", target) and found not in there:
                lost.append(f"{page}: {target}")
    assert len(list(pages.rglob("*.md"))) > 100 and not lost


def test_every_entry_of_the_list_of_pages_is_a_page(pages):
    listed = re.findall(
        r"[\w/]+\.md", (ROOT / "docs" / "website" / "mkdocs.yml").read_text(encoding="utf-8").split("nav:")[-1]
    )
    assert len(listed) > 40 and [name for name in listed if not (pages / name).is_file()] == []


def test_every_title_in_the_list_of_pages_has_a_chinese_one():
    config = (ROOT / "docs" / "website" / "mkdocs.yml").read_text(encoding="utf-8")
    translated = set(re.findall(r'^ {12}"?(.+?)"?: ', config.partition("nav_translations:")[2], re.MULTILINE))
    titles = set(re.findall(r'^ *- \{?"?(\w[\w:, -]*?)"?:(?: |$)', config.split("\nnav:")[-1], re.MULTILINE))
    assert len(titles) > 40 and {title for title in titles if len(title) > 1} - translated == set()


def test_links_to_code_lead_to_a_repository_that_is_named(tmp_path):
    missing: list[str] = []
    text = "[a](loop.py#L7) [b](../stage_b_decode_step/README.md)\n```\n[c](nothing.md)\n```\n"
    page = PurePosixPath("stage_a_naive/README.md")
    got = Gatherer(tmp_path, "https://host/me/mine/").with_links(text, page, missing)
    assert "[a](https://host/me/mine/blob/main/stage_a_naive/loop.py#L7)" in got and not missing
    assert "[b](../stage_b_decode_step/index.md)" in got and "[c](nothing.md)" in got, "code stays as it is"
    Gatherer(tmp_path, "").with_links("[c](nothing.md)", page, missing)
    assert missing == ["stage_a_naive/README.md: nothing.md"]


def test_a_chinese_page_shows_its_figures_and_leads_to_the_english_one(tmp_path):
    gatherer, missing = Gatherer(tmp_path, ""), []
    page = PurePosixPath("stage_a_naive/README.zh-CN.md")
    text = "[English](README.md) [B](../stage_b_decode_step/README.zh-CN.md) ![](no_cache.zh-CN.svg)"
    got = gatherer.with_links(text, page, missing)
    assert got.startswith(
        '<a href="../../stage_a_naive/index.html">English</a> [B](../stage_b_decode_step/index.zh.md)'
    )
    assert "![](no_cache_zh-CN.svg)" in got and (tmp_path / "stage_a_naive" / "no_cache_zh-CN.svg").is_file()
    page, picture = PurePosixPath("README.zh-CN.md"), '<img src="stage_a_naive/no_cache.zh-CN.svg">'
    assert gatherer.with_links(picture, page, missing) == '<img src="../stage_a_naive/no_cache_zh-CN.svg">'
    got = gatherer.with_links("[中文](README.zh-CN.md)", PurePosixPath("README.md"), missing)
    assert got == '<a href="zh/index.html">中文</a>' and not missing


def test_slides_that_were_built_are_named_beside_those_in_markdown(tmp_path):
    (tmp_path / "docs" / "slides").mkdir(parents=True)
    for page in ("index.md", "index.zh.md"):
        (tmp_path / "docs" / "slides" / page).write_text("# Slides\n")
    for folder, decks in (("nothing", []), ("built", ["week1.pdf", "week3.pdf", "week1.zh-CN.pdf"])):
        (tmp_path / folder).mkdir()
        for deck in decks:
            (tmp_path / folder / deck).write_bytes(b"%PDF")
        Gatherer(tmp_path, "").add_slides(tmp_path / folder)
        said = "\nAs PDF: [1](week1.pdf), [3](week3.pdf).\n" if decks else ""
        assert (tmp_path / "docs" / "slides" / "index.md").read_text() == f"# Slides\n{said}"
    assert "[1](week1.zh-CN.pdf)\n" in (tmp_path / "docs" / "slides" / "index.zh.md").read_text(encoding="utf-8")
    assert (tmp_path / "docs" / "slides" / "week3.pdf").exists()


def test_a_notebooks_page_leads_to_colab_in_words_if_the_repository_is_named(tmp_path):
    file, there = PurePosixPath("notebooks/a_naive.ipynb"), "https://colab.research.google.com/github/me/mine/blob/main"
    for repository in ("https://github.com/me/mine", ""):
        page = Gatherer(tmp_path, repository).text_of(file, PurePosixPath("a.md"))
        assert (f"[Open in Colab]({there}/{file})" in page) == bool(repository) == ("colab" in page)
        assert "badge" not in page


@pytest.mark.slow
def test_the_site_builds_with_no_warning_and_nothing_from_elsewhere():
    pytest.importorskip("mkdocs", reason="pip install -e .[site]")
    assert main([]) == 0
    site = ROOT / "build" / "website" / "site"
    elsewhere = re.compile(r'<(?:script|link)[^>]*(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)')
    assert [page.name for page in site.rglob("*.html") if elsewhere.search(page.read_text(encoding="utf-8"))] == []
    lost, local = [], re.compile(r'<[^<>]* (?:src|srcset|href)="(?!\w+:|//|#)([^"#?]+)')
    for page in site.rglob("[!4]*.html"):  # 404.html is shown at every address
        names = [unquote(name) for name in local.findall(page.read_text(encoding="utf-8"))]
        lost += [f"{page.relative_to(site)}: {name}" for name in names if not (page.parent / name).exists()]
    assert lost == []
    assert "阶段" in (site / "zh" / "index.html").read_text(encoding="utf-8")


def test_students_get_no_instructors_pages_and_no_answer(tmp_path):
    Gatherer(tmp_path, "", students=True).gather()
    assert not list((tmp_path / "labs").glob("instructors*"))
    texts = {str(page.relative_to(tmp_path)): page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.md")}
    assert any("Lab A.6" in text for name, text in texts.items() if name.startswith("source/stage_a_naive"))
    # A variant was made from a lesson's program, and lab P hands out finished engines with something slow in them.
    answers = [
        (name, e.id) for name, text in texts.items() for e in shown(text) if not e.slow and "variants" not in e.path
    ]
    assert answers == []
    config = for_students((ROOT / "docs" / "website" / "mkdocs.yml").read_text(encoding="utf-8"))
    assert "docs_dir: pages\n" in config and "site_dir: site\n" in config and "instructors.md" not in config
    assert "paths: [../..]" in config and "build/website" not in config
