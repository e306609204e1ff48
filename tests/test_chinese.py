"""The Chinese pages use one term for one thing, and full-width and half-width characters where they belong."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.test_editions import CHINESE, CODE, ROOT, without_results

pytestmark = pytest.mark.fast
WORDS = tomllib.loads(Path(__file__).with_name("terms.zh-CN.toml").read_text(encoding="utf-8"))
HAN, FULL = "[一-鿿]", "[，。；：？！、（）《》“”]"
WIDTHS = {  # what is wrong, and how it looks
    "a space between Chinese and Latin letters or digits": rf"{HAN}[A-Za-z0-9]|[A-Za-z0-9]{HAN}",
    "full-width punctuation after Chinese": rf"{HAN}[,.;:?!()\"]",
    "full-width punctuation before Chinese": rf"[,;?!(\"] ?{HAN}",
    "no space beside full-width punctuation": rf"(?<=\S)(?<![|>#-]) {FULL}|{FULL} (?=[^|\s])",
    "a paragraph of Chinese in one line": rf"(?:{HAN}|{FULL})\n(?!\d+\. )(?={HAN}|[A-Za-z0-9“（])",
}


def prose(text: str) -> str:
    """A page's sentences as a reader sees them; code in a sentence is one letter, and code blocks are gone."""
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", CODE.sub("", without_results(text)), flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "C", text))
    return re.sub(r"^(?: {4}.*|#.*)$|\*", "", text, flags=re.MULTILINE)


def wrong_widths(text: str) -> list[str]:
    return [f"{rule}: {around(text, m)}" for rule, pattern in WIDTHS.items() for m in re.finditer(pattern, text)]


def wrong_terms(text: str) -> list[str]:
    """Words that are not the term, and terms that come without their English first."""
    said = [
        f"write {term}: {around(text, m)}" for word, term in WORDS["instead"].items() for m in re.finditer(word, text)
    ]
    for name, term in WORDS["terms"].items():
        other = WORDS["contained"].get(term)
        first = (re.sub(other, "", text) if other else text).partition(term)
        if first[1] and not re.match(rf"[一-鿿]{{0,2}}（[^）]*{name}", first[2], re.IGNORECASE):
            said.append(f"{term}（{name}） at first use: {first[0][-20:]}{term}{first[2][:20]}")
    return said


def around(text: str, match: re.Match[str]) -> str:
    return repr(text[max(0, match.start() - 15) : match.end() + 15])


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_has_the_terms_and_the_widths(page: Path) -> None:
    text = prose(page.read_text(encoding="utf-8"))
    assert wrong_terms(text) + wrong_widths(text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("共 3个 token。", "a space between"),
        ("用 `make`运行。", "a space between"),
        ("好,就这样。", "full-width punctuation after"),
        ("token,好。", "full-width punctuation before"),
        ("好， 就这样。", "no space beside"),
        ("一行。\n又一行。", "a paragraph of Chinese"),
        ("这是核函数。", "write kernel"),
        ("这是解码。解码（decode）。", "解码（decode） at first use"),
    ],
)
def test_a_wrong_term_or_width_is_found(text: str, said: str) -> None:
    found, *_ = wrong_terms(prose(text)) + wrong_widths(prose(text))
    assert found.startswith(said)


def test_what_is_right_stays() -> None:
    text = (
        "先做预填充（prefill），再解码（decode）；共 3<!--=x.y--> 个 token。\n\n- 用 `make`，见 [GPU 表](a.md)：好。\n"
    )
    assert wrong_terms(prose(text)) + wrong_widths(prose(text)) == []
