"""`make figures`: when a published result is stale, and what is measured, in which order."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from measured import ENVIRONMENT

from benchmarks import figures, results
from benchmarks.figures import Figure, left_over, main, stale
from benchmarks.sources import code_of

STUDY = '''"""Prose."""

from stage_a_naive import LLM


def measure() -> dict:
    """Seconds."""
    return {"rows": [{"samples": [1.0, 2.0, 3.0]}]}  # a comment
'''


def tree(root: Path, study: str = STUDY, kernel: str = "int f() { return 1; }", ranks: str = "") -> Path:
    """A small repository: a study that measures an engine with a kernel."""
    files = {
        "benchmarks/micro/fake.py": study,
        "stage_a_naive/__init__.py": 'DEFINED_IN = {"LLM": "stage_a_naive.llm", "other": "stage_a_naive.other"}\n',
        "stage_a_naive/llm.py": "from stage_c_fused_mlp.fused_mlp import run\n\n\ndef LLM():\n    return run()\n",
        "stage_a_naive/other.py": "NOT = 'imported'\n",
        "stage_c_fused_mlp/__init__.py": "import stage_f_graph_tp.kernels.rank_sum\n",
        "stage_f_graph_tp/kernels/rank_sum.py": ranks,
        "stage_c_fused_mlp/fused_mlp.py": "def run():\n    if 0:\n        raise ValueError('what is wrong')\n",
        "csrc/stage_c/kernel.cu": kernel,
    }
    shutil.rmtree(root, ignore_errors=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def code(root: Path) -> dict[str, str]:
    return code_of("benchmarks.micro.fake", root=root)


def test_a_result_depends_on_the_code_that_its_study_imports_and_not_on_prose(tmp_path):
    before = code(tree(tmp_path / "a"))
    assert set(before) == {"benchmarks", "csrc", "stage_a_naive", "stage_c_fused_mlp", "ranks"}
    prose = STUDY.replace("Prose", "Other words").replace("# a comment", "# another")
    prose = prose.replace("\n\n\ndef", '\n\nTABLES = "[fake]"\n\n\ndef draw(results):\n    return {}\n\n\ndef')
    same = tree(tmp_path / "b", prose, "int f() {  // one\n return 1;\n}")
    assert code(same) == before
    (same / "stage_a_naive/other.py").write_text("NOT = 'imported, and changed'\n")
    assert code(same) == before
    assert code(tree(tmp_path / "c", STUDY.replace("3.0", "4.0"))) == before | {
        "benchmarks": code(tmp_path / "c")["benchmarks"]
    }
    other = tree(tmp_path / "d", kernel="int f() { return 2; }")
    assert {folder for folder, own in code(other).items() if own != before[folder]} == {"csrc"}
    other = tree(tmp_path / "e", ranks="SPINS = 2")
    assert {folder for folder, own in code(other).items() if own != before[folder]} == {"ranks"}


def test_the_code_of_several_ranks_does_not_make_a_result_of_one_gpu_stale(tmp_path):
    engine, hosts = "benchmarks.run --engines F --publish table", "benchmarks.micro pipeline --publish table"
    for machine, command, changed in (
        ("NVIDIA X", engine, ""),
        ("CPU", engine, ""),
        ("2 × NVIDIA X", engine, "ranks"),
        ("counted", hosts, "ranks"),
    ):
        figure = Figure(command, machine, 1, tmp_path)
        measured(figure, code=figure.code | {"ranks": "other"}, device={"name": "NVIDIA X"})
        assert figure.change.rpartition(": ")[2] == changed, machine


def test_a_mended_folder_holds_for_the_declared_commits_until_it_changes_again(tmp_path, monkeypatch):
    figure = Figure("benchmarks.run --engines D --publish table", "CPU", 1, tmp_path)
    for commit, now, changed in ("f", "1", ""), ("e", "1", "stage_d_paged"), ("f", "2", "stage_d_paged"):
        mended = {"stage_d_paged": {"hash": "1", "commits": ["f" * 8], "why": "a test"}}
        monkeypatch.setattr(figures, "read_plan", lambda mended=mended: {"mended": mended})
        monkeypatch.setattr(figures, "whole", {"stage_d_paged": now}.get)
        measured(figure, code=figure.code | {"stage_d_paged": "other"}, commit=commit * 40)
        figure = Figure(figure.command, figure.machine, 1, tmp_path)
        assert figure.change.rpartition(": ")[2] == changed, (commit, now)


def test_every_declared_mending_is_of_the_code_as_it_is():
    for folder, mended in figures.read_plan()["mended"].items():
        assert mended["hash"] == figures.whole(folder), f"{folder} has changed since: measure again, drop the entry"


def test_every_published_result_has_a_command_that_names_it():
    plan = figures.figures(results.RESULTS)
    names = [figure.name for figure in plan]
    assert len(set(names)) == len(names)
    made = {figure.table for figure in plan}
    files = {path.stem for path in results.RESULTS.glob("*.json")}
    assert not {name for name in files if results.table_of(name) not in made and not name.startswith("elsewhere-")}
    for figure in plan:
        assert figure.code, figure.name
    for command in figures.read_plan()["needs"]:
        assert any(f".{command} " in figure.command for figure in plan), f"no command {command!r}"


PLAN = """
needs = {}
["7 × NVIDIA X"]
"benchmarks.run --engines A --publish table-1" = 2
[counted]
"benchmarks.micro scheduling --publish counted" = 3
"benchmarks.micro block_waste --publish first" = 30
"benchmarks.micro block_waste part=x --publish second" = 1
"benchmarks.run --engines A --publish two-1" = 1
"benchmarks.run --engines A B --publish two-2" = 1
"""


@pytest.fixture
def plan(tmp_path, monkeypatch) -> list[Figure]:
    """A plan of six results, of which none is measured."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    monkeypatch.setattr(figures, "PLAN", tmp_path / "plan.toml")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setenv("BENCH_COMMIT", "f" * 40)
    return figures.figures(tmp_path)


def measured(figure: Figure, **where: object) -> None:
    where = ENVIRONMENT | {"code": figure.code, "command": figure.command, "commit": "f" * 40} | where
    results.write({"kind": "fake", "environment": where, "rows": [{}]}, figure.folder / f"{figure.name}.json")


def test_a_result_is_stale_if_its_code_or_the_commit_of_its_table_differs(plan, tmp_path):
    assert [f.name for f in plan[1:4]] == ["scheduling-counted", "block_waste-first", "block_waste-x-second"]
    for figure in plan:
        measured(figure)
    plan = figures.figures(tmp_path)
    assert stale(plan[1:], "f" * 40) == {}
    assert stale(plan, "f" * 40) == {plan[0]: "measured on a machine"}
    measured(plan[1], code=plan[1].code | {"stage_e_batching": "other", "beyond": "gone"})
    measured(plan[2], code={"nothing": "0"})
    measured(plan[3], command="benchmarks.micro block_waste part=y --publish second")
    measured(plan[4], commit="0" * 40)
    plan = figures.figures(tmp_path)
    found = {figure.name: why for figure, why in stale(plan[1:], "f" * 40).items()}
    assert set(found) == {"scheduling-counted", "block_waste-first", "block_waste-x-second", "two-1"}
    assert found["block_waste-x-second"].startswith("measured by another command: python -m benchmarks.micro")
    assert found["scheduling-counted"].endswith("2030-01-02: beyond, stage_e_batching")
    assert found["two-1"] == "another part of its table is measured again"
    assert "not measured yet" not in found.values()
    results.write({"kind": "x", "environment": ENVIRONMENT, "rows": [{}]}, tmp_path / "two-3.json")
    assert left_over(plan, tmp_path) == ["two-3"]


def test_the_most_valuable_that_fit_are_measured_and_the_next_call_goes_on(plan, monkeypatch, capsys):
    ran: list[str] = []

    def measure(figure: Figure) -> int:
        measured(figure, seconds=60)
        ran.append(figure.name)
        return 130 if len(ran) == 2 else 0

    monkeypatch.setattr(Figure, "measure", measure)
    assert main([]) == 0 and not ran
    listed = capsys.readouterr().out
    assert listed.startswith("6 of 6 results are stale.") and "table-1: not measured yet; needs 7 × NVIDIA X" in listed
    assert main(["--minutes", "5"]) == 130
    assert ran == ["scheduling-counted", "block_waste-x-second"], "what takes half an hour does not fit"
    assert main(["--minutes", "5"]) == 0
    assert ran[2:] == ["two-1", "two-2"]
    assert main(["two", "--minutes", "5"]) == 0 and len(ran) == 4
    monkeypatch.setenv("BENCH_COMMIT", "f" * 40 + "-dirty")
    assert main(["--minutes", "50"]) == 2 and "need a clean commit" in capsys.readouterr().err


def test_a_study_runs_on_the_first_of_the_gpus_that_are_visible(monkeypatch):
    seen = []
    monkeypatch.setattr(figures, "gpus", lambda: ["NVIDIA X"] * 2)
    monkeypatch.setattr(
        figures.subprocess,
        "run",
        lambda *_, env, **__: seen.append(env["CUDA_VISIBLE_DEVICES"]) or SimpleNamespace(returncode=0),
    )
    for given in ("2,3", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        Figure("benchmarks.micro mini --publish a", "NVIDIA X", 1, figures.RESULTS).measure()
    assert seen == ["2", "0"]


def test_what_this_machine_cannot_do_has_a_reason(monkeypatch):
    monkeypatch.setattr(figures, "read_plan", lambda: {"needs": {"micro mlp": "no_such_package"}})
    monkeypatch.setattr(figures, "gpus", lambda: ["NVIDIA X", "NVIDIA X"])
    needs = {
        machine: Figure("benchmarks.micro mini --publish a", machine, 1, figures.RESULTS).need
        for machine in ("CPU", "2 × NVIDIA X")
    }
    assert needs == {"CPU": "needs a machine without a GPU", "2 × NVIDIA X": ""}
    assert Figure("benchmarks.micro mini --publish a", "NVIDIA Y", 1, figures.RESULTS).need == "needs NVIDIA Y"
    assert Figure("benchmarks.micro mlp --publish a", "counted", 1, figures.RESULTS).need == "needs no_such_package"
    monkeypatch.setattr(figures, "gpus", list)
    monkeypatch.setattr(figures.os, "getloadavg", lambda: (3.1, 0, 0))
    assert (
        Figure("benchmarks.micro mini --publish a", "CPU", 1, figures.RESULTS).need
        == "needs an idle machine: its load is 3.1"
    )
