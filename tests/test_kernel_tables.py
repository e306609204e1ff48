"""The tables of the GPU's kernels: what stands in a README is what its results file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import attention_report, decode_kernel, graph_ablation_report, layer_kernels, mlp_report
from benchmarks.environment import ROOT
from benchmarks.markers import fill

RESULTS = ROOT / "benchmarks" / "results"
TABLES = [
    ("stage_c_fused_mlp", mlp_report.MARKER, mlp_report.markdown, "mlp_kernels_h200.json"),
    ("stage_d_paged", attention_report.MARKER, attention_report.markdown, "attention_kernels_h200.json"),
    ("stage_f_graph_tp", "decode-kernel", decode_kernel.report, "decode_kernel_h200.json"),
    ("stage_f_graph_tp", "layer-kernels", layer_kernels.report, "layer_kernels_h200.json"),
]


@pytest.mark.parametrize("stage, marker, markdown, file", TABLES)
def test_a_readmes_table_is_its_results_file(stage, marker, markdown, file):
    text = (ROOT / stage / "README.md").read_text(encoding="utf-8")
    assert fill(text, marker, markdown(json.loads((RESULTS / file).read_text()))) == text


def test_the_tables_of_ideas_and_ranks_are_their_results_files(tmp_path: Path):
    text = (ROOT / "stage_f_graph_tp" / "README.md").read_text(encoding="utf-8")
    copy = tmp_path / "README.md"
    copy.write_text(text, encoding="utf-8")
    graph_ablation_report.report(RESULTS, copy)
    assert copy.read_text(encoding="utf-8") == text


def test_the_fastest_kind_of_layers_stands_out():
    def step(kind: str, rows: int, seconds: float) -> dict:
        return {"model": "a model", "kind": kind, "rows": rows, "seconds": seconds, "floor": 1e-6}

    kinds = list(layer_kernels.KINDS)
    steps = [step(kind, 1, (10 - n) * 1e-6) for n, kind in enumerate(kinds)] + [step(kinds[1], 2, 7e-6)]
    results = {"steps": steps, "device": {"name": "a GPU"}, "copy_bytes_per_s": 4e12, "commit": "0123456789"}
    table = layer_kernels.report(results)
    slowest_first = [f"{10 - n}" for n in range(len(kinds) - 1)]
    assert f"| 1 | {' | '.join(slowest_first)} | **{11 - len(kinds)}** | 1 |" in table
    assert f"| 2 | – | **7** | {' | '.join('–' * (len(kinds) - 2))} | 1 |" in table
