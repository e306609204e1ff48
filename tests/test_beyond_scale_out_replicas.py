"""Several engines behind one address: a prefix goes to one replica, and neither a crash nor a restart loses a request.

One Ray cluster serves all of it; starting one takes many seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("ray.serve", reason="replicas: pip install -e .[ray]")

from ray.exceptions import RayActorError  # noqa: E402
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402

from beyond.scale_out.replicas import ATTEMPTS, Engine, Router, merge_metrics, read_body  # noqa: E402
from beyond.scale_out.serve_replicas import main, reason, serve_releases  # noqa: E402
from beyond.scale_out.sessions import PREFIX_CHARACTERS, session_of  # noqa: E402
from beyond.serving.app import Api  # noqa: E402
from beyond.serving.engine_loop import EngineClosed  # noqa: E402
from beyond.serving.protocol import Limits  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 150  # for anything that Ray does; the machine may be busy
pytestmark = pytest.mark.timeout(12 * SECONDS)
SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 20}


def chat(*contents: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, **fields}


def engines() -> set[int]:
    """The processes of the replicas that serve."""
    found = set()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ServeReplica:default:Engine" in command.read_bytes():
                found.add(int(command.parent.name))
        except OSError:  # ended meanwhile
            continue
    return found


def running(url: str) -> list[int]:
    """How many requests each serving replica runs."""
    text = httpx.get(f"{url}/metrics", timeout=SECONDS).text
    return [int(count) for count in re.findall(r"num_requests_running\{[^}]*\} (\d+)", text)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(ROOT / "models" / "tutor", tmp_path_factory.mktemp("model") / "tutor")
    file = copy / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "top_p": 0.9}))
    return copy


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "beyond.scale_out.serve_replicas", "--replicas", "2", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--model", str(model), "--port", str(port), "--max-num-seqs", "16", "--max-queue", "4"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "release 0" in line:
            break
    else:
        pytest.fail("".join(lines))
    assert any("defaults top_p 0.9" in line for line in lines)
    threading.Thread(target=process.stdout.read, daemon=True).start()
    yield f"http://127.0.0.1:{port}", process
    process.terminate()
    process.wait(SECONDS)
    assert process.returncode == 0 and not engines()


def test_an_answer_is_the_servers_and_its_errors_too(server):
    with httpx.Client(base_url=server[0], timeout=SECONDS) as client:
        answer = client.post("/v1/chat/completions", json=chat("What is a KV cache?"))
        assert answer.json()["choices"][0]["message"]["content"].startswith("A KV cache keeps the key and value")
        with client.stream("POST", "/v1/chat/completions", json=chat("What is a KV cache?", stream=True)) as streamed:
            events = [line for line in streamed.iter_lines() if line]
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert len(events) > 20 and events[-1] == "data: [DONE]"
        assert client.get("/v1/models").json()["data"][0]["default_sampling_params"] == {"top_p": 0.9}
        refused = client.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_json"


def test_a_prefix_goes_to_the_replica_that_has_it_and_metrics_are_of_all(server):
    with httpx.Client(base_url=server[0], timeout=SECONDS) as client:
        for i in range(6):
            body = chat() | {"messages": [SYSTEM, {"role": "user", "content": f"Question {i}?"}], "max_tokens": 1}
            usage = client.post("/v1/chat/completions", json=body).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 100) == (i > 0)
        text = client.get("/metrics").text
    assert len(set(re.findall(r'num_requests_running{replica="(\w+)"', text))) == 2
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_client_that_leaves_ends_its_request(server):
    url, _ = server

    def counts(name: str) -> list[int]:
        text = httpx.get(f"{url}/metrics", timeout=SECONDS).text
        return [int(count) for count in re.findall(rf"{name}[^\n]*}} (\d+)$", text, re.MULTILINE)]

    body = chat("Once", max_tokens=4000, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=SECONDS) as answer:
        next(answer.iter_lines())
    wait_for(lambda: sum(counts('finished_reason="abort"')) == 1 and not any(counts("num_requests_running")))


def test_beyond_the_room_of_all_replicas_a_request_is_sent_away(server):
    async def flood() -> httpx.Response:
        """100 long requests at once, given up when the first is answered; 2 × 20 have room, as many may wait."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server[0], timeout=SECONDS, limits=limits) as client:
            body = chat("Once", max_tokens=4000, ignore_eos=True)
            asks = [asyncio.ensure_future(client.post("/v1/chat/completions", json=body)) for _ in range(100)]
            done, others = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
            for ask in others:
                ask.cancel()
            await asyncio.wait(asks)
            return done.pop().result()

    refused = asyncio.run(flood())
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    assert "Retry-After" in refused.headers


@pytest.mark.parametrize("killed", ["replica", "its engine"])
def test_requests_that_a_killed_replica_had_accepted_are_answered_by_another(server, killed):
    """Long answers that are not streamed: nothing has reached the client when the replica dies."""
    url, _ = server
    answers: list[Future[httpx.Response]] = []

    def ask(number: int) -> httpx.Response:
        body = chat(f"Question {number}", max_tokens=400, ignore_eos=True)
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SECONDS)

    def both_run() -> bool:
        if all(answer.done() for answer in answers):  # at first; or they were faster than this look at them
            answers.extend(pool.submit(ask, len(answers) + i) for i in range(12))
        counts = running(url)
        return len(counts) == 2 and min(counts) > 0

    with ThreadPoolExecutor(12) as pool:
        wait_for(both_run)
        victim = min(engines())
        [engine] = "".join(file.read_text() for file in Path(f"/proc/{victim}/task").glob("*/children")).split()
        os.kill(victim if killed == "replica" else int(engine), signal.SIGKILL)
        found = [answer.result().json() for answer in answers]
    assert {answer["usage"]["completion_tokens"] for answer in found} == {400}
    wait_for(lambda: len(engines() - {victim}) == 2)


def test_new_replicas_that_do_not_start_end_no_old_one(server, model):
    url, process = server
    wait_for(lambda: len(running(url)) == 2)
    before, seen = engines(), set()
    (model / "config.json").rename(model / "not_there.json")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: bool(seen.update(engines())) or seen > before)
    wait_for(lambda: engines() == before)
    (model / "not_there.json").rename(model / "config.json")
    assert len(running(url)) == 2
    assert httpx.post(f"{url}/v1/chat/completions", json=chat("Hello"), timeout=SECONDS).status_code == 200


def test_a_rolling_restart_under_load_fails_no_request(server):
    url, process = server
    answers: list[object] = []
    stop = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, timeout=SECONDS) as client:
            while not stop.is_set():
                try:
                    found = client.post("/v1/chat/completions", json=chat(f"Question {number} {len(answers)}"))
                    answers.append(found.status_code if found.status_code == 200 else found.text)
                except httpx.HTTPError as error:
                    answers.append(repr(error))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    try:
        wait_for(lambda: len(answers) >= 8)
        before = engines()
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: len(engines()) == 2 and not engines() & before and len(running(url)) == 2)
        count = len(answers)
        wait_for(lambda: len(answers) >= count + 8)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert set(answers) == {200}


def test_a_stream_that_has_begun_breaks_with_its_replica_and_does_not_look_complete(server):
    url, _ = server
    body = chat("Once", max_tokens=4000, ignore_eos=True, stream=True)
    lines = []
    with (
        pytest.raises(httpx.RemoteProtocolError, match="incomplete"),
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=SECONDS) as answer,
    ):
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 3:
                for process in engines():  # it is not known which of them answers
                    os.kill(process, signal.SIGKILL)
    assert lines[0].startswith("data: {") and "data: [DONE]" not in lines


def test_at_the_end_running_answers_are_finished(server):
    """The last test that uses the replicas: it ends all of them."""
    url, process = server
    body = chat("Once", max_tokens=400, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=SECONDS) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert next(lines).startswith("data: {")
        process.send_signal(signal.SIGTERM)
        *others, done = lines
    assert len(others) == 399 and done == "data: [DONE]"
    assert process.wait(SECONDS) == 0


def test_what_begins_alike_is_one_session():
    def session(*contents: str) -> str:
        return session_of(httpx.Request("POST", "http://x", json=chat(*contents)).content)

    assert session("a question") == session("a question", "an answer", "another question") != session("another one")
    long = "x" * PREFIX_CHARACTERS
    assert session(long + "one") == session(long + "two")
    prompt = session_of(b'{"prompt": "' + long.encode() + b'one"}')
    assert prompt == session_of(b'{"prompt": "' + long.encode() + b'two"}') != session_of(b'{"prompt": [1, 2]}')
    broken = (b"{", b"[]", b"{}", b'{"messages": [1]}', b'{"messages": []}', b"[" * 10**6)
    assert {session_of(body) for body in broken} == {""}
    assert session_of(b'{"prompt": "\\ud800"}') != session_of(b'{"prompt": "\\ud801"}')  # the API refuses them


def test_a_body_is_read_no_further_than_the_limit():
    async def receive() -> dict[str, object]:
        parts.append(b"x" * 10)
        assert len(parts) < 10
        return {"type": "http.request", "body": parts[-1], "more_body": True}

    parts: list[bytes] = []
    body = asyncio.run(read_body(Request({"type": "http"}, receive), 25))
    assert len(body) == 30


class DyingReplicas:
    """A handle on replicas, the first of which die before they answer, or fail otherwise."""

    def __init__(self, deaths: int, error: Exception) -> None:
        self.deaths, self.error, self.sessions = deaths, error, []

    def options(self, session_id: str, **_: object) -> DyingReplicas:
        self.sessions.append(session_id)
        return self

    async def remote(self, scope: dict[str, object], body: bytes) -> AsyncIterator[dict[str, object]]:
        yield {"type": "http.response.start", "status": 200, "headers": [(b"x-seen", body)]}
        if len(self.sessions) <= self.deaths:
            raise self.error
        yield {"type": "http.response.body", "body": b"answer"}


def ask_router(
    deaths: int, *headers: tuple[bytes, bytes], error: Exception | None = None
) -> tuple[Response, DyingReplicas]:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}

    replicas = DyingReplicas(deaths, error or RayActorError())
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": list(headers)}
    return asyncio.run(Router(replicas)(Request(scope, receive))), replicas


def test_a_request_goes_to_another_replica_until_one_answers_or_three_have_died():
    for deaths in range(ATTEMPTS):
        answer, replicas = ask_router(deaths)
        assert answer.status_code == 200 and answer.headers["x-seen"] == '{"prompt": "x"}'
        assert replicas.sessions == [session_of(b'{"prompt": "x"}')] * (deaths + 1)
    answer, replicas = ask_router(ATTEMPTS)
    assert answer.status_code == 503 and len(replicas.sessions) == ATTEMPTS
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "server_error"
    assert "3 replicas died before they answered" in error["message"]
    answer, replicas = ask_router(1, error=DeploymentUnavailableError("Engine"))
    assert answer.status_code == 503 and len(replicas.sessions) == 1 and b"no replica serves" in answer.body


def test_a_request_for_which_nobody_has_room_is_told_so_and_not_tried_again():
    answer, replicas = ask_router(1, error=BackPressureError(9, 9))
    assert answer.status_code == 429 and "retry-after" in answer.headers and len(replicas.sessions) == 1
    assert json.loads(answer.body)["error"]["code"] == "queue_full"


def test_the_client_may_name_its_session():
    assert ask_router(0, (b"x-session-id", b"mine"))[1].sessions == ["mine"]


def test_a_replica_whose_engine_has_failed_is_not_healthy():
    def check(failure: Exception | None) -> None:
        async def works() -> bool:
            return failure is None

        llm = SimpleNamespace(engine_loop=SimpleNamespace(failure=failure), works=works)
        asyncio.run(Engine.check_health(SimpleNamespace(llm=llm)))

    check(None)
    with pytest.raises(ZeroDivisionError):
        check(ZeroDivisionError())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "0"], "--replicas must be"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--engine", "no_such_module:LLM"], "no_such_module"),
        (["--port", "65536"], "port 65536"),
        (["--trace", "steps.jsonl"], "--trace is one file"),
    ],
)
def test_replicas_that_cannot_begin_say_why_in_one_line(options, said, capsys):
    assert main(options) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and said in told and told.count("\n") == 1


OPTIONS = SimpleNamespace(
    **{"engine": None, "stage": "e", "host": "127.0.0.1", "replicas": 2, "max_queue": 1, "api_key": None},
    **{"generation_config": "auto", "deadline": 1},
)


def test_more_replicas_than_there_are_gpus_for_are_refused(monkeypatch):
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 3.0})
    with pytest.raises(ValueError, match="--replicas 2 takes 4 GPUs, and there are 3"):
        serve_releases(OPTIONS, {"device": "auto", "tensor_parallel_size": 2}, 8000)


@pytest.mark.parametrize("release", [0, 1])
def test_a_signal_ends_replicas_that_are_still_starting(release, monkeypatch):
    started: list[int] = []
    finished: list[object] = []
    answer = SimpleNamespace(result=lambda timeout_s: {})
    handle = SimpleNamespace(defaults=SimpleNamespace(remote=lambda: answer))

    def start(release_number: int) -> None:
        started.append(release_number)
        if release_number == release:
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("it waits for the replicas")
        signal.raise_signal(signal.SIGUSR1)

    for name, stand_in in {
        "ray.serve.run": start,
        "ray.serve.get_app_handle": lambda name: handle,
        "ray.cluster_resources": dict,
        "ray.available_resources": dict,
        "beyond.scale_out.replicas.application": lambda *_, release, **__: release,
        "beyond.scale_out.serve_replicas.finish": lambda router, *_: finished.append(router),
    }.items():
        monkeypatch.setattr(name, stand_in)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        with nullcontext() if release else pytest.raises(KeyboardInterrupt):
            assert serve_releases(OPTIONS, {"device": "cpu"}, 8000) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert started == [0, 1][: release + 1] and finished == [handle] * release


def test_why_replicas_do_not_start_is_the_last_line_of_the_first_message():
    def status(**messages: str) -> SimpleNamespace:
        deployments = {name: SimpleNamespace(message=message) for name, message in messages.items()}
        return SimpleNamespace(applications={"default": SimpleNamespace(deployments=deployments)})

    trace = "It failed. Error:\n  File 1\nValueError: max_num_seqs must be at least 1, got 0\n"
    assert reason(status(Router="", Engine=trace)) == "ValueError: max_num_seqs must be at least 1, got 0"
    assert reason(status(Router="", Engine="")) == "Ray gives no reason"


def test_metrics_are_those_of_the_replicas_that_live():
    async def results_async(return_exceptions: bool) -> list[object]:
        assert return_exceptions
        return [("one", "a{} 1\n"), RayActorError()]

    handle = SimpleNamespace(broadcast=lambda method: SimpleNamespace(results_async=results_async))
    assert asyncio.run(Router(handle).metrics()).body == b'\na{replica="one",} 1\n'


def test_a_replica_that_has_ended_has_no_metrics_and_no_text_in_their_place():
    closed: Future = Future()
    closed.set_exception(EngineClosed("it has ended"))
    api = Api(SimpleNamespace(engine_loop=SimpleNamespace(call=lambda function: closed)), "tutor", Limits(), None, {})
    with pytest.raises(EngineClosed):
        asyncio.run(Engine.metrics(SimpleNamespace(api=api)))


def test_metrics_of_replicas_stay_together_by_metric():
    def text(value):
        heads = ("# HELP a A.\n# TYPE a gauge\na", "# HELP b B.\n# TYPE b counter\nb")
        return "".join(f'{head}{{m="x"}} {value}\n' for head in heads)

    assert merge_metrics({"p": text(1), "q": text(2)}) == (
        '# HELP a A.\n# TYPE a gauge\na{replica="p",m="x"} 1\na{replica="q",m="x"} 2\n'
        '# HELP b B.\n# TYPE b counter\nb{replica="p",m="x"} 1\nb{replica="q",m="x"} 2\n'
    )
