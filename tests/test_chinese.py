"""The Chinese pages: one term for one thing, full- and half-width characters, Chinese texts in tables and pictures."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.chinese import IN_SVG, chinese, chinese_svg, chinese_table
from tests.test_editions import CHINESE, CODE, ROOT, english, without_results

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

LEFT = set(" ".join(WORDS["left"].values()).split())
RESULTS = re.compile(r"<!-- ([\w:-]+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)
# Code, addresses, commits, and tokens of a model's answer, in which a dot stands for the space.
NO_WORDS = re.compile(r"`[^`]*`|(?<=\])\([^)]*\)|commit \w+|·\w+")
PICTURES = sorted(path for path in ROOT.rglob("*.zh-CN.svg") if ".venv" not in path.parts)


def in_english(text: str) -> list[str]:
    """The words of a table or picture that have no translation."""
    return [word for word in re.findall(r"[A-Za-z]{2,}", NO_WORDS.sub("", text)) if word not in LEFT]


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


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_chinese_page_are_in_chinese(page: Path) -> None:
    lines = "".join(text for _, text in RESULTS.findall(page.read_text(encoding="utf-8"))).splitlines()
    assert {line: words for line in lines if (words := in_english(line))} == {}, "add them to words.zh-CN.toml"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_chinese_picture_is_the_english_one_with_chinese_texts(picture: Path) -> None:
    text = chinese_svg(english(picture).read_text(encoding="utf-8"))
    assert picture.read_text(encoding="utf-8") == text, "run `make report`"
    assert [said for _, said in IN_SVG.findall(text) if in_english(said)] == [], "add them to words.zh-CN.toml"


def test_a_chinese_page_shows_chinese_pictures() -> None:
    shown = [(page, name) for page in CHINESE for name in re.findall(r"\]\(([^)]*\.svg)\)", page.read_text("utf-8"))]
    assert [f"{page}: {name}" for page, name in shown if "http" not in name and ".zh-CN." not in name] == []


@pytest.mark.parametrize(
    ("english", "said"),
    [
        ("floor, µs", "下限，µs"),
        ("1,024 requests, 128 in, 128–256 out", "1,024 个请求，输入 128，输出 128–256"),
        ("medians of 9 samples of 10 replays.", "9 个样本的中位数，每个样本重放 10 次。"),
        ("*F*, `Upgrade: h2c`", "*F*，`Upgrade: h2c`"),
        ("Q [T, 14, 64]", "Q [T, 14, 64]"),
        ("17.2 (16.1–19.0), 1.00 ×", "17.2 (16.1–19.0), 1.00 ×"),
        ("a new head", "a new head"),
    ],
)
def test_a_text_is_translated_in_parts_and_keeps_its_numbers(english: str, said: str) -> None:
    assert chinese(english) == said
    assert bool(in_english(said)) == (said == "a new head")


def test_a_table_is_translated_cell_by_cell() -> None:
    lines = ["| engine | steps |", "|---|---:|", "| [E](../e/README.md) | 1, 2 |", "", "as above. `make a`."]
    said = ["| 引擎 | 步数 |", "|---|---:|", "| [E](../e/README.zh-CN.md) | 1, 2 |", "", "同上。`make a`。"]
    assert chinese_table(lines) == said
