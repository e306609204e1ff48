"""Which results files are believed, and what is made of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks.figures import TimedCall, figures, summarise
from benchmarks.report import fill, write_report
from benchmarks.results import RESULTS_DIRECTORY, ResultsError, check_results, load_all, load_results
from benchmarks.tables import group_results, number
from benchmarks.workloads import make_workload, workload_names

ENVIRONMENT = {
    "versions": {"python": "3.12.1", "torch": "2.11.0"},
    "device": {"type": "cpu", "name": "Test CPU"},
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "date": "2026-01-02T03:04:05+00:00",
}


def timed_round(name: str, pace: float) -> dict[str, float]:
    """Figures of a round in which a token takes `pace` seconds and each prompt token a tenth of it."""
    workload = make_workload(name, "cpu")
    metrics = [{"ttft": pace, "tpot": pace, "num_cached_tokens": 0}]
    calls = workload.rounds[0]
    return figures(workload, [TimedCall(c, pace * (c.prompt_tokens / 10 + max(c.max_tokens)), metrics) for c in calls])


def payload(pace: float = 0.01) -> dict:
    """A results file with two stages and a variant."""
    workloads = {}
    rows = []
    for name in workload_names():
        sample = timed_round(name, pace)
        floor = {figure: value / 2 for figure, value in sample.items() if not figure.startswith(("ttft_p", "tpot_p"))}
        workloads[name] = {"hash": make_workload(name, "cpu").hash, "description": name, "floor": floor}
        for engine in ("A", "B", "B[x=1]"):
            package = "stage_a_naive" if engine == "A" else "stage_b_decode_step"
            row = {"engine": engine, "package": package, "options": {}, "workload": name}
            memory = {"bytes": 2**30, "of": "all"}
            measured = {"samples": [sample], "figures": summarise([sample]), "peak_memory": memory}
            skipped = engine == "A" and name == "mixed"
            rows.append(row | ({"not_run": "would take about 99 s"} if skipped else measured))
    return {
        "kind": "engines", "schema": 1, "size": "cpu", "model": "tutor", "dtype": "float32", "environment": ENVIRONMENT,
        "ceilings": {"copy_bytes_per_s": 1e10, "matmul_operations_per_s": 1e11}, "workloads": workloads, "rows": rows,
    }  # fmt: skip


def broken(path: str, value: object) -> dict:
    """A payload with one field replaced."""
    found = copy.deepcopy(payload())
    *parents, last = path.split("/")
    place = found
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    return found


def test_every_committed_results_file_is_valid() -> None:
    load_all(RESULTS_DIRECTORY)


def test_a_sound_file_is_accepted() -> None:
    check_results(payload())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kind", None, "no 'kind'"),
        ("environment/commit", None, "no commit"),
        ("environment/commit", "main", "no commit"),
        ("environment/versions", {}, "no versions"),
        ("environment/device", {}, "no device"),
        ("environment/dirty", None, "dirty"),
        ("schema", 0, "schema 0"),
        ("size", "tiny", "tiny"),
        ("workloads/mixed/hash", "0" * 64, "workload 'mixed' has the hash 000000000000"),
        ("rows/0/samples", [], "no samples and no reason"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused(path: str, value: object, message: str) -> None:
    with pytest.raises(ResultsError, match=message):
        check_results(broken(path, value))


@pytest.mark.parametrize("nested", [True, False])
def test_files_of_other_kinds_need_versions_device_and_commit(nested: bool) -> None:
    found = {"kind": "kernels", **({"environment": ENVIRONMENT} if nested else ENVIRONMENT)}
    check_results(found)
    where = found["environment"] = dict(ENVIRONMENT)
    del where["commit"]
    with pytest.raises(ResultsError, match="no commit"):
        check_results(found)


def test_the_refusal_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"kind": "engines"')
    with pytest.raises(ResultsError, match="half.json is not JSON"):
        load_results(tmp_path / "half.json")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a results file, and READMEs with markers."""
    for folder, marker in ((".", "table"), ("benchmarks", "details"), ("stage_b_decode_step", "stage_b")):
        (tmp_path / folder).mkdir(exist_ok=True)
        text = f"# Title\n\n<!-- bench:{marker} -->\n<!-- /bench:{marker} -->\n\nThe end.\n"
        (tmp_path / folder / "README.md").write_text(text)
    (tmp_path / "benchmarks" / "results").mkdir()
    (tmp_path / "benchmarks" / "results" / "cpu-tutor.json").write_text(json.dumps(payload()))
    return tmp_path


def test_the_report_fills_the_markers_and_nothing_else(tree: Path) -> None:
    assert len(write_report(tree)) == 3
    text = (tree / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- bench:table -->\n**tutor** in float32 on Test CPU")
    assert text.endswith("<!-- /bench:table -->\n\nThe end.\n")
    assert "| A |" in text and "| B |" in text and "B[x=1]" not in text
    assert "- A, mixed: not run: would take about 99 s" in text
    assert "0123456789" in text and "torch 2.11.0" in text
    stage = (tree / "stage_b_decode_step" / "README.md").read_text()
    assert "| A |" in stage and "| B |" in stage and "| B[x=1] |" in stage
    for picture in ("cpu-tutor-test-cpu-bars.png", "cpu-tutor-test-cpu-context.png"):
        assert (tree / "benchmarks" / "plots" / picture).stat().st_size > 10_000
        assert f"](benchmarks/plots/{picture})" in text


def test_the_report_is_idempotent(tree: Path) -> None:
    write_report(tree)
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    assert write_report(tree) == []
    assert write_report(tree, check=True) == []
    assert before == {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_check_changes_nothing_and_says_what_is_out_of_date(tree: Path) -> None:
    before = (tree / "README.md").read_text()
    assert tree / "README.md" in write_report(tree, check=True)
    assert (tree / "README.md").read_text() == before


def test_the_report_refuses_work_that_is_not_todays(tree: Path) -> None:
    bad = broken("workloads/single/hash", "0" * 64)
    (tree / "benchmarks" / "results" / "cpu-tutor.json").write_text(json.dumps(bad))
    before = (tree / "README.md").read_text()
    with pytest.raises(ResultsError, match="cpu-tutor.json: workload 'single'"):
        write_report(tree)
    assert (tree / "README.md").read_text() == before


def test_a_marker_that_is_unknown_or_open_is_refused() -> None:
    with pytest.raises(ResultsError, match="no table for the marker 'bench:tabel'"):
        fill("<!-- bench:tabel -->\n<!-- /bench:tabel -->", {"bench:table": []})
    with pytest.raises(ResultsError, match="no <!-- bench:table --> … <!-- /bench:table -->"):
        fill("<!-- bench:table -->\n", {"bench:table": []})


def test_the_newer_of_two_measurements_counts() -> None:
    older, newer = payload(0.5), payload(0.1)
    newer["environment"] = {**ENVIRONMENT, "date": "2026-02-01T00:00:00+00:00"}
    newer["rows"] = [row for row in newer["rows"] if row["engine"] == "B"]
    [group] = group_results([newer, older])
    assert group.rows["B", "single"]["figures"]["tpot_ms"]["median"] == pytest.approx(
        timed_round("single", 0.1)["tpot_ms"]
    )
    assert group.rows["A", "single"]["figures"]["tpot_ms"]["median"] == pytest.approx(
        timed_round("single", 0.5)["tpot_ms"]
    )


def test_a_decode_step_is_the_difference_of_two_calls() -> None:
    workload = make_workload("single", "cpu")
    first, whole = workload.rounds[0]
    steps = whole.max_tokens[0] - 1
    found = figures(workload, [TimedCall(first, 3.0, []), TimedCall(whole, 3.0 + 0.002 * steps, [])])
    assert found["tpot_ms"] == pytest.approx(2.0)
    assert found["prefill_ms"] == 3000


def test_the_summary_keeps_median_and_spread() -> None:
    assert summarise([{"seconds": v} for v in (3.0, 1.0, 2.0)]) == {
        "seconds": {"median": 2.0, "min": 1.0, "max": 3.0, "samples": 3}
    }


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.23187, "0.232"), (1.5678, "1.57"), (59.42, "59.4"), (181500.4, "181,500")]
)
def test_numbers_are_shown_with_three_digits(value: float, text: str) -> None:
    assert number(value) == text
