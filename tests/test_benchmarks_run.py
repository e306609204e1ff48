"""The runner: which engines run, in which order and processes, and into which file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from select import select as wait_for

import pytest
import torch
from measured import CEILINGS, ENVIRONMENT

from benchmarks import results, run, worker
from benchmarks.engines import ENGINES, STUDIES, select
from benchmarks.measure import TimedCall, expected_seconds, run_workload, timed_call
from benchmarks.peers import TransformersEngine
from benchmarks.results import ROOT
from benchmarks.run import Measurement, difference
from benchmarks.worker import run_job
from benchmarks.workloads import make_workload
from stage_a_naive import LLM, SamplingParams
from stage_b_decode_step import LLM as StageB

BY_NAME = {engine.name: engine for engine in ENGINES}


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name", "factory", "options"),
    [
        ("A", "A", "stage_a_naive:LLM", {}),
        ("A[seed=3,dtype=float32]", "A[seed=3,dtype=float32]", "stage_a_naive:LLM", {"seed": 3, "dtype": "float32"}),
        ("mine=stage_a_naive:LLM[seed=7]", "mine[seed=7]", "stage_a_naive:LLM", {"seed": 7}),
    ],
)
def test_options_in_brackets_and_classes_of_your_own_make_rows_that_need_no_change_of_a_file(
    word, name, factory, options
):
    [row] = select([word])
    assert (row.name, row.factory, dict(row.options)) == (name, factory, options)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("Z", "no engine 'Z' here; there are: .*'A, cuDNN SDPA off', B, 'B compiled', "),
        ("A[seed]", "not of the form name=value"),
        ("A]", "not of the form NAME, NAME=module:Class"),
        ("mine=no_such_module:LLM", "no module 'no_such_module'"),
    ],
)
def test_a_wrong_engine_is_refused(engine, message):
    with pytest.raises(ValueError, match=message):
        select([engine])


def test_every_row_of_a_study_is_made_of_switches_that_its_stage_has():
    for engine in select([], "stage-b"):
        changed = {k: v for k, v in engine.options.items() if k != "compile"}
        assert len(changed) <= 1 and all(StageB.__init__.__kwdefaults__[k] is not v for k, v in changed.items())
    assert [engine.name for engine in select([], "ranks")] == list(STUDIES["ranks"])
    lengths = [engine.options["max_model_len"] for engine in select([], "quantization")]
    assert len(lengths) == 3 and len(set(lengths)) == 1, "rows of two packages, sized alike"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([[1], [1, 2, 4]], "answer 1 parts from A's at token 2: [3] became [4]"),
        ([[1], [1, 2]], "answer 1 parts from A's at token 2: [3] became []"),
        ([[1, 5], [1, 2, 3]], "answer 0 parts from A's at token 1: [] became [5]"),
        ([[1], [1, 2, 3]], ""),
    ],
)
def test_parity_failure_says_where_the_answers_part(found, says):
    different = difference([[1], [1, 2, 3]], found)
    assert says in different and bool(different) == bool(says)


# ---- timing --------------------------------------------------------------------------------------------------


class Clockwork:
    """An engine that only counts its requests; `lost` tokens of every answer are missing."""

    def __init__(self, lost: int = 0) -> None:
        self.lost, self.calls = lost, []

    def generate(self, prompts: list, sampling_params: list[SamplingParams], use_tqdm: bool) -> list[dict]:
        self.calls.append([(len(p), s.max_tokens) for p, s in zip(prompts, sampling_params, strict=True)])
        return [{"token_ids": [0] * (params.max_tokens - self.lost)} for params in sampling_params]


def test_an_engine_that_returns_fewer_tokens_is_refused():
    workload = make_workload("single", "tiny")
    with pytest.raises(RuntimeError, match="did not get the 8 tokens"):
        timed_call(Clockwork(lost=1), workload, workload.rounds[0][1], torch.device("cpu"))


def test_a_workload_that_would_take_too_long_is_not_run_and_says_so():
    llm = Clockwork()
    found = run_workload(llm, BY_NAME["A"], make_workload("mixed", "tiny"), "cpu", 1.0, 0.0, False)
    assert "the limit was 0 s" in found["not_run"] and "one request at a time" in found["not_run"]
    assert len(llm.calls) == 2  # the short warm-up that it was judged by


def test_rounds_stop_when_the_time_is_up_but_one_always_runs():
    workload = make_workload("single", "cpu")
    assert len(run_workload(Clockwork(), BY_NAME["A"], workload, "cpu", 0.0, 60.0, False)["samples"]) == 1
    found = run_workload(Clockwork(), BY_NAME["A"], workload, "cpu", 60.0, 60.0, False)
    assert len(found["samples"]) == len(workload.rounds)


def test_a_long_round_of_one_request_after_another_visits_the_ends_of_all_requests_first():
    llm, workload = Clockwork(), make_workload("mixed", "cpu")
    run_workload(llm, BY_NAME["B"], workload, "cpu", -1.0, 60.0, False)
    *_, ends, whole = llm.calls
    assert [n + out for n, out in ends] == [n + out for n, out in whole]
    assert [out for _, out in ends] == [min(out, 5) for _, out in whole] != [out for _, out in whole]
    run_workload(llm, BY_NAME["E"], workload, "cpu", -1.0, 60.0, False)
    assert llm.calls[-1] == whole and llm.calls[-2] != ends


def test_what_a_round_takes_adds_up_requests_only_for_engines_that_serve_one_at_a_time():
    workload = make_workload("decode32", "cpu")  # 8 requests of 32 tokens, after 8 of 1 token

    def timed(calls: list) -> list[TimedCall]:
        return [TimedCall(call, 1.0, [{"tpot": 0.1}]) for call in calls]

    batch, single = (expected_seconds(timed, workload, one_at_a_time) for one_at_a_time in (False, True))
    assert batch == pytest.approx(1 + 1 + (32 - 5) * 0.1)
    assert single == pytest.approx(4 + (8 - 5) * 0.1 + 4 + (256 - 5) * 0.1)


def test_the_first_visit_to_the_lengths_of_single_is_kept_and_not_counted():
    llm = Clockwork()
    found = run_workload(llm, BY_NAME["A"], make_workload("single", "tiny"), "cpu", 0.0, 60.0, False)
    assert found["first_visit"].keys() == found["samples"][0].keys() and found["first_prefill_ms"] > 0
    assert [calls[-1] for calls in llm.calls][-4:] == [(8, 1), (8, 8), (8, 1), (8, 8)]  # the visit, then the round


def test_static_batch_of_transformers_answers_as_stage_a_does():
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41], [300, 301, 302, 303]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 7, 5)]
    expected = LLM("random:qwen2-tiny", device="cpu").generate(prompts, params, use_tqdm=False)
    found = TransformersEngine("random:qwen2-tiny", device="cpu").generate(prompts, params)
    assert [o["token_ids"] for o in found] == [o["token_ids"] for o in expected]


def test_static_batch_refuses_mixed_temperatures():
    engine = TransformersEngine("random:qwen2-tiny", device="cpu")
    with pytest.raises(ValueError, match="one temperature"):
        engine.generate([[1], [2]], [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)])


# ---- processes ------------------------------------------------------------------------------------------------------


def test_a_process_that_hangs_is_stopped_and_one_that_dies_says_why():
    assert "took too long and was stopped" in run_job({"kind": "look"}, timeout=0.01)["error"]
    died = run_job({"kind": "timing"}, timeout=60)
    assert "exit status 1" in died["error"] and "KeyError: 'engine'" in died["error"]


def test_what_a_process_has_started_ends_with_it(tmp_path, monkeypatch):
    pipe, python = tmp_path / "pipe", tmp_path / "python"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    python.write_text(f"#!/bin/sh\nexec 3> {pipe}\nsleep 1000 &\n")  # as an engine that leaves a worker behind
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "exit status 0" in run_job({"kind": "look"}, timeout=60)["error"]
    assert wait_for([reader], [], [], 30)[0] and os.read(reader, 1) == b"", "it holds its end of the pipe"
    os.close(reader)


SLEEPER = """
import time
class LLM:
    def __init__(self, *given, **options):
        self.file = open({!r}, "w")
        print("x", end="", file=self.file, flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_runner_that_a_signal_ends_leaves_no_process(number, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "sleeper.py").write_text(SLEEPER.format(str(pipe)))
    engine = {"name": "x", "factory": "sleeper:LLM", "package": "sleeper"}
    job = {"kind": "timing", "engine": engine, "model": "", "device": "cpu", "dtype": "", "max_model_len": 1}
    program = f"from benchmarks.worker import run_job\nrun_job({job}, 600)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    runner = subprocess.Popen([sys.executable, "-c", program], env=environment, cwd=ROOT)
    assert wait_for([reader], [], [], 120)[0] and os.read(reader, 1) == b"x", "the worker has begun"
    runner.send_signal(number)
    runner.wait(60)
    assert wait_for([reader], [], [], 60)[0] and os.read(reader, 1) == b"", "the worker holds its end of the pipe"
    os.close(reader)


def test_what_a_process_finds_is_heard_while_it_works(tmp_path):
    program = "import sys, time; open(sys.argv[1], 'w').write('{\"answers\": 1}'); time.sleep(1)"
    file, heard = tmp_path / "result.json", []
    process = subprocess.Popen([sys.executable, "-c", program, str(file)])
    assert worker.wait(process, 60, file, lambda found: heard.append((found, process.poll()))) == 0
    assert heard == [({"answers": 1}, None)]


# ---- the command ----------------------------------------------------------------------------------------------------

TINY = ["--size", "tiny", "--model", "random:qwen2-tiny", "--parity-model", "random:qwen2-tiny", "--device", "cpu"]
MACHINE = {"environment": ENVIRONMENT, "dtype": "float32", "ceilings": CEILINGS, "launch_seconds": None}
SAMPLE = {"prefill_ms": 2.0, "tpot_ms": 1.25, "output_tokens_per_s": 700.0}


@pytest.fixture
def committed():
    """The committed results and the files made of them; they must be unchanged when the test ends."""
    folders = results.RESULTS.iterdir(), ROOT.glob("*.md"), ROOT.glob("*/README.md"), ROOT.glob("benchmarks/plots/*")
    files = {path: path.read_bytes() for folder in folders for path in folder}
    yield
    assert {path: path.read_bytes() for path in files} == files


class Jobs:
    """Stands for the processes that do the work: each finds the same, and then what `differently` says."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.differently: Callable[[dict], dict] = lambda job: {}

    def __call__(self, job: dict, timeout: float, heard: Callable[[dict], None]) -> dict:
        self.asked.append(job)
        answers = {engine["name"]: [[1]] for engine in job.get("engines", ())}
        workloads = {name: {"samples": [SAMPLE]} for name in job.get("workloads", ())}
        whole = {"startup_seconds": 2.5, "peak_megabytes": 321.0}  # of a process
        found = {"answers": answers} if job["kind"] == "look" else whole | {"workloads": workloads}
        heard(found)
        return MACHINE | found | self.differently(job)


@pytest.fixture
def jobs(monkeypatch):
    jobs = Jobs()
    monkeypatch.setattr(run, "run_job", jobs)
    return jobs


def measuring(tmp_path: Path, *engines: str, **options: object) -> Measurement:
    """A measurement whose engines have passed the parity gate."""
    args = {"size": "tiny", "model": "tutor", "workloads": ["single"], "repeats": 2, "max_seconds": 30.0}
    args |= {"quick": False, "parity_model": "tutor", "device": "cpu", "dtype": "auto", "study": None, "publish": None}
    found = Measurement(Namespace(**args | options, engines=engines, output=tmp_path / "out.json"))
    found.found, found.equal = dict(MACHINE), list(engines)
    return found


@pytest.mark.slow
def test_the_whole_benchmark_runs_shows_a_table_and_changes_nothing_that_is_committed(tmp_path, committed, capsys):
    output = tmp_path / "out.json"
    engine = ["--engines", "A", "--workloads", "single", "ttft", "--repeats", "1"]
    assert run.main([*TINY, *engine, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "process 1 of 1" in shown and "start-up, s" in shown
    [row] = [line for line in shown.splitlines() if line.startswith("A  ")]
    assert len(row.split()) >= 5
    found = json.loads(output.read_text())
    assert found["parity"]["equal"] == ["A"]
    assert [(row["engine"], row["workload"]) for row in found["rows"]] == [("A", "single"), ("A", "ttft")]
    single = found["rows"][0]
    assert single["samples"][0]["tpot_ms"] > 0 and single["startup_seconds"][0] > 0
    assert found["workloads"]["single"]["hash"] == make_workload("single", "tiny").hash


def test_ctrl_c_shows_what_was_measured_and_changes_nothing_that_is_committed(tmp_path, jobs, committed, capsys):
    output = tmp_path / "out.json"

    def interrupted(job: dict) -> dict:
        if output.exists():  # the second process
            raise KeyboardInterrupt
        return {}

    jobs.differently = interrupted
    assert run.main([*TINY, "--engines", "A", "E", "--workloads", "single", "--output", str(output)]) == 130
    shown = capsys.readouterr()
    assert "interrupted" in shown.err and "process 2 of 6, about 0 min left" in shown.out
    assert "E has answered" in shown.out, "a line while engines are compared"
    [row] = [line for line in shown.out.splitlines() if line.startswith("A  ")]
    assert row.split()[:3] == ["A", "2.50", "1.25"] and row.split()[-1] == "321"
    assert "peak memory, MB" in shown.out
    assert [row["engine"] for row in json.loads(output.read_text())["rows"]] == ["A"]


def test_every_second_repeat_is_in_the_other_order_and_the_first_counts_launches(tmp_path, jobs):
    def timed(job: dict) -> dict:
        sample = SAMPLE | {"tpot_ms": len(job["engine"]["name"])}
        return {"workloads": {"single": {"first_visit": {"tpot_ms": len(jobs.asked)}, "samples": [sample]}}}

    jobs.differently = timed
    found = measuring(tmp_path, "A", "B compiled")
    found.time_all()
    asked = [(job["engine"]["name"], job["limits"].pop("count")) for job in jobs.asked]
    assert asked == [("A", True), ("B compiled", True), ("B compiled", False), ("A", False)]
    limits = {"device": "cpu", "round_seconds": 0.0, "max_seconds": 30.0}
    assert [job["limits"] for job in jobs.asked] == [limits] * 4
    steps = {name: [sample["tpot_ms"] for sample in found.rows[name, "single"]["samples"]] for name in found.equal}
    assert steps == {"A": [1, 1], "B compiled": [10, 10]}
    visits = [found.rows[name, "single"]["first_visit"]["tpot_ms"] for name in found.equal]
    assert visits == [1, 2], "that of the first process"


def test_rows_of_a_study_can_be_measured_by_themselves():
    assert [engine.name for engine in select(["F, 2 GPUs"], "ranks")] == ["F, 2 GPUs"]


@pytest.mark.parametrize(
    ("words", "commit", "says"),
    [
        ("--study ranks --engines E", "abc", "no row 'E' in study 'ranks'"),
        ("--model random:nothing --engines A", "abc", "no preset 'nothing'"),
        ("--publish mine --engines A", "abc-dirty", "--publish needs a clean commit"),
        ("--publish mine --engines A", "", "--publish needs a clean commit"),  # nor is there git
        ("--engines A --repeats 0", "abc", "--repeats 0, --max-seconds 60: at least 1, and above 0"),
        ("--engines A --max-seconds 0", "abc", "--repeats 3, --max-seconds 0: at least 1"),
        ("--publish mine --engines A --repeats 2", "abc", "3 repeats (or a name that ends in -1, -2"),
        ("--publish mine-1 --engines A --repeats 1", "abc-dirty", "--publish needs a clean commit"),
        ("--publish mine --engines A --size tiny", "abc", "and size cpu or gpu"),
    ],
)
def test_what_cannot_be_measured_or_published_is_refused_before_anything_starts(
    words, commit, says, jobs, monkeypatch, capsys
):
    monkeypatch.setenv("BENCH_COMMIT", commit)
    monkeypatch.setenv("PATH", "")
    assert run.main(words.split()) == 2 and not jobs.asked
    assert says in capsys.readouterr().err


def test_the_readers_own_summary_compares_each_engine_with_hugging_face(tmp_path, jobs, committed, capsys):
    def faster(job: dict) -> dict:
        if job.get("engine", {}).get("name") != "E":
            return {}
        sample = {"prefill_ms": 1.0, "tpot_ms": 0.5, "output_tokens_per_s": 2100.0}
        return {"workloads": {name: {"samples": [sample]} for name in job["workloads"]}, "peak_megabytes": 400.0}

    jobs.differently, summary = faster, tmp_path / "my_results.md"
    words = ["--engines", "E", "transformers", "--workloads", "single", "mixed", "--repeats", "1"]
    assert run.main([*TINY, *words, "--output", str(tmp_path / "x.json"), "--summary", str(summary)]) == 0
    text = summary.read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| engine", "| *floor*", "| transformers", "| E"]
    assert rows[0][1:] == ["load: tokens/s", "first token: ms", "one request: ms per token", "peak memory, MB |"]
    assert rows[2][1:] == ["700", "2.00", "1.25", "321 |"]
    assert rows[3][1:] == ["2,100, 3.0 ×", "1.00, 2.0 ×", "0.5, 2.5 ×", "400 |"]
    assert "random:qwen2-tiny" in text and "- mixed: 4 requests" in text and str(summary) in capsys.readouterr().out


def test_a_quick_measurement_has_hugging_face_and_the_stages_that_are_there(monkeypatch):
    args = run.with_defaults(run.build_parser().parse_args(["--quick"]))
    assert args.engines == ["transformers", *"ABCDEF"] and args.workloads == ["single", "mixed"]
    monkeypatch.setattr(run, "installed_engines", lambda: dict.fromkeys(["A", "B", "B compiled", "transformers"]))
    assert run.with_defaults(run.build_parser().parse_args(["--quick"])).engines == ["transformers", "A", "B"]


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_published_is_a_whole_measurement(tmp_path, jobs, monkeypatch, is_whole):
    monkeypatch.setenv("BENCH_COMMIT", "0" * 40)

    def interrupted(job: dict) -> dict:
        if len(jobs.asked) == 4 and not is_whole:
            raise KeyboardInterrupt
        return {}

    jobs.differently = interrupted
    words = f"--engines A --workloads single --device cpu --output {tmp_path}/out/x.json --publish {tmp_path}/mine"
    assert run.main(words.split()) == (0 if is_whole else 130)
    assert [job["kind"] for job in jobs.asked] == ["look", *["timing"] * 3]
    assert [path.name for path in tmp_path.glob("*.json")] == ["mine.json"] * is_whole


def test_a_part_of_a_table_may_have_one_repeat(tmp_path, jobs, monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "0" * 40)
    words = f"--engines A --workloads single --repeats 1 --output {tmp_path}/out/x.json --publish {tmp_path}/mine-2"
    assert run.main(words.split()) == 0
    assert [path.name for path in tmp_path.glob("*.json")] == ["mine-2.json"]


@pytest.mark.parametrize("outcome", ["not_run", "error"])
def test_a_workload_that_an_engine_could_not_run_is_not_tried_again_and_a_failure_is_the_exit_status(
    tmp_path, jobs, outcome
):
    outcomes = {"single": {"samples": [SAMPLE]}, "mixed": {outcome: "for a reason"}}
    jobs.differently = lambda job: {"workloads": dict(outcomes)}
    work = [*TINY, "--engines", "A", "--workloads", "single", "mixed", "--output", str(tmp_path / "x.json")]
    assert run.main(work) == (outcome == "error")
    assert [job.get("workloads") for job in jobs.asked] == [None, ["single", "mixed"], ["single"], ["single"]]


@pytest.mark.parametrize(
    ("words", "model", "name", "length"),
    [
        ("", "tutor", "cpu-tutor.json", 4096),
        ("--size gpu", "random:qwen2.5-0.5b", "gpu-qwen2.5-0.5b.json", 8194),
        ("--model random:qwen2-tiny --study ranks", "random:qwen2-tiny", "cpu-qwen2-tiny-ranks.json", 4096),
        ("--model random:qwen3-0.6b --workloads single", "random:qwen3-0.6b", "cpu-qwen3-0.6b.json", 4096),
    ],
)
def test_a_size_has_a_model_and_a_file_is_named_after_what_was_measured(words, model, name, length):
    found = Measurement(run.build_parser().parse_args(words.split()))
    assert (found.model, found.path, found.max_model_len) == (model, results.LOCAL / name, length)


def test_at_cpu_size_some_requests_wait_unless_the_row_says_otherwise(tmp_path):
    rows = ["A", "D", "D[max_num_seqs=4]"]
    for size, expected in (("cpu", [None, 16, 4]), ("tiny", [None, None, 4])):
        assert [e.options.get("max_num_seqs") for e in measuring(tmp_path, *rows, size=size).engines] == expected


def test_an_engine_that_takes_the_parity_process_down_costs_itself_alone(tmp_path, jobs):
    def answers(job: dict) -> dict:
        found = {engine["name"]: [[1, 3]] if engine["name"] == "F" else [[1, 2]] for engine in job["engines"]}
        if "E" in found:  # it kills the process, after those before it have answered
            return {"answers": {name: found[name] for name in ("A", "D")}, "error": "exit status -11"}
        return {"answers": found}

    jobs.differently = answers
    found = measuring(tmp_path, "D", "E", "F", "F, 4 GPUs")
    found.equal = []
    found.look()
    assert [[engine["name"] for engine in job["engines"]] for job in jobs.asked] == [["A", "D", "E", "F"], ["F"]]
    assert found.equal == ["D"] and found.has_failed
    assert found.rows["E", "single"]["error"] == "no answers: exit status -11"
    assert "answer 0 parts from A's at token 1" in found.rows["F", "single"]["error"]
    assert found.rows["F, 4 GPUs", "single"]["not_run"].startswith("needs 4 GPUs, there are ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("0123abc", ("0123abc", False)), ("0123abc-dirty", ("0123abc", True)), ("", (None, None))],
)
def test_the_commit_comes_from_the_environment_before_git_and_where_there_is_none(monkeypatch, given, expected):
    monkeypatch.setenv("BENCH_COMMIT", given)
    if not given:
        monkeypatch.setenv("PATH", "")
    assert results.commit_of_tree() == expected
