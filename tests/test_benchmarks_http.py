"""The studies of the server: loads are answered in full; tables and figures show the measurements."""

from __future__ import annotations

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from serving import running

import stage_e_batching
from benchmarks.local_server import LocalServer, local_server
from benchmarks.micro import batching, http_cost, http_library, ttft_rate
from benchmarks.serve import make_prompts

ENGINE = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 32}


@pytest.fixture(scope="module")
def server():
    with closing(stage_e_batching.LLM("tutor", **ENGINE)) as llm, running(llm, max_queue=4) as server:
        yield server


@pytest.fixture(scope="module")
def here(server):
    return LocalServer(server.url, os.getpid())


def test_the_servers_library_has_a_limit_for_heads_and_answers_old_and_upgrading_clients(server):
    found = http_library.probed(server.url)
    assert 16_000 < found.pop("head_bytes") < 64_000 and found == {"keeps_body": True, "old_in_chunks": False}


def test_every_answer_over_http_is_whole_or_the_study_ends(here):
    with ThreadPoolExecutor(2) as pool:
        took = http_cost.over_http(pool, 2, here, make_prompts(3, 8, 0, 0), [64] * 3)
        assert 0 < took.to_first_tokens < took.on_clock and took.of_cpu > 0 and took.reading > 0
        with pytest.raises(RuntimeError, match="2 of 2 answers failed: status 400"):  # longer than the pool
            http_cost.over_http(pool, 2, here, make_prompts(2, 5000, 0, 0), [64] * 2)


def test_a_stream_asks_for_the_next_answer_when_it_has_read_one(tmp_path):
    trace, lengths = tmp_path / "trace.jsonl", [4, 9, 5, 8, 3, 7, 6, 2, 5, 4, 3, 8]
    with (
        closing(stage_e_batching.LLM("tutor", **ENGINE, trace=str(trace))) as llm,
        running(llm) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        here = LocalServer(server.url, os.getpid())
        http_cost.over_http(pool, 2, here, make_prompts(12, 8, 0, 0), lengths, rounds=3)
    records = map(json.loads, trace.read_text().splitlines())
    running_ids = [{sequence["id"] for sequence in record["sequences"]} for record in records]
    assert len(set().union(*running_ids)) == 12 and max(map(len, running_ids)) == 4


def test_an_answer_that_is_too_short_ends_the_study(here):
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="1 of 2 answers failed: too short"):
        http_cost.over_http(pool, 1, here, make_prompts(2, 8, 0, 0), [4, 5000], rounds=2)  # longer than the pool


def test_over_http_the_slowest_reader_counts():
    class Pool:
        def map(self, work, *given):
            if work is http_cost.read_answers:
                for begin, begun, end, reading in zip(given[-1], (1.0, 3.0), (9.0, 8.0), (0.1, 0.2), strict=True):
                    yield [SimpleNamespace(error="", arrivals=[begin + begun, begin + end])], begin + end, reading

    took = http_cost.over_http(Pool(), 2, LocalServer("", os.getpid()), [[1], [2]], [2, 2])
    assert (took.on_clock, took.to_first_tokens, took.reading) == pytest.approx((9.0, 3.0, 0.2))


def test_offline_the_first_tokens_are_there_when_every_answer_has_begun():
    marks = []

    def stream(*_):
        for index in (0, 1, 0, 1):
            marks.append(time.perf_counter())
            yield index, ""
            time.sleep(0.05)

    llm = SimpleNamespace(stream=stream, generate=lambda *_, **__: [{"metrics": {"ttft": t}} for t in (2.0, 4.0, 1.0)])
    took = http_cost.offline(llm, "stream", [], [])
    assert took.to_first_tokens >= marks[1] - marks[0] and took.reading == 0
    assert took.on_clock - took.to_first_tokens >= marks[3] - marks[2], "before the third was made"
    assert http_cost.offline(llm, "generate", [], []).to_first_tokens == 4.0


def test_a_load_has_a_time_for_every_request(server):
    found = ttft_rate.load(server.url, 6, 8, 5, math.inf, seed=0)
    assert len(found["ttft_ms"]) == 6 and min(found["ttft_ms"]) > 0 and len(found["tpot_ms"]) <= 6
    with pytest.raises(RuntimeError, match="3 of 3 requests failed: status 400"):  # longer than the pool
        ttft_rate.load(server.url, 3, 5000, 64, math.inf, seed=0)


@pytest.mark.slow
def test_the_static_engine_can_be_served_and_a_server_that_cannot_start_is_told(capfd):
    assert issubclass(batching.StaticStageE, stage_e_batching.LLM)
    with local_server(*ttft_rate.ENGINES["static"], "--device", "cpu", "--num-kvcache-blocks", "64") as local:
        assert local.cpu_seconds() > 0.1  # it has imported PyTorch
        assert len(ttft_rate.load(local.url, 2, 8, 3, math.inf, seed=0)["ttft_ms"]) == 2
    with pytest.raises(RuntimeError, match="did not start"), local_server("--stage", "z"):
        pass
    assert "invalid choice" in capfd.readouterr().err


@pytest.mark.parametrize(("device", "rate"), [("cpu", 64), ("cuda", 32)])
def test_a_rate_is_of_cpu_time_on_a_cpu_and_the_first_turn_is_not_counted(device, rate, monkeypatch):
    llm, turns = SimpleNamespace(device=torch.device(device), close=lambda: None), count()
    engines, asked = [], []

    def took(*given):
        asked.append(next(prompts for prompts in given if isinstance(prompts, list)))
        is_first = next(turns) < len(http_cost.WAYS)
        return http_cost.Seconds(4.0 + is_first, 2.0 + is_first, 0.5 + is_first, 1.0)

    stand_ins = {"over_http": took, "offline": took}
    stand_ins["local_server"] = lambda *words, module: nullcontext(engines.append(words))
    stand_ins["load_class"] = lambda name: lambda model, **options: engines.append(options) or llm
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(http_cost, name, stand_in)
    rows = http_cost.measure(device=device, output_len=2)["rows"]
    assert [row["way"] for row in rows] == list(http_cost.WAYS)
    for row in rows:
        assert (row["tokens_per_s"], row["first_tokens_ms"], row["reading"]) == ([rate] * 5, [500] * 5, [0.25] * 5)
    options, *servers = engines
    assert not options["enable_prefix_caching"] and all("--no-prefix-caching" in words for words in servers)
    assert [asked.index(prompts) // len(rows) for prompts in asked] == [i // len(rows) for i in range(len(asked))]
    rows = http_cost.measure(device=device, output_len=2, rounds=2)["rows"]
    assert all(row["first_tokens_ms"] == [] for row in rows), "the last requests begin near the end"
    engines.clear(), asked.clear()
    http_cost.measure(device=device, output_len=2, streams=1)
    assert {len(prompts) for prompts in asked} == {1} and engines[0]["max_num_seqs"] == 1
