"""What an operator relies on: an id and a line per request, limits on silence and strangers, and an honest health."""

from __future__ import annotations

import asyncio
import re
import socket
import threading

import pytest
from serving import CHAT, QUESTION, ask, engine, get, httpx, served, streamed, wait_until

from beyond.serving import async_llm
from beyond.serving.__main__ import parse
from beyond.serving.protocol import Limits
from beyond.serving.server import with_origins

llm = engine(max_num_seqs=4, num_kvcache_blocks=64)
LINES: list[str] = []


server = served(limits=Limits(read_seconds=1), write_log=LINES.append, max_connections=8, hosts=["my-server"])


@pytest.fixture(autouse=True)
def no_lines():
    LINES.clear()


def post(server, **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"prompt": QUESTION, "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_every_answer_has_an_id_and_a_line_that_has_it_too(server):
    answers = [ask(server), ask(server, temperature=-1), post(server, x_request_id="of-mine.7")]
    with streamed(server, max_tokens=3) as stream:
        stream.read()
    answers.append(stream)
    wait_until(lambda: len(LINES) == 4)
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4 and ids[2] == "of-mine.7"
    for line, name, end in zip(LINES, ids, ["200", "400", "200", "200"], strict=True):
        assert re.fullmatch(rf"\[request\] {name} POST /v1/completions {end} \d+\.\d{{3}} s( invalid_request)?", line)
    assert LINES[1].endswith("invalid_request") and QUESTION not in "".join(LINES)


def test_an_id_or_a_path_that_would_break_the_line_does_not_reach_it(server):
    answer = post(server, x_request_id="two words")
    get(server, "/no%0Asuch")
    wait_until(lambda: len(LINES) == 2)
    assert " " not in answer.headers["x-request-id"] and "\n" not in "".join(LINES)
    assert "/no\\nsuch 404" in LINES[1]


def test_a_stream_whose_client_has_left_is_noted_as_such(server):
    with streamed(server, max_tokens=2000) as stream:
        next(stream.iter_raw())
    wait_until(lambda: LINES)
    assert LINES[0].endswith(" s client_gone")


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "My-Server:80"])
def test_the_servers_own_names_and_numbers_are_answered(server, host):
    assert post(server, host=host).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example"])
def test_a_name_of_another_site_is_refused_where_there_is_no_key(server, host):
    answer = post(server, host=host)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "unknown_host"
    assert "--allowed-host" in answer.json()["error"]["message"]


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    connection.settimeout(30)
    return b"".join(iter(lambda: connection.recv(4096), b""))


def test_a_body_that_does_not_come_is_given_up(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        connection.sendall(f'{head}Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{{"prompt"'.encode())
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"read_timeout" in answer


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl"], ids=["nothing", "half a head"])
def test_a_connection_that_asks_nothing_is_closed(server, sent):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(sent)
        assert received(connection) == b""


def test_an_answer_that_takes_longer_than_a_request_may_is_not_cut(server):
    server.llm.engine_loop.pause()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask(server, max_tokens=1)))
    thread.start()
    thread.join(3)  # longer than `read_seconds`, twice
    server.llm.engine_loop.resume()
    thread.join(60)
    assert answers[0].status_code == 200


def test_connections_above_the_limit_are_told_so(server):
    others = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    wait_until(lambda: len(server.server.server_state.connections) >= 8)
    refused = ask(server)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_connections"
    for other in others:
        other.close()
    wait_until(lambda: not server.server.server_state.connections)
    assert ask(server).status_code == 200


def test_an_engine_that_does_not_answer_is_not_healthy_and_its_metrics_are_those_that_it_told_last(server, monkeypatch):
    monkeypatch.setattr(async_llm, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(server.llm, "health_seconds", 0.3)
    assert get(server, "/health").status_code == 200
    before, stuck = get(server, "/metrics").text, threading.Event()
    assert re.search(r"vllm:engine_silent_seconds{.*} 0\.0\n", before)
    server.llm.engine_loop.call(lambda calls: stuck.wait(30))  # as in a kernel that never ends
    try:
        wait_until(lambda: get(server, "/health").status_code == 503)
        during = get(server, "/metrics").text
        assert re.search(r"vllm:generation_tokens_total{.*\n", before)[0] in during
        assert float(re.search(r"vllm:engine_silent_seconds{.*} (.*)\n", during)[1]) > 0.3
    finally:
        stuck.set()
    wait_until(lambda: get(server, "/health").status_code == 200)


def test_a_role_that_no_template_knows_is_refused_and_an_error_counts_no_conversations(server):
    def refused(*messages: dict) -> str:
        body = {"messages": list(messages)}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        return answer.json()["error"]["message"]

    assert refused(*CHAT, {"role": "critic", "content": "x"}).startswith(
        "the role of a message is one of system, developer, user,"
    )
    assert refused({"role": "user"}).startswith("a message is a dict")


def test_the_log_can_be_switched_off_and_the_limits_set():
    options, _ = parse(["--no-request-log", "--max-connections", "9", "--allowed-host", "a", "--allowed-host", "b"])
    assert (options.request_log, options.max_connections, options.allowed_host) == (False, 9, ["a", "b"])
    assert parse(["--served-model-name", "mine"])[0].served_model_name == "mine"
    assert parse([])[0].request_log
    assert parse(["--health-seconds", "5"])[0].health_seconds == 5
    with pytest.raises(ValueError, match="--health-seconds must be above 0, got 0"):
        parse(["--health-seconds", "0"])
    with pytest.raises(ValueError, match="--max-connections must be 1 or more, got 0"):
        parse(["--max-connections", "0"])


def test_a_browser_lets_pages_of_an_allowed_origin_ask_and_no_others():
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}

    async def inner(scope: object, receive: object, send: object) -> None:
        raise AssertionError("a preflight request is answered before the API")

    app = with_origins(inner, ["https://good.example"])
    transport = httpx.ASGITransport(app)

    async def preflight(origin: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.options("/v1/completions", headers=asked | {"Origin": origin})

    good, other = (asyncio.run(preflight(f"https://{name}.example")) for name in ("good", "other"))
    assert good.status_code == 200 and good.headers["access-control-allow-origin"] == "https://good.example"
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    assert with_origins(inner, []) is inner
