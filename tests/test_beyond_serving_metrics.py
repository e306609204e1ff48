"""`/metrics` reports what happened, in a format that Prometheus reads; the dashboard asks only for existing metrics."""

from __future__ import annotations

import json
import math
import re
from contextlib import closing
from pathlib import Path

import pytest
from serving import ask, engine, get, served, streamed, wait_until

import stage_e_batching
from beyond.serving.engine_loop import Call
from beyond.serving.metrics import RequestMetrics, engine_numbers, exposition
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls.mailbox import Event

parser = pytest.importorskip("prometheus_client.parser", reason="reads the format: pip install prometheus-client")

PROMPT = [i % 1000 + 5 for i in range(50)]
DASHBOARD = Path(__file__).resolve().parent.parent / "beyond" / "serving" / "grafana.json"


llm = engine(max_num_seqs=2, num_kvcache_blocks=8, kvcache_block_size=16)
server = served(model='a "quoted" name')


def samples(text: str) -> dict[str, float]:
    """Values by name, and by name and the label that is not the model's."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "process_" in sample.name:
                assert not labels
                continue
            assert labels.pop("model_name") == 'a "quoted" name'
            found["/".join([sample.name, *labels.values()])] = sample.value
    return found


def read(server) -> dict[str, float]:
    return samples(get(server, "/metrics").text)


def test_counters_and_histograms_tell_what_was_asked_and_answered(server):
    before = read(server)
    for _ in range(3):
        assert ask(server, prompt=PROMPT, max_tokens=20, ignore_eos=True).status_code == 200
    grown = {name: value - before.get(name, 0) for name, value in read(server).items()}
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] == 150
    assert grown["vllm:prefix_cache_hits_total"] == 2 * 48  # the second and third find three blocks of the first
    assert grown["vllm:generation_tokens_total"] == 60
    assert grown["vllm:request_success_total/length"] == 3 and grown["vllm:request_success_total/stop"] == 0
    counts = {"time_to_first_token": 3, "inter_token_latency": 57, "request_queue_time": 3, "e2e_request_latency": 3}
    for name, count in counts.items():
        assert grown[f"vllm:{name}_seconds_count"] == grown[f"vllm:{name}_seconds_bucket/+Inf"] == count
    whole = grown["vllm:e2e_request_latency_seconds_sum"]
    parts = grown["vllm:time_to_first_token_seconds_sum"] + grown["vllm:inter_token_latency_seconds_sum"]
    assert parts == pytest.approx(whole)  # an answer takes its first token's time and all the gaps


def test_gauges_tell_what_is_now_and_preemptions_are_counted(server, llm):
    idle = read(server)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [idle[f"vllm:{name}"] for name in names] == [0, 0, 0]
    body = {"prompt": PROMPT, "max_tokens": 60, "n": 3}  # 7 of 8 blocks each
    loop = server.llm.engine_loop
    loop.pause()
    with streamed(server, **body) as response:
        loop.single_step()
        lines = response.iter_lines()
        next(lines)
        busy = read(server)
        assert busy["vllm:num_requests_running"] + busy["vllm:num_requests_waiting"] == 3
        assert busy["vllm:num_requests_running"] == llm.engine.scheduler.num_running >= 1
        assert busy["vllm:kv_cache_usage_perc"] == llm.engine.scheduler.block_manager.num_used / 8 > 0
        loop.resume()
        for _ in lines:
            pass
    after = read(server)
    assert after["vllm:num_preemptions_total"] > idle["vllm:num_preemptions_total"]
    loop.pause()
    with streamed(server, **body):
        pass  # it leaves
    wait_until(lambda: read(server)["vllm:request_success_total/abort"] == 3)
    loop.resume()


def test_without_a_prefix_cache_nothing_is_looked_up_in_it():
    with closing(stage_e_batching.LLM("tutor", device="cpu", enable_prefix_caching=False)) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
        numbers = engine_numbers(llm.calls)
    assert (numbers["prompt_tokens"], numbers["prefix_cache_queries"], numbers["prefix_cache_hits"]) == (3, 0, 0)


def test_a_request_waits_until_its_first_step_and_one_that_fails_is_counted_as_such(llm):
    metrics, [request] = RequestMetrics(), llm.requests(["x"])
    call = Call([request])
    output = {"finish_reason": "stop", "metrics": {"ttft": 3.0, "prefill_time": 2.0}}
    metrics.observe(request.arrival_time + 7, call, request, Event(0, [], "", output))
    metrics.observe(request.arrival_time + 9, call, request, Event(1, [], "", error=RuntimeError()))
    told = samples(exposition('a "quoted" name', {}, metrics))
    assert told["vllm:request_queue_time_seconds_sum"] == 1
    assert math.isclose(told["vllm:e2e_request_latency_seconds_sum"], 7)
    ended = {reason: told[f"vllm:request_success_total/{reason}"] for reason in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 1, "length": 0, "abort": 0, "error": 1}


def test_a_request_that_leaves_before_its_first_token_has_waited_until_then(server, llm):
    before = read(server)
    server.llm.engine_loop.pause()
    with streamed(server, n=3):
        wait_until(lambda: server.llm.num_unfinished == 3)
    wait_until(lambda: not server.llm.num_unfinished)
    server.llm.engine_loop.resume()
    grown = {name: value - before[name] for name, value in read(server).items() if name in before}
    assert grown["vllm:request_queue_time_seconds_count"] == grown["vllm:request_success_total/abort"] == 3


def test_refused_and_failed_requests_are_counted_by_code(server):
    assert ask(server, temperature=-1).status_code == 400
    assert ask(server, model="none").status_code == 404
    assert get(server, "/of/my/own").status_code == 404
    told = read(server)
    assert told["http_requests_total/invalid_request//v1/completions/400"] >= 1
    assert told["http_requests_total/model_not_found//v1/completions/404"] == 1
    assert told["http_requests_total/no_such_path/other/404"] == 1
    assert told["http_requests_total///v1/completions/200"] >= 3


def test_the_processes_are_told(server):
    assert "\nprocess_resident_memory_bytes " in get(server, "/metrics").text


def test_the_dashboard_asks_for_metrics_that_there_are(llm):
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    text = exposition('a "quoted" name', engine_numbers(llm.calls), RequestMetrics())
    there = {name.split("/")[0] for name in samples(text)}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 8
    for expression in asked:
        names = re.findall(r"vllm:\w+", expression)
        assert names and set(names) <= there, expression
