"""The load generator: when it sends requests, how it computes figures, and how it counts answers."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks import serve
from benchmarks.serve import Answer, main, make_prompts, read_goal, schedule, summarize

LONG_AGO = 100.0


def answer(ttft: float, gap: float, tokens: int) -> Answer:
    """An answer whose first token took `ttft` seconds and each further one `gap`."""
    arrivals = [LONG_AGO + ttft + i * gap for i in range(tokens)]
    return Answer(due=LONG_AGO - 0.002, sent=LONG_AGO, arrivals=arrivals, num_tokens=tokens)


def test_arrivals_are_seeded_have_the_rate_and_come_in_bursts_when_told_so():
    assert schedule(5, math.inf, 1.0, 0) == [0.0] * 5
    assert schedule(50, 4.0, 1.0, 7) == schedule(50, 4.0, 1.0, 7) != schedule(50, 4.0, 1.0, 8)
    variation = []
    for burstiness in (0.25, 1.0, 16.0):
        times = schedule(4000, 4.0, burstiness, 0)
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.1) and min(gaps) >= 0
        variation.append(statistics.stdev(gaps) / statistics.fmean(gaps))
    assert variation == pytest.approx([2.0, 1.0, 0.25], rel=0.1)  # 1 / sqrt(burstiness)


def test_prompts_are_seeded_and_share_their_prefix_alone():
    prompts = make_prompts(4, 20, 8, 0)
    assert prompts == make_prompts(4, 20, 8, 0) and all(len(prompt) == 20 for prompt in prompts)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1 and len({tuple(prompt[8:]) for prompt in prompts}) == 4


def test_the_figures_are_those_of_vllm_bench_serve():
    answers = [answer(0.1, 0.01, 11), answer(0.3, 0.03, 11), answer(0.2, 0.0, 1)]
    answers.append(Answer(LONG_AGO, LONG_AGO, error="status 429"))
    found = summarize(answers, 2.0, prompt_tokens=100, goals={"ttft": 250.0, "tpot": 20.0})
    assert (found["completed"], found["failed"], found["output_tokens"]) == (3, 1, 23)
    assert found["request_throughput"] == 1.5 and found["output_throughput"] == 11.5
    assert found["total_token_throughput"] == (23 + 300) / 2
    assert found["request_goodput"] == 1.0  # the second was late
    for name, mean, median in (("ttft", 200, 200), ("tpot", 20, 20), ("itl", 20, 20), ("e2el", 1000 / 3, 200)):
        assert found[f"mean_{name}_ms"] == pytest.approx(mean), name
        assert found[f"median_{name}_ms"] == pytest.approx(median), name
    assert found["p99_ttft_ms"] == pytest.approx(298) and found["late_p99_ms"] == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("word", ["ttft", "speed:3", "ttft:fast", "itl:5"])
def test_a_goal_that_is_none_is_refused(word):
    with pytest.raises(ValueError, match="fast|goodput|float"):
        read_goal(word)
    assert read_goal("e2el:1.5") == ("e2el", 1.5)


def ask_a_server_that_sends(*body: bytes, end: bytes = b"0\r\n\r\n") -> Answer:
    """What is noted of an answer whose chunks are these."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in body) + end

    async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        writer.close()

    async def ask() -> Answer:
        async with await asyncio.start_server(serve_once, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            [found], _ = await serve.offer(f"http://127.0.0.1:{port}", [{}], [0.0])
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize(("field", "end"), [(b"data: ", b"\n"), (b"data:", b"\r\n")], ids=["vLLM's", "others'"])
def test_events_are_found_wherever_the_network_cuts_them_and_however_servers_write_them(field, end):
    event = field + b'{"choices": [{"text": "x"}]}' + 2 * end
    usage = field + b'{"choices": [], "usage": {"completion_tokens": 3}}' + 2 * end + field + b"[DONE]" + 2 * end
    comment = b": still there" + 2 * end
    found = ask_a_server_that_sends(event + event[:9], event[9:-1], event[-1:] + event, comment + usage)
    assert (len(found.arrivals), found.num_tokens, found.error) == (3, 3, "")


@pytest.mark.parametrize("early", [False, True])
def test_a_client_connects_when_its_request_is_due_or_before(early):
    async def ask() -> tuple[float, float, Answer]:
        times = []

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            times.append(time.perf_counter())
            assert (await reader.readline()).startswith(b"POST /v1/completions")
            times.append(time.perf_counter())
            writer.close()

        async with await asyncio.start_server(note, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            [answer], _ = await serve.offer(url, [{}], [0.5], connect_early=early)
            return *times, answer

    connected, asked, answer = asyncio.run(ask())
    assert (connected < answer.due) == early and asked >= answer.due and answer.error == "status missing"


TOKEN = b'data: {"choices": [{"text": "x"}]}\n\n'


@pytest.mark.parametrize(
    ("body", "end", "error"),
    [
        (b"data: [DONE]\n\n", b"0\r\n\r\n", "no token came"),
        (TOKEN, b"", "the connection broke off"),  # between chunks
        (TOKEN, b"7\r\ndata: ", "the connection broke off"),  # in a chunk
        (b'data: {"error": {"message": "no room"}}\n\n', b"0\r\n\r\n", "no room"),
        (b'data: {"error": "no room"}\n\n', b"0\r\n\r\n", "no room"),
    ],
)
def test_an_answer_that_is_none_says_why(body, end, error):
    assert ask_a_server_that_sends(body, end=end).error == error


@pytest.mark.parametrize("body", [b"<html>", b'{"data": []}', b"[]", b'{"data": null}'])
def test_a_server_that_names_no_model_is_refused(body, capsys):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        assert main(["--url", url]) == 2
    assert f"{url} names no model in /v1/models" in capsys.readouterr().err


def test_a_load_on_a_server_is_counted_to_the_last_token(tmp_path, capsys):
    from serving import assert_idle, running

    import stage_e_batching

    options = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 128}
    load = ["--num-prompts", "12", "--input-len", "20", "--output-len", "6"]
    with (
        closing(stage_e_batching.LLM("tutor", **options)) as llm,
        running(llm, max_queue=20, api_key="a key") as server,
    ):
        load += ["--url", server.url, "--api-key", "a key"]
        file = tmp_path / "load.json"
        assert main([*load, "--request-rate", "200", "--goodput", "e2el:60000", "--output", str(file)]) == 0
        result = json.loads(file.read_text())
        figures = result["figures"]
        assert (figures["completed"], figures["output_tokens"]) == (12, 72) and figures["request_goodput"] > 0
        assert all(len(one["arrivals"]) == 6 for one in result["rows"]) and "a key" not in file.read_text()
        assert "E2EL" in capsys.readouterr().out
        server.llm.draining = True
        assert main(load) == 1
        assert "failed: status 503" in capsys.readouterr().err
        assert main([*load, "--prefix-len", "20"]) == 2
        assert_idle(llm)
    assert main(load) == 2 and "Connection refused; --url takes" in capsys.readouterr().err
    assert main(["--url", "https://127.0.0.1"]) == 2 and "must begin with http://" in capsys.readouterr().err
