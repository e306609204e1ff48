"""The ablation of stage B: it measures what it says, and its table comes from a checked file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import decode_ablation
from benchmarks.results import ResultsError, check_results
from stage_b_decode_step import LLM

COMMIT = "0123456789abcdef"


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("ablation") / "decode-ablation-cpu.json"
    arguments = [
        "--model", "random:qwen2-tiny", "--device", "cpu", "--prompt-tokens", "8", "--output-tokens", "4",
        "--rounds", "2", "--seconds", "0", "--output", str(path), "--variants", "A", "B", "B without late checks",
    ]  # fmt: skip
    assert decode_ablation.main(arguments) == 0
    result = json.loads(path.read_text())
    result["environment"] |= {"commit": COMMIT, "dirty": False}
    return result


def test_every_variant_is_one_switch_of_the_stage() -> None:
    switches = LLM.__init__.__kwdefaults__
    for name, options in decode_ablation.VARIANTS.items():
        changed = {k: v for k, v in (options or {}).items() if k != "compile"}
        assert len(changed) <= 1 and all(switches[k] is True and v is False for k, v in changed.items()), name


def test_each_variant_has_a_sample_a_round_and_the_file_passes_the_check(payload: dict) -> None:
    check_results(payload)
    assert [row["name"] for row in payload["rows"]] == ["A", "B", "B without late checks"]
    for row in payload["rows"]:
        assert len(row["decode_step_ms"]) == len(row["prefill_ms"]) == 2 and min(row["decode_step_ms"]) > 0
        assert row["first"]["num_generated_tokens"] == 4


def test_the_table_goes_between_the_markers_and_an_unchecked_file_is_refused(payload: dict, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- ablation -->\nold\n<!-- /ablation -->\nafter\n")
    decode_ablation.report(tmp_path, readme)
    assert "No results files yet" in readme.read_text()
    (tmp_path / "decode-ablation-cpu.json").write_text(json.dumps(payload))
    decode_ablation.report(tmp_path, readme)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| A | " in text and "1.00 ×" in text and COMMIT[:10] in text
    payload = {**payload, "environment": {**payload["environment"], "commit": None}}
    (tmp_path / "decode-ablation-cpu.json").write_text(json.dumps(payload))
    with pytest.raises(ResultsError, match="no commit"):
        decode_ablation.report(tmp_path, readme)
    assert readme.read_text() == text


def test_a_readme_without_markers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(ResultsError, match="has no <!-- ablation -->"):
        decode_ablation.report(tmp_path, tmp_path / "README.md")
