"""Each fault of the list can be applied. `python -m tools.faults` runs the tests on them: half an hour."""

from __future__ import annotations

import pytest

from tools.changed_tree import ROOT, spans_of
from tools.faults.__main__ import Fault, fault_of, load_faults


@pytest.mark.parametrize("fault", load_faults(), ids=lambda fault: fault.name)
def test_what_is_to_be_changed_is_there_exactly_once(fault):
    assert fault.change().text != (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.tests and all((ROOT / test.split("::")[0]).is_file() for test in fault.tests if "/" in test)


def fault_in(function: str, pattern: str) -> Fault:
    place = f"stage_d_paged/block_manager.py::{function}"
    return fault_of({"name": "a fault", "tests": [], "in": place, "replace": pattern, "by": "if False:"})


def test_a_pattern_changes_the_function_that_is_named_and_nothing_else():
    change = fault_in("BlockManager.free", r"if .* is None:").change()
    assert change.text.count("if False:") == 1
    assert "if entry is None:" in change.text


@pytest.mark.parametrize(
    ("function", "pattern", "message"),
    [
        ("BlockManager.free", "watermark", "0 times"),
        ("BlockManager.free", "block", r"\d+ times"),
        ("BlockManager.nowhere", "block", "no function BlockManager.nowhere"),
        ("nowhere", "block", "no function nowhere"),
    ],
)
def test_a_pattern_that_is_not_there_exactly_once_is_refused(function, pattern, message):
    with pytest.raises(ValueError, match=message):
        fault_in(function, pattern).change()


def test_a_function_of_cpp_is_found_by_its_name_where_it_is_defined():
    function = "int f(int x) {\n  if (x) { return g(f(1)); }\n  return 0;\n}"
    source = f"int f(int);\nstruct S {{ int f; }};\n{function}\nint h() {{ f(2); }}\n"
    [(start, end)] = spans_of("file.cu", source, "f")
    assert source[start:end] == function
    [(start, end)] = spans_of("file.cu", source, "S")
    assert source[start:end] == "struct S { int f; }"
