"""One word for one thing: all text uses the field's words (`words.toml`), and the glossary explains them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RULES = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
ENTRIES = re.findall(r"^### (.+)$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), flags=re.MULTILINE)


def files(*kinds: str) -> list[str]:
    return sorted({str(p.relative_to(ROOT)) for kind in kinds for pattern in RULES[kind] for p in ROOT.glob(pattern)})


def prose(text: str, path: str = "a.md") -> str:
    """A text without code, addresses and what comments hide; of a program its docstrings and messages."""
    nodes = ast.walk(ast.parse(text)) if path.endswith(".py") else [ast.Constant(text)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    text = " ¶ ".join(text for text in texts if " " in text)
    text = re.sub(r"^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\s+", " ", text)


def avoided_words(text: str) -> list[str]:
    """Return the avoided words in a text, each with its replacement and context."""
    text = re.sub("|".join(map(re.escape, RULES["allowed"])), "", text)
    found = [(m, instead) for word, instead in RULES["avoid"].items() for m in re.finditer(word, text, re.IGNORECASE)]
    return [f"{m[0]!r} (write: {instead}) in: {text[max(0, m.start() - 40) : m.end() + 40]}" for m, instead in found]


def test_the_glossary_is_in_alphabetical_order_and_every_entry_has_its_lesson_and_its_chinese_term() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    parts = re.split(r"^### .+$", text, flags=re.MULTILINE)[1:]
    assert sorted(ENTRIES, key=str.lower) == ENTRIES and len(set(ENTRIES)) == len(ENTRIES)
    without = [
        entry
        for entry, part in zip(ENTRIES, parts, strict=True)
        if not re.search(r"\]\([^)]+\)\* · [^·]*[\u4e00-\u9fff]", part)
    ]
    assert without == []


@pytest.mark.parametrize("path", files("lessons", "others"))
def test_the_words_of_the_field_are_used(path: str) -> None:
    text, web = (ROOT / path).read_text(encoding="utf-8"), map(Path(path).match, RULES["about_the_web"])
    assert not avoided_words(re.sub(r"\bpages?\b", "", prose(text, path)) if any(web) else prose(text, path))


@pytest.mark.parametrize(("text", "word"), RULES["found"].items())
def test_a_word_to_avoid_is_found_and_not_in_code_addresses_and_comments(text: str, word: str) -> None:
    [found] = avoided_words(prose(f"{text} `page` [x](page.md) <!-- page -->\n```\npage\n```\n"))
    assert found.startswith(repr(word))


@pytest.mark.parametrize("path", files("lessons"))
def test_a_lesson_links_to_the_glossary_which_has_its_terms(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    used = {entry for pattern, entry in RULES["terms"].items() if re.search(pattern, prose(text), re.IGNORECASE)}
    assert re.search(r"glossary(\.zh-CN)?\.md", text) and used <= set(ENTRIES)
