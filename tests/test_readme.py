"""The Chinese README says what the English one says: same sections, links, commands and tables from the benchmark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def without_tables(text: str) -> str:
    """The text without what `make report` fills in."""
    return re.sub(r"(<!-- bench:\w+ -->).*?(<!-- /bench:\w+ -->)", r"\1\2", text, flags=re.DOTALL)


def links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)]+)\)", without_tables(text))
    return sorted(target for target in found if not target.startswith("README"))


def commands(text: str) -> list[str]:
    """Lines of code blocks that a reader would type, without their comments."""
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line.split("  #")[0].strip() for line in blocks.splitlines()]
    return [line for line in lines if re.search(r"\bmake\b|\bimport\b|\bllm\b|outputs", line)]


def headings(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", text, flags=re.MULTILINE)]


def table_rows(text: str) -> int:
    return len(re.findall(r"^\|", without_tables(text), flags=re.MULTILINE))


def measurements(text: str) -> list[str]:
    return re.findall(r"<!-- /?bench:\w+ -->", text)


@pytest.mark.parametrize("part", [links, commands, headings, table_rows, measurements])
def test_both_readmes_have_the_same(part):
    assert part(CHINESE) == part(ENGLISH)
