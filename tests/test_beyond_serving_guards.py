"""Any invalid request is answered with its error, and does not affect the engine."""

from __future__ import annotations

import json
import socket

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from serving import assert_idle, engine, httpx, running

from beyond.serving.__main__ import parse
from beyond.serving.answers import as_json
from beyond.serving.protocol import ASKS_FOR_NOTHING, CHAT_FIELDS, COMPLETION_FIELDS, Limits
from beyond.serving.server import listen
from beyond.serving.sse import frame

KEY = "ein Schlüssel"  # not ASCII, and with a space
ALLOWED = {200, 400, 404, 413, 429}


llm = engine(max_num_seqs=8, num_kvcache_blocks=64, max_model_len=64)


@pytest.fixture(scope="module")
def client(llm):
    options = {"api_key": KEY, "limits": Limits(body_bytes=3000, prompts=4, n=4)}
    headers = {"Authorization": f"Bearer {KEY}".encode()}
    with running(llm, **options) as server, httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        yield client


def post(client, path: str, body: object):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


def assert_answered(response, llm) -> None:
    assert response.status_code in ALLOWED, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 1000
    assert_idle(llm)


TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # halves of surrogate pairs too, which JSON can hold
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
PROMPTS = TEXT | st.lists(st.integers(-2, 5000), max_size=4) | st.lists(st.text(max_size=5), max_size=5)
ROLES = st.sampled_from(["user", "system", "x"]) | TEXT
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT | JUNK}), max_size=4)
NEARLY_RIGHT = {
    "prompt": PROMPTS,
    "messages": MESSAGES,
    "n": st.integers(-1, 5),
    "max_tokens": st.integers(-1, 20),
    "temperature": st.floats(-0.1, 3),
    "top_p": st.floats(0, 1.1),
    "top_k": st.integers(-2, 9),
    "logprobs": st.integers(-1, 22) | st.booleans(),
    "top_logprobs": st.integers(0, 22),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stream": st.booleans(),
    "seed": st.integers(-1, 2**65),
    "model": st.sampled_from(["tutor", "other"]),
}


def bodies(known: set[str], wanted: str) -> st.SearchStrategy[dict]:
    """Requests that are right in most fields, wrong in some, and have some that do not exist."""
    names = sorted(known | set(ASKS_FOR_NOTHING))
    fields = {
        name: NEARLY_RIGHT.get(name, JUNK) | JUNK if i % 3 == 0 else NEARLY_RIGHT.get(name, JUNK)
        for i, name in enumerate(names)
    }
    right = st.fixed_dictionaries({wanted: NEARLY_RIGHT[wanted]}, optional={n: fields[n] for n in names if n != wanted})
    return right | st.dictionaries(st.sampled_from(names) | TEXT, JUNK, max_size=6)


JUNK_FOR = st.tuples(st.sampled_from(["/v1/completions", "/tokenize", "/detokenize"]), JUNK | st.binary(max_size=40))
ASKED = {
    "a completion": st.tuples(st.just("/v1/completions"), bodies(COMPLETION_FIELDS, "prompt")),
    "a chat": st.tuples(st.just("/v1/chat/completions"), bodies(CHAT_FIELDS, "messages")),
    "any bytes and any JSON value": JUNK_FOR,
}


@pytest.mark.parametrize("kind", ASKED)
def test_whatever_is_asked_is_answered(client, llm, kind):
    @examples(14)
    @given(asked=ASKED[kind])
    def ask(asked):
        path, body = asked
        assert_answered(post(client, path, {"max_tokens": 4} | body if kind == "a chat" else body), llm)

    ask()


@pytest.mark.parametrize("field", ["prompt", "model", "stop", "\ud800", "x" * 2000], ids=ascii)
def test_half_a_character_is_as_harmless_as_any_text(client, llm, field):
    assert_answered(post(client, "/v1/completions", {"prompt": "x", field: "a\ud800"}), llm)


def test_without_the_key_there_is_nothing_but_health_and_metrics(client):
    for sent in (None, KEY, f"Basic {KEY}", "Bearer wrong", f"Bearer {KEY}x", "Bearer é"):
        headers = {} if sent is None else {"Authorization": sent.encode()}
        with httpx.Client(base_url=client.base_url, headers=headers, timeout=60) as stranger:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                answer = stranger.post(path, json={})
                error = answer.json()["error"]
                assert answer.status_code == 401
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert stranger.get("/v1/models").status_code == stranger.get("/v1/models/tutor").status_code == 401
            assert stranger.get("/health").status_code == stranger.get("/metrics").status_code == 200


def test_a_body_is_read_no_further_than_its_limit(client):
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        head = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}"]
        head += ["Content-Type: application/json", f"Content-Length: {10**12}", "", " " * 5000]
        connection.sendall("\r\n".join(head).encode())
        connection.settimeout(30)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")  # although most of it has not been sent


def test_an_address_of_ipv6_is_one_to_listen_on():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listen("::1", 0) as listening:
        assert listening.getsockname()[0] == "::1"


def test_nobody_from_outside_reaches_a_server_that_was_not_told_so(monkeypatch):
    monkeypatch.delenv("API_KEY", raising=False)
    options, _ = parse([])
    assert options.host == "127.0.0.1" and options.api_key is None
    monkeypatch.setenv("API_KEY", "from the environment")  # where other users of the machine do not see it
    assert parse([])[0].api_key == "from the environment"


@given(text=st.text())
def test_an_event_is_read_back_as_it_was_whatever_line_breaks_it_has(text):
    framed = frame(text).decode()
    assert framed.endswith("\n\n") and "\n\n" not in framed[:-2] and "\r" not in framed
    lines = [line.removeprefix("data: ") for line in framed[:-2].split("\n")]
    assert "\n".join(lines) == text.replace("\r\n", "\n").replace("\r", "\n")
    [line] = frame(as_json({"text": text})).decode()[:-2].split("\n")
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
