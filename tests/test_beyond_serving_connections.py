"""Any bytes on a connection lead to an answer or a closed connection, and all other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from serving import QUESTION, ask, engine, get, served, wait_until
from uvicorn.loops.auto import auto_loop_factory

from beyond.serving import connection as connections
from beyond.serving.protocol import Limits

LOOP = auto_loop_factory(use_subprocess=False)  # the command's: uvloop, which reads in another way, if it is installed
HEALTH_SECONDS = 0.5  # within which /health answers on an idle machine
BODY = json.dumps({"prompt": QUESTION, "max_tokens": 3, "temperature": 0}).encode()
STREAM = BODY[:-1] + b', "stream": true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TOKENS = HEAD.replace(b"/v1/completions", b"/detokenize")
CLOSE = b"Connection: close\r\n"

llm = engine(max_num_seqs=8, num_kvcache_blocks=64)
server = served(loop_factory=LOOP, limits=Limits(read_seconds=1))


patient = served(loop_factory=LOOP)


def with_body(head: bytes, body: bytes = BODY) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def exchange(server, sent: bytes, seconds: float = 30) -> bytes:
    """Send bytes, as far as they are taken, and return all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as client:
        received = b""
        with suppress(ConnectionError):
            client.sendall(sent)
        with suppress(ConnectionError):
            while came := client.recv(1 << 16):
                received += came
    return received


@contextmanager
def health_is_answered(server) -> Iterator[None]:
    """`/health` says 200 in time, again and again, as long as the block runs.

    A busy machine, and this process's own work, slow the server down too. So the limit is the larger one of the
    promise and of a multiple of what the answer takes when nothing else is asked, and one answer in ten may be late.
    """

    def seconds() -> float:
        begun = time.perf_counter()
        assert get(server, "/health").status_code == 200
        return time.perf_counter() - begun

    limit = max(HEALTH_SECONDS, 10 * statistics.median(seconds() for _ in range(5)))
    took, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                took.append(seconds())
            except Exception:
                took.append(float("inf"))
            done.wait(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    slow = [f"{second:.2f} s" for second in took if second > limit]
    assert server.thread.is_alive() and took and max(took) < 10 * limit, slow
    assert len(slow) <= 1 + len(took) / 10, f"limit {limit:.2f} s, {len(took)} answers, {slow}"


@pytest.mark.parametrize("protocol", ["websocket", "WebSocket", "h2c", "tls/1.2"])
def test_an_upgrade_is_not_done_and_the_request_is_answered_with_its_body(server, protocol):
    upgrade = f"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: {protocol}\r\n".encode()
    upgrade += b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    answer = exchange(server, with_body(HEAD + upgrade))
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"completion_tokens":3' in answer
    health = exchange(server, with_body(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + upgrade, b"x"))
    assert health.startswith(b"HTTP/1.1 200 ")
    time.sleep(1.2)  # the server looks at its connections once a second
    assert ask(server, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "sent",
    {
        "one header": HEAD + b"X: " + bytes(b"x" * (8 << 20)),
        "a name": HEAD + b"x" * (1 << 20),
        "many headers": HEAD + b"a:b\r\n" * 500_000,
        "many headers that end": HEAD + b"a:b\r\n" * 20_000 + CLOSE + b"\r\n",
        "a path": b"GET /" + b"x" * (1 << 20),
        "trailers": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a:b\r\n" * 500_000,
    }.items(),
    ids=lambda item: item[0],
)
def test_a_head_has_a_limit(patient, sent):
    with health_is_answered(patient):
        begun = time.perf_counter()
        answer = exchange(patient, sent[1])
        assert time.perf_counter() - begun < 10  # long before a silent client is closed
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")


def test_a_head_that_is_too_long_is_told_so_and_one_of_some_kilobytes_is_answered(server):
    answer = exchange(server, HEAD + b"X: " + b"x" * 17_000)
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert answer.startswith(b"HTTP/1.1 431 ") and error["code"] == "invalid_http"
    assert exchange(server, with_body(HEAD + b"X: " + b"x" * 12_000 + b"\r\n" + CLOSE)).startswith(b"HTTP/1.1 200 ")


def test_a_body_in_a_million_pieces_stops_nobody(server):
    pieces = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 300_000
    with health_is_answered(server):
        answer = exchange(server, pieces)
    assert not answer or answer.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))


def test_a_million_ids_to_be_written_out_are_refused_at_once(patient):
    with health_is_answered(patient):
        answer = exchange(patient, with_body(TOKENS + CLOSE, b'{"tokens": [' + b"7, " * 999_999 + b"7]}"))
    assert answer.startswith(b"HTTP/1.1 400 ") and b"tokens must be a list of at most 4096" in answer


@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"], ids=["", "keep-alive"])
def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server, keep):
    head, _, events = exchange(server, with_body(HEAD.replace(b"1.1", b"1.0") + keep, STREAM)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n") and events.count(b"data: ") == 4


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"]
)
def test_what_is_not_http_gets_an_error_in_json(server, sent):
    head, _, body = exchange(server, sent).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    assert error["code"] == "invalid_http" and error["type"] == "invalid_request_error"


def test_bytes_that_are_not_http_behind_an_answer_that_has_begun_harm_nobody_else(server, capfd):
    def asked(body: bytes) -> bytes:
        return HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\nnonsense\r\n" % (len(body), body)

    assert exchange(server, asked(STREAM)).startswith(b"HTTP/1.1 400 ")
    answer = exchange(server, with_body(HEAD, STREAM) + b"nonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]\n\n" in answer and b"HTTP/1.1 400 " in answer
    assert ask(server, max_tokens=1).status_code == 200
    assert "Traceback" not in capfd.readouterr().err


def test_an_idle_connection_is_kept_for_as_long_as_a_silent_one(patient):
    assert patient.server.config.timeout_keep_alive == Limits().read_seconds == 30


def test_a_client_that_asks_on_and_on_and_reads_nothing_is_closed(server, monkeypatch):
    monkeypatch.setattr(connections, "SEND_SECONDS", 1)
    [listening] = server.server.servers[0].sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit it
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.settimeout(0.5)
        with suppress(OSError):  # the server stops reading
            for _ in range(100):
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        wait_until(lambda: any(one.flow.write_paused for one in server.server.server_state.connections))
        wait_until(lambda: not server.server.server_state.connections)
    wait_until(lambda: not server.server.server_state.tasks)


# ---- any bytes ------------------------------------------------------------------------------------------------------

PATHS = [b"/health", b"/v1/models", b"/v1/completions", b"/v1/chat/completions", b"/", b"/metrics", b"*", b"/%00"]
METHODS = [b"GET", b"POST", b"HEAD", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"\xff", b""]
VERSIONS = [b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 ", b""]
HEADERS = [
    b"Host: localhost", b"Host: evil.example", b"Host: \xff", b"Connection: close", b"Connection: keep-alive, Upgrade",
    b"Upgrade: websocket", b"Upgrade: h2c", b"Sec-WebSocket-Key: eA==", b"Sec-WebSocket-Version: 13",
    b"Expect: 100-continue", b"Expect: x", b"Content-Type: application/json", b"Content-Type: \x00",
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 5, 6",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Authorization: Bearer x", b" folded", b":",
    b"X-Request-Id: \t", b"X: " + b"x" * 20_000, b"Accept-Encoding: *", b"Origin: http://localhost", b"Trailer: Host",
]  # fmt: skip
BODIES = [BODY, STREAM, b"{}", b"[" * 5000, b"5\r\nhello\r\n0\r\n\r\n", b"fffffffffffffffff\r\n", b"\xff" * 100, b""]


def random_bytes(chance: random.Random) -> bytes:
    """A request, right or nearly so; then perhaps cut, changed, doubled, or followed by another one."""
    if chance.random() < 0.05:
        return chance.randbytes(chance.randrange(200))
    body = chance.choice(BODIES)
    method = chance.choice(METHODS[: chance.choice([2, 9])])
    lines = [b" ".join([method, chance.choice(PATHS), chance.choice(VERSIONS)])]
    lines += [b"Host: localhost"] * (chance.random() < 0.8)
    lines += [b"Content-Length: %d" % len(body), b"Content-Type: application/json"] * (chance.random() < 0.6)
    lines += chance.choices(HEADERS, k=chance.choice([0, 0, 1, 2, 5]))
    made = chance.choice([b"\r\n"] * 9 + [b"\n"]).join([*lines, b"", b""]) + body
    fault = chance.random()
    if fault < 0.15:
        made = made[: chance.randrange(len(made) + 1)]
    elif fault < 0.3:
        place = chance.randrange(len(made))
        made = made[:place] + chance.randbytes(chance.randrange(1, 4)) + made[place + chance.randrange(3) :]
    elif fault < 0.35:
        made *= chance.randrange(2, 40)
    elif fault < 0.4:
        made += random_bytes(chance)
    return made


async def send_any(port: int, sent: bytes, chance: random.Random) -> None:
    """Send bytes in one piece or several, leave in one way or another, and see that the connection ends."""
    async with asyncio.timeout(60):  # whatever it is, it ends
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(OSError):
            cuts = sorted(chance.choices(range(len(sent) + 1), k=chance.choice([0, 0, 1, 3])))
            for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                writer.write(sent[begin:end])
                await writer.drain()
                await asyncio.sleep(0)
            way = chance.random()
            if way < 0.2:
                writer.transport.abort()
            elif way < 0.8:
                writer.write_eof()
            await reader.read()
        writer.close()


def send_many(server, number: int, seed: int, at_once: int = 64) -> None:
    async def send_all() -> None:
        inputs = iter(range(number))

        async def one_after_another() -> None:
            for i in inputs:
                chance = random.Random(f"{seed} {i}")
                sent = random_bytes(chance)
                try:
                    await send_any(server.port, sent, chance)
                except TimeoutError:
                    raise AssertionError(f"neither answered nor closed: {sent[:300]!r}") from None

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))

    asyncio.run(send_all())


@pytest.mark.parametrize("number", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_bytes_end_in_an_answer_or_a_close_and_health_is_answered_meanwhile(server, number, capfd):
    with health_is_answered(server):
        send_many(server, number, seed=number)
    assert ask(server, max_tokens=1).status_code == 200
    wait_until(lambda: not server.llm.num_unfinished)
    assert "Traceback" not in capfd.readouterr().err
