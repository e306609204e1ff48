"""The studies of the server: their loads are answered in full, and their tables and figures say what was measured."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("starlette", reason="the server of beyond/serving: pip install -e .[serve]")
pytest.importorskip("uvicorn", reason="the server of beyond/serving: pip install -e .[serve]")

from serving import running  # noqa: E402

import stage_e_batching  # noqa: E402
from benchmarks.local_server import LocalServer, local_server  # noqa: E402
from benchmarks.micro import batching, http_cost, ttft_rate  # noqa: E402
from benchmarks.serve import make_prompts  # noqa: E402

ENVIRONMENT = {
    "device": {"name": "a machine", "type": "cpu"},
    "versions": {"torch": "2"},
    "commit": "0" * 40,
    "dirty": False,
    "date": "2026-01-01",
}


@pytest.fixture(scope="module")
def server():
    llm = stage_e_batching.LLM("tutor", device="cpu", max_num_seqs=4, num_kvcache_blocks=64)
    with running(llm, max_queue=4) as server:
        yield server
    llm.close()


def test_every_answer_over_http_is_whole_or_the_study_ends(server, monkeypatch):
    prompts = make_prompts(3, 8, 0, 0)
    here = LocalServer(server.url, os.getpid())
    with ThreadPoolExecutor(2) as pool:
        took = http_cost.over_http(pool, 2, here, prompts, [64] * 3)
        assert 0 < took.to_first_tokens < took.on_clock and took.of_cpu > 0 and took.reading > 0
        monkeypatch.setattr(server.llm, "draining", True)
        with pytest.raises(RuntimeError, match="2 of 2 answers failed: status 503"):
            http_cost.over_http(pool, 2, here, make_prompts(2, 8, 0, 0), [64] * 2)


def test_a_stream_asks_for_the_next_answer_when_it_has_read_one(server, monkeypatch):
    admitted: list[int] = []
    admit = server.llm._admit
    monkeypatch.setattr(server.llm, "_admit", lambda n: (admit(n), admitted.append(server.llm.num_unfinished)))
    with ThreadPoolExecutor(2) as pool:
        here, lengths = LocalServer(server.url, os.getpid()), [4, 9, 5, 8, 3, 7, 6, 2, 5, 4, 3, 8]
        http_cost.over_http(pool, 2, here, make_prompts(12, 8, 0, 0), lengths, rounds=3)
        assert len(admitted) == 12 and max(admitted) == 4
        with pytest.raises(RuntimeError, match="1 of 2 answers failed: too short"):  # the pool is too small for it
            http_cost.over_http(pool, 1, here, make_prompts(2, 8, 0, 0), [4, 5000], rounds=2)


def test_over_http_the_slowest_reader_counts():
    class Pool:
        def map(self, work, *given):
            if work is http_cost.read_answers:
                for begin, begun, end, reading in zip(given[-1], (1.0, 3.0), (9.0, 8.0), (0.1, 0.2), strict=True):
                    yield [SimpleNamespace(error="", arrivals=[begin + begun, begin + end])], begin + end, reading

    took = http_cost.over_http(Pool(), 2, LocalServer("", os.getpid()), [[1], [2]], [2, 2])
    assert (took.on_clock, took.to_first_tokens, took.reading) == pytest.approx((9.0, 3.0, 0.2))


def test_offline_the_first_tokens_are_there_when_every_answer_has_begun(monkeypatch):
    now = [0.0]

    def stream(*_):
        for index, now[0] in ((0, 1.0), (1, 3.0), (0, 5.0), (1, 9.0)):
            yield index, ""

    llm = SimpleNamespace(stream=stream, generate=lambda *_, **__: [{"metrics": {"ttft": t}} for t in (2.0, 4.0, 1.0)])
    monkeypatch.setattr(http_cost, "time", SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0]))
    assert http_cost.offline(llm, "stream", [], []) == (9.0, 9.0, 3.0, 0.0)
    assert http_cost.offline(llm, "generate", [], []).to_first_tokens == 4.0


def test_a_load_has_a_time_for_every_request(server, monkeypatch):
    found = ttft_rate.load(server.url, 6, 8, 5, math.inf, seed=0)
    assert len(found["ttft_ms"]) == 6 and min(found["ttft_ms"]) > 0 and len(found["tpot_ms"]) <= 6
    monkeypatch.setattr(server.llm, "draining", True)
    with pytest.raises(RuntimeError, match="3 of 3 requests failed: status 503"):
        ttft_rate.load(server.url, 3, 8, 64, math.inf, seed=0)


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

    monkeypatch.setattr(http_cost, "local_server", lambda *words, module: nullcontext(engines.append(words)))
    monkeypatch.setattr(http_cost, "load_class", lambda name: lambda model, **options: engines.append(options) or llm)
    monkeypatch.setattr(http_cost, "over_http", took)
    monkeypatch.setattr(http_cost, "offline", took)
    rows = http_cost.measure(device=device, output_len=2)["rows"]
    assert [row["way"] for row in rows] == list(http_cost.WAYS)
    for row in rows:
        assert (row["tokens_per_s"], row["first_tokens_ms"], row["reading"]) == ([rate] * 5, [500] * 5, [0.25] * 5)
    options, *servers = engines
    assert not options["enable_prefix_caching"] and all("--no-prefix-caching" in words for words in servers)
    assert [asked.index(prompts) // len(rows) for prompts in asked] == [i // len(rows) for i in range(len(asked))]
    rows = http_cost.measure(device=device, output_len=2, rounds=2)["rows"]
    assert all(row["first_tokens_ms"] == [] for row in rows), "the last requests begin near the end"


def test_ratios_of_the_cost_are_taken_within_a_repeat():
    rates = {
        "generate": [100.0, 200.0, 300.0],
        "stream": [90.0, 180.0, 270.0],
        "HTTP, one process": [50.0, 100.0, 150.0],
        "HTTP": [80.0, 100.0, 240.0],
    }
    result = {
        "kind": "http_cost",
        "environment": ENVIRONMENT,
        "model": "tutor",
        "stage": "e",
        "streams": 64,
        "input_len": 8,
        "output_len": 8,
        "rows": [{"way": way, "tokens_per_s": found} for way, found in rates.items()],
    }
    lines = http_cost.table([result])["http-cost"]
    assert lines[4:6] == ["| HTTP, one process | 100 | 0.50 (0.50–0.50) | – |", "| HTTP | 100 | 0.80 (0.50–0.80) | – |"]
    assert "64 requests at once, 8 in, 8 out" in lines[-2]
    again = http_cost.table([result | {"rounds": 3}])["http-cost"]
    assert "64 streams of 3 requests each, 8 in, 4–8 out" in again[-2]
    both = http_cost.table([result | {"rounds": 3}, result])["http-cost"]
    assert both == lines + again, "requests at once come first"
    [(name, picture)] = http_cost.draw([result | {"rounds": 3, "rows": []}, result]).items()
    assert name == "beyond/serving/figures/http_cost.png" and picture.png.startswith(b"\x89PNG")


def test_the_times_of_all_repeats_make_one_percentile():
    rows = [
        {"engine": name, "rate": 5.0, "repeat": repeat, "ttft_ms": [factor * 10.0, factor * 20.0], "tpot_ms": [2.0]}
        for repeat in range(2)
        for name, factor in (("E", 1), ("static", 3))
    ]
    result = {
        "kind": "ttft_rate",
        "environment": ENVIRONMENT,
        "model": "tutor",
        "slots": 8,
        "requests": 2,
        "input_len": 8,
        "longest": 8,
        "capacity": 10.0,
        "rows": rows,
    }
    assert ttft_rate.table([result])["ttft-rate"][2] == "| 5.00, 50% | 15.0 / 20.0 / 2.00 | 45.0 / 60.0 / 2.00 |"
    assert "3.0 to 3.0 × as long" in ttft_rate.title(result)
    assert list(ttft_rate.draw([result])) == ["beyond/serving/figures/ttft_rate.png"]
    of_f = [row | {"engine": "F"} for row in rows if row["engine"] == "E"]
    faster = [row | {"ttft_ms": [t / 4 for t in row["ttft_ms"]]} for row in of_f]
    both = result | {"rows": [row for row in rows if row["engine"] == "E"] + faster}
    assert "With stage E TTFT's p99 is 4.0 to 4.0 × as long" in ttft_rate.title(both)
    at_8 = [
        row | {"rate": 8.0, "ttft_ms": [t * (2 if row["engine"] == "F" else 1) for t in row["ttft_ms"]]}
        for row in both["rows"]
    ]
    assert "is 2.0 to 4.0 × as long" in ttft_rate.title(both | {"rows": both["rows"] + at_8})
    names = {"beyond/serving/figures/ttft_rate.png", "beyond/serving/figures/ttft_rate_f.png"}
    assert set(ttft_rate.draw([both, result])) == names
