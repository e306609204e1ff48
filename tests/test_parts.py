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
    "beyond/speculation/sequence.py::SpeculativeSequence",  # its base is stage D's sequence, in a batch
}


def classes() -> Iterator[tuple[str, list[str]]]:
    """Every class of the stages and of `beyond`, as file::name, with its bases of ours, also as file::name."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for folder in (*ROOT.glob("stage_*"), ROOT / "beyond")
        for path in sorted(folder.rglob("*.py"))
    }
    found = {
        f"{file}::{node.name}": node
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    for place, node in found.items():
        file = place.split("::")[0]
        names = dict(imported(trees[file], file))
        bases = []
        for base in node.bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            spelled = ast.unparse(base)
            module, _, name = spelled.rpartition(".")
            bases.append(f"{names.get(module, '')}.py::{name}" if module else names.get(spelled, f"{file}::{spelled}"))
        yield place, [base for base in bases if base in found]


def imported(tree: ast.Module, file: str) -> Iterator[tuple[str, str]]:
    """What names of a module stand for: files without their suffix for modules, file::name for classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = (
                list(Path(file).parent.parts[: len(Path(file).parent.parts) - node.level + 1]) if node.level else []
            )
            module = "/".join([*package, *(node.module or "").split(".")]).rstrip("/")
            for alias in node.names:
                is_module = (ROOT / module / f"{alias.name}.py").is_file()
                yield (
                    alias.asname or alias.name,
                    f"{module}/{alias.name}" if is_module else f"{module}.py::{alias.name}",
                )


def test_no_class_has_a_grandparent_of_ours_or_two_bases_of_ours():
    bases = dict(classes())
    assert len(bases) > 200
    deep = {
        place
        for place, own in bases.items()
        if (len(own) > 1 or any(bases[base] for base in own)) and not place.endswith(CHAINS)
    }
    assert deep == LEFT, f"hand a part in instead, or take it off the list: {sorted(deep ^ LEFT)}"
