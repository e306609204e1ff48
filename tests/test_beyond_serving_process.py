"""The engine in a process of its own: what crosses between the two, and what becomes of either when the other ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette", reason="the server of beyond/serving: pip install -e .[serve]")
pytest.importorskip("uvicorn", reason="the server of beyond/serving: pip install -e .[serve]")

from serving import wait_until  # noqa: E402

import stage_e_batching  # noqa: E402
from beyond.serving import async_llm, engine_process, wire  # noqa: E402
from beyond.serving.__main__ import main, parse, serve_process  # noqa: E402
from beyond.serving.engine_loop import Call, EngineClosed  # noqa: E402
from beyond.serving.engine_process import EngineProcess  # noqa: E402
from beyond.serving.metrics import engine_numbers  # noqa: E402
from beyond.serving.remote_engine import EngineDied, RemoteLLM  # noqa: E402
from beyond.serving.server import listen, serve  # noqa: E402
from stage_a_naive.interrupts import end_at_once  # noqa: E402
from stage_a_naive.outputs import Request  # noqa: E402
from stage_a_naive.sampling import SamplingParams  # noqa: E402
from stage_e_batching.mailbox import Event, Token  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is a KV cache?"
OPTIONS = {"model": "tutor", "device": "cpu", "dtype": "auto", "seed": 0, "max_num_seqs": 4, "num_kvcache_blocks": 64}
LONG = {"prompt": QUESTION, "temperature": 0, "max_tokens": 900, "ignore_eos": True, "stream": True}
DEADLY = 13  # a prompt of this token breaks the step off


class BreakableLLM(stage_e_batching.LLM):
    """Its steps fail where a prompt says so."""

    def __init__(self, model: str, **options: object) -> None:
        super().__init__(model, **options)
        works = self.runner.run

        def run(step):
            if any(sequence.completion.all_token_ids[0] == DEADLY for sequence in step.sequences):
                raise RuntimeError("the device is on fire: secret detail")
            return works(step)

        self.runner.run = run


class Served:
    """A server in a thread of the test's process, with its engine in another process."""

    def __init__(self) -> None:
        self.process = EngineProcess("test_beyond_serving_process:BreakableLLM", OPTIONS)
        self.error: BaseException | None = None
        ready: list = []
        llm = RemoteLLM(self.process)

        def run() -> None:
            try:
                options = {"host": "127.0.0.1", "port": 0, "model": "tutor", "max_queue": 2}
                asyncio.run(serve(llm, on_ready=lambda *said: ready.append(said), **options))
            except EngineDied as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        wait_until(lambda: ready and ready[0][0].started)
        self.server, port = ready[0]
        self.llm = self.server._llm
        self.url = f"http://127.0.0.1:{port}"

    def post(self, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": QUESTION} | body, timeout=60)

    def control(self, action: str) -> None:
        httpx.post(f"{self.url}/live/control", json={"action": action}, timeout=60)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def num_steps(self) -> int:
        with httpx.stream("GET", f"{self.url}/live/events", timeout=60) as response:
            return json.loads(next(response.iter_lines()).removeprefix("data: "))["num_steps"]


@pytest.fixture(scope="module")
def served():
    served = Served()
    yield served
    if served.thread.is_alive():
        served.server.handle_exit(signal.SIGTERM, None)
        served.thread.join(60)
    assert not served.thread.is_alive() and not is_alive(served.process.pid)


@pytest.fixture(scope="module")
def llm():
    llm = stage_e_batching.LLM(**OPTIONS)
    yield llm
    llm.close()


def is_alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and waits to be asked how does not count."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def messages(lines) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


# ---- what crosses ---------------------------------------------------------------------------------------------------


def test_an_answer_and_its_events_are_the_engines_in_order(served, llm):
    [expected] = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=24, logprobs=2), False)
    told = messages(served.post(temperature=0, max_tokens=24, logprobs=2, stream=True).text.splitlines())
    choices = [message["choices"][0] for message in told]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    found = [list(choice["logprobs"]["top_logprobs"][0].values()) for choice in choices]
    assert found == [pytest.approx(list(each.values())[:2]) for each in expected["logprobs"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * 23 + [expected["finish_reason"]]
    three = served.post(temperature=0, max_tokens=24, n=3).json()
    assert [choice["text"] for choice in three["choices"]] == [expected["text"]] * 3
    assert three["usage"]["completion_tokens"] == 72


def test_what_the_engine_cannot_take_is_refused_by_the_other_process(served):
    refused = served.post(prompt=[7] * 1100)
    assert refused.status_code == 400 and "have room for 1024" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert served.post(n=7).json()["error"]["param"] == "n"


def test_a_client_that_leaves_frees_its_blocks_within_two_steps(served):
    served.control("pause")
    try:
        steps = served.num_steps()
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG | {"n": 2}, timeout=60) as response:
            wait_until(lambda: served.metric("num_requests_waiting") == 2)
            served.control("step")
            lines = response.iter_lines()  # kept: the connection ends with it
            assert next(lines).startswith("data: {")
            assert served.metric("kv_cache_usage_perc") > 0
        wait_until(lambda: served.metric("num_requests_running") == 0)  # although no step runs
        assert served.metric("kv_cache_usage_perc") == 0 and served.num_steps() <= steps + 1 + 2
    finally:
        served.control("resume")


def test_an_error_crosses_with_its_traceback_and_the_engine_recovers_by_itself(served, capsys, monkeypatch):
    monkeypatch.setattr(async_llm, "TRIAL_SECONDS", 60)
    told = messages(served.post(prompt=[DEADLY], stream=True).text.splitlines())
    assert told[-1]["error"]["message"] == "the server failed (RuntimeError); its log says how"
    log = capsys.readouterr().err
    assert "secret detail" in log and "in the engine's process" in log and "in run_step" in log
    assert "requests that this ended: 1" in log
    assert served.llm.engine_loop.failure is not None
    assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200  # it has tried a step of its own
    assert served.llm.engine_loop.failure is None


def test_an_error_of_several_requests_crosses_once_and_stays_one_error():
    failure = RuntimeError("why")
    requests = [Request(number, [1], SamplingParams(), 0) for number in range(64)]
    news = [(Call([]), request, Event(0, [], "", error=failure)) for request in requests]
    packed = wire.pack_news(0.0, failure, news)
    [(_, _, told, rows)] = wire.take_messages(bytearray(wire.HEAD.pack(len(packed)) + packed))
    assert {id(wire.unpack_event(*row).error) for row in rows} == {id(told)}


def test_signals_that_a_terminal_sends_to_all_processes_do_not_end_the_engine(served):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(served.process.pid, number)
    assert served.post(max_tokens=2).status_code == 200


def test_news_are_read_as_they_were_written_wherever_the_pipe_cuts_them():
    params, [output] = SamplingParams(), [{"text": "ab", "finish_reason": "stop"}]
    events = [
        Event(0, [Token(5, "a")], "a"),
        Event(0, [Token(6, "b", {6: -0.5})], "b"),
        Event(0, [Token(7, "c"), Token(8, "")], "c", output),
        Event(0, [], "", error=KeyError("why")),
    ]
    requests = [Request(number, [1], params, 0) for number in range(4)]
    packed = wire.pack_news(2.5, None, list(zip([Call([])] * 4, requests, events, strict=True)))
    sent = 2 * (wire.HEAD.pack(len(packed)) + packed)
    for size in (1, 7, len(packed), len(sent)):
        unread, found = bytearray(), []
        for start in range(0, len(sent), size):
            unread += sent[start : start + size]
            found += wire.take_messages(unread)
        assert len(found) == 2 and not unread
    kind, now, failure, rows = found[-1]
    assert (kind, now, failure) == (wire.NEWS, 2.5, None)
    *read, failed = [wire.unpack_event(*row) for row in rows]
    assert read == [event._replace(request_id=i) for i, event in enumerate(events[:3])]
    assert repr(failed.error) == "KeyError('why')"


def test_an_error_that_only_one_of_the_processes_can_make_crosses_as_text(monkeypatch):
    class Odd(Exception):
        def __init__(self, number: int, word: str) -> None:
            super().__init__(f"{number} {word}")

    plain = type("Plain", (Exception,), {"__module__": "made_by_an_engine"})
    monkeypatch.setitem(sys.modules, "made_by_an_engine", SimpleNamespace(Plain=plain))  # here it can be pickled
    undecodable = UnicodeDecodeError("utf-8", b"?", 0, 1, "why")
    assert repr(wire.portable(Odd(3, "times"))) == "RuntimeError('Odd: 3 times')"
    assert repr(wire.portable(plain("word"))) == "RuntimeError('Plain: word')"
    assert str(wire.portable(ValueError(sys))).startswith("ValueError: <module 'sys'")
    assert repr(wire.portable(undecodable)) == repr(undecodable)
    assert type(wire.portable(EngineClosed("soon"))) is EngineClosed


# ---- the end of either ----------------------------------------------------------------------------------------------


def test_an_engine_that_is_stopped_is_not_dead_and_goes_on_when_it_may(served):
    os.kill(served.process.pid, signal.SIGSTOP)
    ask = LONG | {"max_tokens": 5}
    try:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=ask, timeout=60) as response:
            assert response.status_code == 200 and served.llm.num_unfinished == 1
            assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200
            os.kill(served.process.pid, signal.SIGCONT)
            assert len(messages(line for line in response.iter_lines() if line)) == 5
    finally:
        os.kill(served.process.pid, signal.SIGCONT)


def test_an_engine_that_is_killed_is_told_to_all_and_ends_the_server(served, capsys):
    """The last test that uses the server."""
    with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: {")
        os.kill(served.process.pid, signal.SIGKILL)
        *_, error, done = lines
    assert "died (SIGKILL)" in json.loads(error.removeprefix("data: "))["error"]["message"] and done == "data: [DONE]"
    wait_until(lambda: not served.thread.is_alive())
    assert "died (SIGKILL)" in str(served.error)
    assert not asyncio.run(served.llm.works())  # which is what /health says
    assert served.llm.num_unfinished == 0
    assert "ending" not in capsys.readouterr().out  # as if somebody had asked it to


def test_an_engine_whose_server_is_gone_ends_without_a_word(capfd):
    process = EngineProcess("stage_e_batching:LLM", OPTIONS)
    RemoteLLM(process)
    process.commands.send([("pause",), ("call", 0, engine_numbers)])
    assert process.news.recv()[0] == wire.RESULT  # it has loaded, and waits for commands
    process.news.close()
    process.commands.send([("submit", [Request(0, [1], SamplingParams(), 0)])])
    process.commands.close()  # it then says that the request will not be answered, and nobody reads that
    assert process.end() == "exit code 0" and "Traceback" not in capfd.readouterr().err


def test_a_process_whose_engines_thread_fails_ends_and_says_why(capfd):
    process = EngineProcess("stage_e_batching:LLM", OPTIONS)
    RemoteLLM(process)
    process.commands.send_bytes(b"no command")
    assert process.end(60) == "exit code 1" and "UnpicklingError" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: engine_process.end_at_once(threading.ExceptHookArgs((ValueError, ValueError(), None, None))), 1),
        (lambda: end_at_once(signal.SIGINT, None), 130),
    ],
)
def test_what_must_end_at_once_ends_although_nobody_reads_what_it_says(end, code, monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w", buffering=1) as output:
        monkeypatch.setattr(sys, "stderr", output)
        end()
    monkeypatch.undo()
    assert codes == [code]


BROKEN = """
import stage_e_batching
from stage_a_naive.errors import EngineBroken


class LLM(stage_e_batching.LLM):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.runner.run = self._fail

    def _fail(self, step):
        raise EngineBroken("rank 1 of 2 died")
"""


def test_an_engine_that_is_broken_for_good_ends_the_server_which_says_why(tmp_path):
    (tmp_path / "broken_engine.py").write_text(BROKEN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "beyond.serving", "--engine", "broken_engine:LLM", "--device", "cpu", "--port=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as server:
        try:
            address = next(line.split()[-1] for line in server.stdout if line.startswith("[serving] API "))
            response = httpx.post(f"{address}/completions", json={"prompt": QUESTION}, timeout=60)
            assert response.status_code == 500 and "died" not in response.json()["error"]["message"]
            assert server.wait(60) == 1
        finally:
            server.kill()
        last = server.stderr.read().splitlines()[-1]
    died = "the engine's process died (exit code 1) after a step that failed: EngineBroken: rank 1 of 2 died"
    assert last.startswith(f"error: {died}; read what it printed")


def test_a_server_that_is_killed_leaves_no_process_behind_even_while_it_loads():
    command = [sys.executable, "-m", "beyond.serving", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        wait_until(lambda: children.read_text() or server.poll() is not None)
        engine = int(children.read_text())
        assert is_alive(engine)
        server.kill()
    wait_until(lambda: not is_alive(engine))


def test_ctrl_c_ends_a_server_that_loads_although_an_import_ignores_it(tmp_path):
    said = "with suppress(KeyboardInterrupt):\n    print('importing', flush=True)\n    time.sleep(60)\n"
    (tmp_path / "my_engine.py").write_text(f"import time\nfrom contextlib import suppress\n{said}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "beyond.serving", "--engine", "my_engine:LLM"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"importing\n"
        server.send_signal(signal.SIGINT)
        assert (server.wait(30), server.stderr.read()) == (130, b"\ninterrupted\n")


def test_an_engine_that_dies_while_it_loads_is_no_mystery(capsys):
    process = EngineProcess("stage_e_batching:LLM", OPTIONS)
    os.kill(process.pid, signal.SIGKILL)
    assert serve_process(process, parse(["--port", "0"])[0]) == 1
    assert "while it was loading the model (SIGKILL); read what it printed" in capsys.readouterr().err
    process.close()


def test_no_model_is_loaded_for_a_port_that_is_taken(monkeypatch, capsys):
    monkeypatch.setattr("beyond.serving.remote_engine.RemoteLLM", lambda _: pytest.fail("it waits for the model"))
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port), "--device", "cpu"]) == 2
    told = f"error: cannot listen on host 127.0.0.1, port {port}: Address already in use; choose others\n"
    assert capsys.readouterr().err == told


def test_an_engine_that_does_not_end_is_killed():
    process = EngineProcess("stage_e_batching:LLM", OPTIONS)
    os.kill(process.pid, signal.SIGSTOP)  # it answers nothing any more
    start = time.monotonic()
    assert process.end(0.1) == "SIGKILL" and time.monotonic() - start < 30
