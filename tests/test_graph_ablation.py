"""The ablation of stage F: each row switches what it says, and its tables come from a checked file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import graph_ablation
from benchmarks.graph_ablation_report import report, tables
from benchmarks.results import ResultsError, check_results
from benchmarks.workloads import make_workload
from stage_f_graph_tp.options import GraphOptions

COMMIT = "0123456789abcdef"


def row(name: str, step: float, rate: float, ranks: int = 1, orders: float = 3) -> dict:
    return {
        "name": name, "ranks": ranks, "options": {}, "launches": {"kernels": 250.0, "orders": orders},
        "workloads": {
            "single": [{"tpot_ms": step * f} for f in (0.9, 1.0, 1.2)], "mixed": [{"output_tokens_per_s": rate}],
        },
    }  # fmt: skip


@pytest.fixture
def payload() -> dict:
    works = {"single": {"tpot_ms": 0.25}, "mixed": {"output_tokens_per_s": 180000.0}}
    return {
        "kind": graph_ablation.KIND, "model": "random:made-up", "dtype": "bfloat16", "device": "cuda", "size": "gpu",
        "layers": 24, "launch_costs": {"alone": 5.0, "in_graph": 0.75},
        "environment": {
            "versions": {"python": "3.12", "torch": "9.9"}, "device": {"name": "a made-up GPU"}, "commit": COMMIT,
            "dirty": False, "date": "2030-01-01T00:00:00",
        },
        "workloads": {
            name: {"hash": make_workload(name, "gpu").hash, "description": f"about {name}", "floor": floor}
            for name, floor in works.items()
        },
        "rows": [
            row("all on", 0.5, 90000), row("none of them", 5.0, 9000, orders=300), row("2 ranks", 0.4, 120000, ranks=2),
        ],
        "all_reduce": {"2": {"1": 4.0, "32": 5.5}, "2, NCCL": {"1": 31.0, "32": 30.0}},
    }  # fmt: skip


def test_every_variant_is_made_of_switches_that_the_stage_has():
    default = GraphOptions()
    for options in graph_ablation.VARIANTS.values():
        changed = GraphOptions(**options)
        assert all(getattr(changed, name) != getattr(default, name) for name in options)
    one_by_one = [graph_ablation.VARIANTS[name] for name in ("no fused kernels", "no overlap", "no graphs")]
    assert graph_ablation.VARIANTS["none of them"] == {k: v for options in one_by_one for k, v in options.items()}


def test_the_tables_say_what_the_file_says(payload):
    found = tables(payload)
    ablation, ranks = "\n".join(found["ablation-f"]), "\n".join(found["tp"])
    assert "| all on | 250 | 3 | 0.500 (0.450–0.600) | 50% | 10.00 × | 90,000 | 50% | 10.00 × |" in ablation
    assert "| none of them | 250 | 300 | 5 (4.5–6) | 5% | 1.00 × | 9,000 | 5% | 1.00 × |" in ablation
    assert "| floor | 1 | 1 | 0.250 | 100% |  | 180,000 | 100% |  |" in ablation
    assert "2 ranks" not in ablation and "5.00 µs" in ablation and "0.75 µs" in ablation
    assert "| 1 | 0.500 | 100% | 90,000 | 100% | – | – | – |" in ranks
    assert "| 2 | 0.400 | 62% | 120,000 | 67% | 4.0 (31.0) | 5.5 (30.0) | 0.196 |" in ranks
    assert COMMIT[:10] in ablation and "a made-up GPU" in ranks


def test_the_report_fills_both_markers_and_refuses_what_cannot_be_trusted(payload, tmp_path: Path):
    readme, file = tmp_path / "README.md", tmp_path / "graph-ablation-cuda-made-up.json"
    readme.write_text("a\n<!-- ablation-f -->\nold\n<!-- /ablation-f -->\nb\n<!-- tp -->\nold\n<!-- /tp -->\nc\n")
    report(tmp_path, readme)
    assert readme.read_text().count("No results files yet") == 2
    file.write_text(json.dumps(payload))
    report(tmp_path, readme)
    text = readme.read_text()
    assert text.startswith("a\n") and text.endswith("c\n") and "old" not in text and "| all on |" in text
    file.write_text(json.dumps({**payload, "environment": {**payload["environment"], "commit": None}}))
    with pytest.raises(ResultsError, match="no commit"):
        report(tmp_path, readme)
    payload["workloads"]["mixed"]["hash"] = "other"
    file.write_text(json.dumps(payload))
    with pytest.raises(ResultsError, match="not today's"):
        report(tmp_path, readme)
    assert readme.read_text() == text
    readme.write_text("no markers")
    with pytest.raises(ResultsError, match="has no <!-- ablation-f -->|not today's"):
        report(tmp_path, readme)


def test_the_stages_readme_has_the_markers():
    text = (Path(graph_ablation.__file__).parent.parent / "stage_f_graph_tp" / "README.md").read_text(encoding="utf-8")
    for marker in ("bench:stage_f", "ablation-f", "decode-kernel", "tp"):
        assert text.count(f"<!-- {marker} -->") == text.count(f"<!-- /{marker} -->") == 1


def test_it_measures_on_a_cpu_what_a_cpu_has(tmp_path: Path):
    path = tmp_path / "graph-ablation-cpu.json"
    arguments = ["--model", "random:qwen2-tiny", "--device", "cpu", "--size", "tiny", "--seconds", "0"]
    arguments += ["--variants", "all on", "none of them", "--output", str(path)]
    assert graph_ablation.main(arguments) == 0
    payload = json.loads(path.read_text())
    payload["environment"] |= {"commit": COMMIT, "dirty": False}
    check_results(payload)
    assert [r["name"] for r in payload["rows"]] == ["all on", "none of them"]
    for measured in payload["rows"]:
        assert measured["launches"] is None, "nothing is launched on a CPU"
        assert measured["workloads"]["single"][0]["tpot_ms"] > 0
        assert measured["workloads"]["mixed"][0]["output_tokens_per_s"] > 0
    assert "| all on | – | – |" in "\n".join(tables(payload)["ablation-f"]) and tables(payload)["tp"] == []
