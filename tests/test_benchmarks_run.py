"""The runner: which engines, in which order, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import environment
from benchmarks.engines import ENGINES, installed_engines, select, unmet_need
from benchmarks.environment import ROOT
from benchmarks.figures import TimedCall
from benchmarks.launch import run_job
from benchmarks.measure import run_workload, timed_call
from benchmarks.measurement import in_alternating_order
from benchmarks.parity import difference
from benchmarks.peers import TransformersEngine
from benchmarks.run import main, results_path
from benchmarks.warmup import estimate, warm_up
from benchmarks.workloads import make_workload
from stage_a_naive import LLM, SamplingParams

CPU = torch.device("cpu")
BY_NAME = {engine.name: engine for engine in ENGINES}


def test_every_second_repeat_is_reversed() -> None:
    engines = [BY_NAME["A"], BY_NAME["D"], BY_NAME["F"]]
    names = [[engine.name for engine in in_alternating_order(engines, repeat)] for repeat in range(3)]
    assert names == [["A", "D", "F"], ["F", "D", "A"], ["A", "D", "F"]]


def test_only_what_is_installed_is_a_row() -> None:
    names = [engine.name for engine in installed_engines()]
    assert "A" in names and "transformers" in names
    assert len(set(names)) == len(names)


def test_options_in_brackets_make_a_row_of_their_own() -> None:
    plain, variant = select(["A", "A[seed=3,dtype=float32]"], [])
    assert (plain.name, dict(plain.options)) == ("A", {})
    assert (variant.name, dict(variant.options)) == ("A[seed=3,dtype=float32]", {"seed": 3, "dtype": "float32"})


def test_engine_options_change_the_row_that_they_name() -> None:
    first, second = select(["transformers", "A"], ["A.seed=5", "A.flag=true"])
    assert dict(first.options) == {} and dict(second.options) == {"seed": 5, "flag": True}


@pytest.mark.parametrize(
    ("engines", "options", "message"),
    [
        (["Z"], [], "no engine 'Z' here; there are: "),
        (["A[seed]"], [], "not of the form name=value"),
        (["A"], ["transformers.seed=1"], "not among those to run"),
    ],
)
def test_a_wrong_command_line_is_refused(engines: list[str], options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(engines, options)


def test_an_engine_says_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unmet_need(BY_NAME["F, 2 GPUs"], 1) == "needs 2 GPUs, there are 1"
    monkeypatch.setattr("benchmarks.engines.shutil.which", lambda name: None)
    assert unmet_need(BY_NAME["B compiled"], 1) == "no C++ compiler"


def test_several_models_need_several_files() -> None:
    assert results_path("x-{model}.json", "gpu", "random:qwen3-0.6b", True) == Path("x-qwen3-0.6b.json")
    with pytest.raises(ValueError, match="{model}"):
        results_path("x.json", "gpu", "tutor", True)


def test_parity_failure_says_where_the_answers_part() -> None:
    assert "answer 1 parts from A's at token 2: [3] became [4]" in difference([[1], [1, 2, 3]], [[1], [1, 2, 4]])


class Clockwork:
    """An engine that only counts what it is asked for; `lost` tokens of every answer go missing."""

    def __init__(self, lost: int = 0) -> None:
        self.lost, self.calls = lost, []

    def generate(self, prompts: list, sampling_params: list[SamplingParams], use_tqdm: bool) -> list[dict]:
        self.calls.append([(len(p), s.max_tokens) for p, s in zip(prompts, sampling_params, strict=True)])
        return [{"token_ids": [0] * (params.max_tokens - self.lost)} for params in sampling_params]


def test_an_engine_that_returns_fewer_tokens_is_refused() -> None:
    workload = make_workload("single", "tiny")
    with pytest.raises(RuntimeError, match="did not get the 8 tokens"):
        timed_call(Clockwork(lost=1), workload, workload.rounds[0][1], CPU)


def test_a_workload_that_would_take_too_long_is_not_run_and_says_so() -> None:
    llm = Clockwork()
    found = run_workload(llm, BY_NAME["A"], make_workload("mixed", "tiny"), CPU, round_seconds=1, max_seconds=0)
    assert "the limit was 0 s" in found["not_run"] and "one request at a time" in found["not_run"]
    assert len(llm.calls) == 2  # the short warm-up that it was judged by


def test_rounds_stop_when_the_time_is_up_but_one_always_runs() -> None:
    workload = make_workload("single", "cpu")
    assert len(run_workload(Clockwork(), BY_NAME["A"], workload, CPU, 0.0, 60)["samples"]) == 1
    found = run_workload(Clockwork(), BY_NAME["A"], workload, CPU, 60.0, 60)
    assert len(found["samples"]) == len(workload.rounds)
    assert found["peak_memory"]["bytes"] > 0


def test_the_estimate_adds_up_requests_only_for_engines_that_serve_one_at_a_time() -> None:
    workload = make_workload("decode32", "cpu")  # 8 requests of 32 tokens, after 8 of 1 token

    def time_call(call: object) -> TimedCall:
        return TimedCall(call, 1.0, [{"tpot": 0.1}])

    assert estimate(time_call, workload, one_at_a_time=False) == pytest.approx(1 + 1 + (32 - 5) * 0.1)
    assert estimate(time_call, workload, one_at_a_time=True) == pytest.approx(4 + (8 - 5) * 0.1 + 4 + (256 - 5) * 0.1)


def test_warm_up_of_one_at_a_time_engines_takes_as_many_lengths_as_fit() -> None:
    workload = make_workload("mixed", "cpu")
    asked: list = []
    warm_up(asked.append, workload, True, expected_seconds=4.0, most_seconds=1.0)
    [call] = asked
    assert len(call.prompts) == len(workload.rounds[0][0].prompts) // 4
    warm_up(asked.append, workload, False, expected_seconds=4.0, most_seconds=1.0)
    assert len(asked) == 1  # a batch is not shorter with fewer requests


def test_static_batch_of_transformers_answers_as_stage_a_does() -> None:
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41], [300, 301, 302, 303]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 7, 5)]
    expected = LLM("random:qwen2-tiny", device="cpu").generate(prompts, params, use_tqdm=False)
    found = TransformersEngine("random:qwen2-tiny", device="cpu").generate(prompts, params)
    assert [o["token_ids"] for o in found] == [o["token_ids"] for o in expected]
    assert all(o["metrics"]["ttft"] > 0 for o in found)


def test_static_batch_refuses_mixed_temperatures() -> None:
    engine = TransformersEngine("random:qwen2-tiny", device="cpu")
    with pytest.raises(ValueError, match="one temperature"):
        engine.generate([[1], [2]], [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)])


def test_a_process_that_hangs_is_stopped_and_one_that_dies_says_why() -> None:
    hung = run_job({"kind": "probe", "device": "cpu", "dtype": "auto"}, timeout=0.01)
    assert "was stopped after 0 s" in hung["error"]
    died = run_job({"kind": "no such kind"}, timeout=60)
    assert "exit status 1" in died["error"] and "KeyError: 'no such kind'" in died["error"]


def test_the_whole_benchmark_runs(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = [
        sys.executable, "-m", "benchmarks.run", "--size", "tiny", "--model", "random:qwen2-tiny", "--parity-model",
        "random:qwen2-tiny", "--engines", "A", "--workloads", "single", "ttft", "--repeats", "1", "--device", "cpu",
        "--output", str(output),
    ]  # fmt: skip
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = json.loads(output.read_text())
    assert found["parity"]["equal"] == ["A"]
    assert [(row["engine"], row["workload"]) for row in found["rows"]] == [("A", "single"), ("A", "ttft")]
    single = found["rows"][0]
    assert single["samples"][0]["tpot_ms"] == single["figures"]["tpot_ms"]["median"]
    assert 0 < single["figures"]["tpot_ms"]["percent_of_floor"] < 100
    assert found["workloads"]["single"]["hash"] == make_workload("single", "tiny").hash


def test_a_wrong_model_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "random:nothing", "--engines", "A"]) == 2
    assert "no preset 'nothing'" in capsys.readouterr().err


def test_the_commit_comes_from_the_environment_where_there_is_no_git(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    assert environment.commit_of_tree() == (None, None)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    assert environment.commit_of_tree() == ("0123abc", False)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc-dirty")
    assert environment.commit_of_tree() == ("0123abc", True)
