"""Engines are made of parts that are handed in: no class has a grandparent of ours, and none two bases of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
CHAINS = ("Options", "Error", "::LLM")  # of options, errors and what users call, one chain is allowed
# What is left. The list only becomes shorter.
LEFT = {
    "beyond/scale_out/pipeline_scheduler.py::PipelineScheduler",  # its base is made of the queues
}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class of the stages and of `beyond`, by file::name."""
    for folder in (*ROOT.glob("stage_*"), ROOT / "beyond"):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    yield f"{path.relative_to(ROOT).as_posix()}::{node.name}", node


def base_names(node: ast.ClassDef) -> set[str]:
    """The names of a class's bases, without modules and type parameters."""
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def test_no_class_has_a_grandparent_of_ours_or_two_bases_of_ours():
    found = dict(classes())
    assert len(found) > 200
    names = {node.name for node in found.values()}
    with_bases = {node.name for node in found.values() if base_names(node) & names}
    deep = set()
    for place, node in found.items():
        bases = base_names(node) & names - {node.name}  # a part of a later stage may have its base's name
        if (len(bases) > 1 or bases & with_bases) and not place.endswith(CHAINS):
            deep.add(place)
    assert deep == LEFT, f"hand a part in instead, or take it off the list: {sorted(deep ^ LEFT)}"
