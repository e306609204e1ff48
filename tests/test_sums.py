"""The figures of a page agree with one another: sums are right, and a ratio matches the two figures next to it."""

from __future__ import annotations

import re

import pytest
from test_numbers import HIDDEN

from benchmarks.report import readmes
from benchmarks.results import ROOT

pytestmark = pytest.mark.fast

NUMBER = r"(?<![\w.,])\d[\d,]*(?:\.\d+)?"
UNIT = r"(?: ?(?:million|billion|[kKMGT]i?B|bytes|[nµm]?s\b|tokens(?:/s)?|tok/s|positions|numbers|steps))?"
SUM = re.compile(rf"({NUMBER}{UNIT}(?: [×·+/−-] {NUMBER}{UNIT})+) = (?:about )?({NUMBER})(?! ?[×·+/−-] ?\d)")
ARROW = re.compile(rf"({NUMBER})(?: → |{UNIT} instead of )({NUMBER})")
RATIO = re.compile(rf"({NUMBER}) ?(×|%)(?! ?\d)(?= (as|less|more|faster|longer|of the time)\b)")
SENTENCE = re.compile(r"(?<=[.?!:])\s(?=\W*[A-Z一-鿿])|(?<=[。？！])|\n\n|\n(?=[|*-])")
PAGES = sorted({str(page.relative_to(ROOT)) for page in (*readmes(ROOT), *ROOT.glob("docs/*.md"))})


def bounds(number: str) -> tuple[float, float]:
    """What a printed number may have been before it was rounded."""
    digits = number.replace(",", "")
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
    return float(digits) - half, float(digits) + half


def between_exactly(low: float, high: float, number: str) -> bool:
    """Whether a printed number may be one of these."""
    least, most = bounds(number)
    return low <= most and least <= high


def between(low: float, high: float, number: str) -> bool:
    """The same, or in thousands, millions, … of the unit."""
    return any(between_exactly(low * 1e3**power, high * 1e3**power, number) for power in range(-4, 4))


def computed(terms: str) -> tuple[float, float]:
    """The least and the most that printed products and sums may be."""
    found, sign, product = [0.0, 0.0], 1, (1.0, 1.0)
    operators = ["×", *re.findall(r" ([×·+/−-]) ", terms)]
    for operator, number in zip(operators, re.findall(NUMBER, terms), strict=True):
        low, high = bounds(number) if "." in number else (bounds(number)[0] + 0.5,) * 2
        if operator in "+−-":
            found, product = [f + sign * p for f, p in zip(found, product, strict=True)], (1.0, 1.0)
            sign = 1 if operator == "+" else -1
        product = (product[0] / high, product[1] / low) if operator == "/" else (product[0] * low, product[1] * high)
    return tuple(sorted(f + sign * p for f, p in zip(found, product, strict=True)))


def disagreements(text: str) -> list[str]:
    """Figures that disagree: a sum, or the only ratio of a sentence whose two figures an arrow joins."""
    text = re.sub(r"<!--=?[\w.: -]+-->", "", re.sub(HIDDEN, "", text, flags=re.DOTALL | re.MULTILINE))
    wrong = []
    for sentence in SENTENCE.split(re.sub(r"(?<=\S)\n(?=[^\s|*-])", " ", text)):
        for match in SUM.finditer(sentence):
            if not between(*computed(match[1]), match[2]):
                wrong.append(match[0])
        arrows, ratios = ARROW.findall(sentence), RATIO.findall(sentence)
        if len(arrows) == len(ratios) == 1 and ratios[0][0] not in arrows[0]:
            wrong += [sentence] * (not is_ratio(*arrows[0], *ratios[0]))
    return wrong


def is_ratio(before: str, after: str, ratio: str, sign: str, word: str) -> bool:
    """Whether `ratio` × or % says how two printed numbers compare: `20 % less`, `1.2 × as long`."""
    (a, b), (c, d) = bounds(before), bounds(after)
    shares = [(a / d, b / c), (c / b, d / a)]
    if sign == "%":
        shares = [(100 * low, 100 * high) for low, high in shares]
        if word == "less":
            shares = [(100 - high, 100 - low) for low, high in shares]
        elif word in ("more", "faster", "longer"):
            shares = [(low - 100, high - 100) for low, high in shares]
    return any(between_exactly(*share, ratio) for share in shares)


def marked(text: str, name: str) -> str:
    """The number that a page prints with this marker."""
    found = set(re.findall(rf"({NUMBER}|–)<!--={re.escape(name)}-->", text))
    assert len(found) == 1, f"{name}: {found}"
    return found.pop()


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_front_pages_table_is_recomputed_from_the_figures_beside_it(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| \[[A-F]\]", line)]
    tokens, rate, checked = marked(text, "front.tokens"), marked(text, "f.load"), 0
    for row in rows:
        *_, step, seconds = re.findall(rf"(?:{NUMBER}|–)(?=<!--=)", row)
        if "†" in row:
            low, high = (s * t / 1e3 for s, t in zip(bounds(step), bounds(tokens), strict=True))
            assert between_exactly(low, high, seconds), f"{tokens} tokens × {step} ms are not {seconds} s"
            checked += 1
    assert [len(rows), checked] == [6, 3]
    low, high = (s / 60 for s in bounds(marked(text, "front.a_seconds")))
    assert between_exactly(low, high, marked(text, "front.a_minutes"))
    (least, most), (slow, fast) = bounds(tokens), bounds(rate)
    assert between_exactly(least / fast, most / slow, marked(text, "front.f_seconds")), "tokens / tokens per second"
    assert {marked(line, "f.step") for line in text.splitlines() if "f.step" in line} == {marked(text, "f.step")}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("So 1,030 × 6.07 µs = 6.9 ms are launches.", ["1,030 × 6.07 µs = 6.9"]),
        ("So 1,030 × 6.07 µs = 6.25 ms are launches.", []),
        ("64 × 57,344 = 3.7 MB. 3,072 + 128 = 3,200. 600 / 30 = 21.", ["600 / 30 = 21"]),
        ("From 0.380 → 0.096 ms, 3.7 × as fast.", ["From 0.380 → 0.096 ms, 3.7 × as fast."]),
        ("From 0.380 → 0.096 ms, 75 % less.", []),
        ("It takes 0.348<!--=a.b--> ms instead of 0.472<!--=a.c-->, 26 % less.", []),
        ("It takes 0.348 ms instead of 0.472, 36 % less.", ["It takes 0.348 ms instead of 0.472, 36 % less."]),
        ("Idle 53 → 43 % of the time. 83 % right, it takes 1 ms instead of 3.", []),
    ],
)
def test_what_does_not_come_out_is_found(text: str, wrong: list[str]) -> None:
    assert disagreements(text) == wrong


@pytest.mark.parametrize("page", PAGES)
def test_the_sums_and_ratios_of_a_page_come_out(page: str) -> None:
    assert not disagreements((ROOT / page).read_text(encoding="utf-8"))
