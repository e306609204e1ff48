"""Counts, not times: a count outside its bounds is reported, and what cannot run is named."""

from __future__ import annotations

import json

import pytest

from benchmarks import check

CALLS = "model calls per generated token"
COPIES = "copies from the host per decode step"


@pytest.mark.parametrize(
    ("stage", "count", "bounds", "end"),
    [
        ("A", CALLS, [1, 1], "ok"),
        ("A", CALLS, [0.5, 0.9], "OUTSIDE"),
        ("A", CALLS, [1.1, 2], "OUTSIDE"),
        ("A", CALLS, None, "OUTSIDE"),
        ("F", COPIES, [2, 3], "OUTSIDE"),
    ],
    ids=["inside", "above", "below", "without bounds", "of a batch's step"],
)
def test_a_count_that_crosses_a_bound_or_has_none_fails_the_check(tmp_path, capsys, stage, count, bounds, end):
    changed = json.loads(check.BOUNDS.read_text(encoding="utf-8"))
    del changed[stage][count]
    if bounds:
        changed[stage][count] = bounds
    file = tmp_path / "bounds.json"
    file.write_text(json.dumps(changed), encoding="utf-8")
    assert check.main(["--stages", stage, "--bounds", str(file)]) == (end != "ok")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{stage} ")]
    assert [line.endswith(end) for line in lines if count in line] == [True]
    assert all(line.endswith("ok") for line in lines if count not in line)


def test_a_stage_that_needs_a_compiler_is_skipped_with_a_line_that_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert check.main(["--stages", "C"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=1) == ["C", "skipped: no C++ compiler"]
