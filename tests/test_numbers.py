"""Numbers in the lessons' sentences are written from measurements, and a measured number without one is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.numbers import Numbers
from benchmarks.report import readmes, write_report
from benchmarks.results import ROOT, ResultsError

pytestmark = pytest.mark.fast

MEASURED = re.compile(
    r"(?<![\w.,×-])(?:\d[\d,.]*\d|\d)\s*(?:[nµm]?s\b|(?:seconds|tokens/s|requests/s|[GT]B/s|TFLOP/s|毫秒|微秒|秒|倍)|%|×(?!\s*\d))"
)
# What is not a sentence: code, generated tables and excerpts, addresses.
HIDDEN = r"^```.*?^```|<!-- ([\w:-]+) -->\n.*?<!-- /\1 -->|`[^`\n]*`|\]\((?!http)[^)]*\)"


def unmarked(text: str) -> list[str]:
    """Measured numbers without a marker, in sentences that are not marked as given and link to no source elsewhere."""
    text = re.sub(HIDDEN, "", text, flags=re.DOTALL | re.MULTILINE)
    sentences = re.split(r"(?<=[.?!:])\s(?=\W*[A-Z一-鿿])|\n\n|\n(?=\|)", text)
    own = (s for s in sentences if "<!--=given-->" not in s and "](http" not in s)
    return [m[0] for s in own for m in MEASURED.finditer(re.sub(r"\d[\d,.]*<!--=[\w.]+-->", "", s))]


PAGES = [str(page.relative_to(ROOT)) for page in readmes(ROOT) if page.parent.name != "labs"]


@pytest.mark.parametrize("page", PAGES)
def test_a_measured_number_of_a_lesson_says_where_it_is_from(page: str) -> None:
    found = unmarked((ROOT / page).read_text(encoding="utf-8"))
    assert not found, "`benchmarks/numbers.py` says how a number is marked; a definition or a limit is <!--=given-->"


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("It takes 3 ms, with 1,012 µs\nless.", ["3 ms", "1,012 µs"]),
        ("A gain of 2.5 × here, 12% there.", ["2.5 ×", "12%"]),
        ("耗时 3.5 毫秒，快 2 倍。", ["3.5 毫秒", "2 倍"]),
        ("It takes 3<!--=f.step--> ms.", []),
        ("It asks every 3 ms, for 2 seconds at most<!--=given-->. It takes 4 ms.", ["4 ms"]),
        ("[They](https://example.org) measured 80 %. We measured 90 %.", ["90 %"]),
        ("24 × 64 rows of 16 GB, `3 ms`, [x](a.md)\n```\n3 ms\n```\n<!-- t -->\n3 ms\n<!-- /t -->\n", []),
    ],
)
def test_a_measured_number_is_one_with_a_unit_of_time_rate_or_ratio(sentence: str, found: list[str]) -> None:
    assert unmarked(sentence) == found


ROWS = [{"rows": 1, "way": "five", "samples": [0.003, 0.001, 0.002]}, {"rows": 2, "way": "five", "samples": [0.004]}]
STEP, RATIO = "1e3 * {a-gpu > five > rows=1 > samples}", "{a-gpu > rows=1 > samples} / {a-gpu > rows=2 > samples}"


def page_of(root: Path, numbers: dict[str, str], page: str, rows: list[dict] = ROWS) -> str:
    """A page as the report writes it, in a tree with one file of results."""
    where = {"device": {"name": "GPU"}, "date": "2026-01-01", "versions": {"torch": "2"}, "commit": "a" * 40}
    payload = {"kind": "other", "environment": where | {"dirty": False}, "options": {}, "rows": rows}
    for file, text in {
        "benchmarks/history/a-gpu-1.json": json.dumps(payload),
        "benchmarks/numbers.toml": "[f]\n" + "".join(f"{name} = '{value}'\n" for name, value in numbers.items()),
        "stage_a_naive/README.md": page,
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text, encoding="utf-8")
    write_report(root)
    return (root / "stage_a_naive" / "README.md").read_text(encoding="utf-8")


def test_a_sentence_has_the_value_of_the_results_and_changes_with_it(tmp_path: Path) -> None:
    page = "It takes 0.1<!--=f.step--> ms, half<!--=f.share--> of 3<!--=given--> ms."
    numbers = {"step": f"{STEP} | .2f", "share": f"{RATIO} | 0.4..0.6"}
    assert page_of(tmp_path, numbers, page) == page.replace("0.1", "2.00")
    assert page_of(tmp_path, numbers, page, [ROWS[0] | {"samples": [0.0021]}, ROWS[1]]) == page.replace("0.1", "2.10")


def test_a_dash_stands_for_a_number_until_it_is_measured(tmp_path: Path) -> None:
    page = "| D | –<!--=f.step--> |"
    assert page_of(tmp_path, {"step": f"{STEP.replace('a-gpu', 'b-gpu')} | .2f or –"}, page) == page
    assert page_of(tmp_path, {"step": f"{STEP} | .2f or –"}, page) == page.replace("–", "2.00")
    with pytest.raises(ResultsError, match="say which 'rows'"):
        page_of(tmp_path, {"step": "{a-gpu > five > samples} | .2f or –"}, page)


@pytest.mark.parametrize(
    ("defined", "page", "message"),
    [
        ("{b-gpu > samples} | .1f", "1<!--=f.x-->", "numbers.toml: f.x: {b-gpu > samples} leads to nothing"),
        ("{a-gpu > six > samples} | .1f", "1<!--=f.x-->", "{a-gpu > six > samples} leads to nothing"),
        ("{a-gpu > five > samples} | .1f", "1<!--=f.x-->", "'samples' is in several rows; say which 'rows'"),
        ("{a-gpu > rows=1} | .1f", "1<!--=f.x-->", "{a-gpu > rows=1} leads to what is not one figure"),
        ("{a-gpu > rows=1 > samples} ms | .1f", "1<!--=f.x-->", "is not arithmetic with addresses in braces"),
        (f"{RATIO} | 0.3..0.4", "a third<!--=f.x-->", "0.5 is outside 0.3..0.4"),
        (f"{STEP} | .1f", "1<!--=f.x--> 1<!--=f.y-->", "README.md: numbers.toml defines no 'f.y'"),
        (f"{STEP} | .1f", "two<!--=f.x-->", "README.md: no number is before <!--=f.x-->"),
        (f"{STEP} | .1f", "1", "numbers.toml: no README has f.x"),
    ],
)
def test_a_number_without_one_true_measurement_is_refused(
    defined: str, page: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ResultsError, match=re.escape(message)):
        page_of(tmp_path, {"x": defined}, page)


def test_one_measurement_has_one_name_and_one_format(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="f.x and f.y are one figure"):
        page_of(tmp_path, {"x": f"{STEP} | .1f", "y": f"{STEP} | .2f"}, "1<!--=f.x--> 1<!--=f.y-->")


def test_a_cell_of_a_table_and_the_last_line_of_a_program_are_figures_too(tmp_path: Path) -> None:
    table = ["**small**", "| rows | µs / × |", "|---|---:|", "| 1 | **1,200** (1.5 ×) |", "| 2 | 9 |", "", "A caption."]
    lines = '["last lines"]\nrows = "H200: {f.x} × less"\n[f]\nx = "{t > small > rows=1 > µs / × > 1} | .2f"'
    (tmp_path / "n.toml").write_text(lines, encoding="utf-8")
    numbers = Numbers(tmp_path / "n.toml", [], {"t": table})
    program = 'print(f"rows: {a} → {b} [H200: 7 × less]")'
    assert numbers.fill(program, "loop.py") == program.replace("7", "1.50")
    numbers.refuse_unused()
