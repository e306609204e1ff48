"""The engine in a separate process: messages between the two processes, and what happens to one when the other ends."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from serving import QUESTION, ask, get, httpx, messages, running, streamed, wait_until

import stage_e_batching
from beyond.serving import wire
from beyond.serving.__main__ import main, parse, serve_process
from beyond.serving.engine_loop import Call, EngineClosed
from beyond.serving.engine_process import EngineProcess
from beyond.serving.http_errors import as_request_error
from beyond.serving.remote_engine import RemoteLLM
from beyond.serving.server import listen
from beyond.structured.grammars import Grammars
from stage_a_naive.contract.errors import EngineBroken
from stage_a_naive.contract.outputs import Request
from stage_a_naive.contract.structured_outputs import GrammarError
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls.mailbox import Event, Token

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {"model": "tutor", "device": "cpu", "dtype": "auto", "seed": 0, "max_num_seqs": 4, "num_kvcache_blocks": 64}
BREAKABLE = f"{Path(__file__).stem}:BreakableLLM"
ERRORS = {4001: RuntimeError("the device is on fire: secret detail"), 4002: EngineBroken("rank 1 of 2 died")}


class BreakableLLM(stage_e_batching.LLM):
    """A step with a token of `ERRORS` breaks off with that error."""

    def __init__(self, model: str, **options: object) -> None:
        super().__init__(model, **options)
        self.runtime.model.register_forward_pre_hook(break_off)


def break_off(model: object, given: tuple) -> None:
    for token in ERRORS.keys() & set(given[0].tolist()):
        raise ERRORS[token]


@pytest.fixture(scope="module")
def process():
    return EngineProcess(BREAKABLE, OPTIONS)


@pytest.fixture(scope="module")
def served(process):
    with running(RemoteLLM(process), max_queue=2) as server:
        yield server
    assert not is_alive(process.pid)


def is_alive(pid: int) -> bool:
    """Whether there is such a process; a zombie does not count."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def command(*options: str, folder: Path = ROOT / "tests") -> Iterator[subprocess.Popen]:
    """The server's command, for which modules of `folder` can be imported, too."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    words = [sys.executable, "-m", "beyond.serving", "--device", "cpu", "--port=0", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment, **pipes) as server:
        try:
            yield server
        finally:
            server.kill()


# ---- what crosses ---------------------------------------------------------------------------------------------------


def test_an_answer_and_its_events_are_the_engines_in_order(served):
    with closing(stage_e_batching.LLM(**OPTIONS)) as llm:
        [expected] = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=24, logprobs=2), False)
    told = messages(ask(served, temperature=0, max_tokens=24, logprobs=2, stream=True).text)
    choices = [message["choices"][0] for message in told]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    found = [list(choice["logprobs"]["top_logprobs"][0].values()) for choice in choices]
    assert found == [pytest.approx(list(each.values())[:2]) for each in expected["logprobs"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * 23 + [expected["finish_reason"]]
    three = ask(served, temperature=0, max_tokens=24, n=3).json()
    assert [choice["text"] for choice in three["choices"]] == [expected["text"]] * 3
    assert three["usage"]["completion_tokens"] == 72


def test_what_the_engine_cannot_take_is_refused_by_the_other_process(served):
    refused = ask(served, prompt=[7] * 1100)
    assert refused.status_code == 400 and "have room for 1024" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert ask(served, n=7).json()["error"]["param"] == "n"


def test_an_error_crosses_with_its_traceback_and_the_engine_recovers_by_itself(served, capsys):
    [told] = messages(ask(served, prompt=[4001], stream=True).text)
    assert told["error"]["message"] == "the server failed (RuntimeError); its log says how"
    log = capsys.readouterr().err
    assert "secret detail" in log and "in the engine's process" in log and "in run_step" in log
    assert "requests that this ended: 1" in log
    assert served.llm.engine_loop.failure is not None
    wait_until(lambda: get(served, "/health").status_code == 200)  # it has tried another step
    assert served.llm.engine_loop.failure is None


def test_an_error_of_several_requests_crosses_once_and_stays_one_error():
    failure = RuntimeError("why")
    requests = [Request(number, [1], SamplingParams(), 0) for number in range(64)]
    news = [(Call([]), request, Event(0, [], "", error=failure)) for request in requests]
    packed = wire.pack_news(0.0, failure, news)
    [(_, _, told, rows)] = wire.take_messages(bytearray(wire.HEAD.pack(len(packed)) + packed))
    assert {id(wire.unpack_event(*row).error) for row in rows} == {id(told)}


def test_signals_that_a_terminal_sends_to_all_processes_do_not_end_the_engine(served, process):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert ask(served, max_tokens=2).status_code == 200


def test_news_are_read_as_they_were_written_wherever_the_pipe_cuts_them():
    events = [
        Event(0, [Token(5, "a")], "a"),
        Event(0, [Token(6, "b", {6: -0.5})], "b"),
        Event(0, [Token(7, "c"), Token(8, "")], "c", {"text": "ab", "finish_reason": "stop"}),
        Event(0, [], "", error=KeyError("why")),
    ]
    requests = [Request(number, [1], SamplingParams(), 0) for number in range(4)]
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


def test_what_ended_one_request_alone_crosses_with_its_output_as_one_error():
    error = GrammarError("structured_outputs: no text has this form")
    output = {"text": "a", "finish_reason": "error", "error": error}
    packed = wire.pack_news(
        0.0, None, [(Call([]), Request(0, [1], SamplingParams(), 0), Event(0, [], "", output, error))]
    )
    [(_, _, _, [row])] = wire.take_messages(bytearray(wire.HEAD.pack(len(packed)) + packed))
    event = wire.unpack_event(*row)
    assert event.error is event.output["error"] and as_request_error(event.error).status == 400
    assert "no text has this form" in str(event.error)


def test_an_error_that_only_one_of_the_processes_can_make_crosses_as_text(tmp_path, monkeypatch):
    class Odd(Exception):
        def __init__(self, number: int, word: str) -> None:
            super().__init__(f"{number} {word}")

    (tmp_path / "made_by_an_engine.py").write_text("class Plain(Exception):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    plain = importlib.import_module("made_by_an_engine").Plain  # here it can be pickled
    undecodable = UnicodeDecodeError("utf-8", b"?", 0, 1, "why")
    assert repr(wire.portable(Odd(3, "times"))) == "RuntimeError('Odd: 3 times')"
    assert repr(wire.portable(plain("word"))) == "RuntimeError('Plain: word')"
    assert str(wire.portable(ValueError(sys))).startswith("ValueError: <module 'sys'")
    assert repr(wire.portable(undecodable)) == repr(undecodable)
    assert type(wire.portable(EngineClosed("soon"))) is EngineClosed


# ---- the end of either ----------------------------------------------------------------------------------------------


def test_an_engine_that_is_stopped_is_not_dead_and_goes_on_when_it_may(served, process):
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with streamed(served, max_tokens=5) as response:
            assert response.status_code == get(served, "/health").status_code == 200
            assert served.llm.num_unfinished == 1
            os.kill(process.pid, signal.SIGCONT)
            assert len(messages(response.read().decode())) == 5
    finally:
        os.kill(process.pid, signal.SIGCONT)


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}


def test_stage_e_gives_answers_a_form_and_a_missing_package_is_named(served, monkeypatch):
    pytest.importorskip("llguidance", reason="constrained decoding: pip install llguidance")
    assert json.loads(formed(served).json()["choices"][0]["text"]) in ("yes", "no")
    refused = ask(served, response_format={"type": "json_object"}, ignore_eos=True).json()["error"]
    assert refused["param"] == "response_format" and refused["message"].startswith("response_format of prompt 0 cannot")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(served.llm.llm, "_grammars", Grammars(served.llm.llm.source, 4096))
    error = formed(served).json()["error"]
    assert error["message"] == "response_format needs the package llguidance: pip install llguidance"


def test_stage_f_gives_answers_a_form():
    pytest.importorskip("llguidance", reason="constrained decoding: pip install llguidance")
    process = EngineProcess("stage_f_graph_tp:LLM", OPTIONS)
    with running(RemoteLLM(process)) as server:
        assert json.loads(formed(server).json()["choices"][0]["text"]) in ("yes", "no")


def formed(server) -> httpx.Response:
    return ask(server, response_format=FORMAT, max_tokens=8)


def test_an_engine_that_is_stopped_with_work_pending_is_not_healthy(served, process, monkeypatch):
    monkeypatch.setattr(served.llm, "health_seconds", 2)
    before = get(served, "/metrics").text
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with streamed(served, max_tokens=3) as response:
            time.sleep(4)  # nobody asks meanwhile
            begun = time.perf_counter()
            assert get(served, "/health").status_code == 503
            during = get(served, "/metrics")
            assert time.perf_counter() - begun < 1
            assert during.status_code == 200 and silent_seconds(before) == 0 and silent_seconds(during.text) > 2
            os.kill(process.pid, signal.SIGCONT)
            assert len(messages(response.read().decode())) == 3
        wait_until(lambda: get(served, "/health").status_code == 200)
    finally:
        os.kill(process.pid, signal.SIGCONT)


def silent_seconds(metrics: str) -> float:
    return float(re.search(r"vllm:engine_silent_seconds{.*} (.*)\n", metrics)[1])


def test_an_engine_that_is_killed_is_told_to_all_and_ends_the_server(served, process, capsys):
    """The last test that uses the server."""
    with streamed(served, max_tokens=900) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: {")
        os.kill(process.pid, signal.SIGKILL)
        *_, error, done = lines
    assert "died (SIGKILL)" in json.loads(error.removeprefix("data: "))["error"]["message"] and done == "data: [DONE]"
    wait_until(lambda: not served.thread.is_alive())
    assert "died (SIGKILL)" in str(served.errors[0])
    assert not served.llm.num_unfinished
    assert not asyncio.run(served.llm.works())  # which is what /health says
    assert "ending" not in capsys.readouterr().out  # as if somebody had asked it to


def test_a_process_whose_engines_thread_fails_ends_and_says_why(capfd):
    process = EngineProcess("stage_e_batching:LLM", OPTIONS)
    RemoteLLM(process)
    process.commands.send_bytes(b"no command")
    assert process.end(60) == "exit code 1" and "UnpicklingError" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("module", "argument", "code"),
    [
        ("beyond.serving.engine_process", "__import__('threading').ExceptHookArgs((ValueError, None, None, None))", 1),
        ("stage_a_naive.entrypoints.interrupts", "2, None", 130),
    ],
)
def test_what_must_end_at_once_ends_although_nobody_reads_what_it_says(module, argument, code):
    reader, writer = os.pipe()
    os.close(reader)
    program = f"import sys, time; from {module} import end_at_once; end_at_once({argument}); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=writer, timeout=50, check=False)
    os.close(writer)
    assert done.returncode == code


@pytest.mark.slow
def test_an_engine_that_is_broken_for_good_ends_the_server_which_says_why():
    with command("--engine", BREAKABLE) as server:
        address = next(line.split()[-1] for line in server.stdout if line.startswith("[serving] API "))
        response = httpx.post(f"{address}/completions", json={"prompt": [4002]}, timeout=60)
        assert response.status_code == 500 and "died" not in response.json()["error"]["message"]
        assert server.wait(60) == 1
        last = server.stderr.read().splitlines()[-1]
    died = "the engine's process died (exit code 1) after a step that failed: EngineBroken: rank 1 of 2 died"
    assert last.startswith(f"error: {died}; read what it printed")


def test_a_server_that_is_killed_leaves_no_process_behind_even_while_it_loads():
    with command() as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        wait_until(lambda: children.read_text() or server.poll() is not None)
        engine = int(children.read_text())
        assert is_alive(engine)
    wait_until(lambda: not is_alive(engine))


def test_ctrl_c_ends_a_server_that_loads_although_an_import_ignores_it(tmp_path):
    said = "with suppress(KeyboardInterrupt):\n    print('importing', flush=True)\n    time.sleep(60)\n"
    (tmp_path / "my_engine.py").write_text(f"import time\nfrom contextlib import suppress\n{said}")
    with command("--engine", "my_engine:LLM", folder=tmp_path) as server:
        assert server.stdout.readline() == "importing\n"
        server.send_signal(signal.SIGINT)
        assert (server.wait(30), server.stderr.read()) == (130, "\ninterrupted\n")


def test_an_engine_that_dies_while_it_loads_is_no_mystery(capsys):
    process = EngineProcess("stage_e_batching:LLM", OPTIONS)
    os.kill(process.pid, signal.SIGKILL)
    assert serve_process(process, parse(["--port", "0"])[0]) == 1
    assert "while it was loading the model (SIGKILL); read what it printed" in capsys.readouterr().err
    process.close()


def test_no_model_is_loaded_for_a_port_that_is_taken(tmp_path, capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port), "--model", str(tmp_path)]) == 2  # where there is no model
    told = f"error: cannot listen on host 127.0.0.1, port {port}: Address already in use; choose others\n"
    assert capsys.readouterr().err == told


def test_an_engine_that_does_not_end_is_killed():
    process = EngineProcess("stage_e_batching:LLM", OPTIONS)
    os.kill(process.pid, signal.SIGSTOP)  # it answers nothing any more
    assert process.end(0.1) == "SIGKILL"
