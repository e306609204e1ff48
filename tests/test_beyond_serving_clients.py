"""Clients that know nothing of this project: the `openai` package, LangChain, and a shell that sends a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from serving import CHAT, QUESTION, engine, httpx, served

from beyond.serving.__main__ import main, parse
from stage_a_naive.sampling import SamplingParams

openai = pytest.importorskip("openai", reason="the client: pip install openai")

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-a-key-for-tests"
ASK = {"messages": CHAT, "temperature": 0, "max_tokens": 24}


llm = engine(max_num_seqs=8, num_kvcache_blocks=256)


@pytest.fixture(scope="module")
def answer(llm) -> str:
    return llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=24), False)[0]["text"]


server = served(api_key=KEY, max_queue=0)


@pytest.fixture(scope="module")
def client(server):
    strict = {"_strict_response_validation": True}  # an answer that is not of the API's type is an error
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, **strict) as client:
        yield client


def test_openai_asks_and_streams(client, answer):
    ask = {"model": "tutor"} | ASK
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == answer and whole.usage.completion_tokens == 24
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == answer
    assert len(chunks) == 25 and chunks[-1].usage == whole.usage
    [first, *_] = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(first.top_logprobs) == 2 and answer.startswith(first.token)
    assert [model.id for model in client.models.list()] == ["tutor"]
    extra = client.completions.create(
        model="tutor", prompt=[1, 2, 3], max_tokens=2, logprobs=1, extra_body={"top_k": 1, "ignore_eos": True}
    )
    assert extra.usage.completion_tokens == 2 and len(extra.choices[0].logprobs.tokens) == 2


def test_openai_raises_its_own_errors(server, client):
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model="tutor", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].function.name must be"):
        client.chat.completions.create(model="tutor", messages=CHAT, tools=[{"type": "function", "function": {}}])
    with pytest.raises(openai.NotFoundError, match="'tutor'"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    server.llm.engine_loop.pause()
    full = client.completions.create(model="tutor", prompt="x", n=8, stream=True)  # all that there is room for
    with full, pytest.raises(openai.RateLimitError, match="retry later"):
        client.completions.create(model="tutor", prompt="x")
    server.llm.engine_loop.resume()


def test_langchain_asks_and_streams(server, answer, monkeypatch):
    langchain = pytest.importorskip("langchain_openai", reason="the client: pip install langchain-openai")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    options = {"base_url": f"{server.url}/v1", "api_key": KEY, "model": "tutor", "temperature": 0, "max_tokens": 24}
    chat = langchain.ChatOpenAI(**options)
    assert chat.invoke(QUESTION).content == answer
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == answer
    assert [reply.content for reply in chat.batch([QUESTION, QUESTION])] == [answer, answer]
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert langchain.OpenAI(**options).invoke(prompt)  # the class for completions


def test_the_command_serves_until_a_signal_and_finishes_what_runs():
    command = [sys.executable, "-m", "beyond.serving", "--port", "0", "--device", "cpu", "--num-kvcache-blocks", "256"]
    command += ["--no-request-log"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(5)]
            assert "[serving] defaults temperature 1, no filter, no penalty\n" in lines
            [url] = [line.split()[-1] for line in lines if "/v1" in line]
            control = url.removesuffix("/v1") + "/live/control"
            engine = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().strip()
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                httpx.post(control, json={"action": "pause"}, timeout=60)
                ask = {"model": "tutor", "prompt": QUESTION, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
                chunks = client.completions.create(**ask, stream=True)
                process.send_signal(signal.SIGTERM)
                assert "not complete yet: 1" in process.stdout.readline()
                httpx.post(control, json={"action": "resume"}, timeout=60)
                assert len(list(chunks)) == 30
            assert process.wait(60) == 0
            assert engine and not Path(f"/proc/{engine}").exists()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "no_such_module:LLM"], "no_such_module"),
        (["--engine", "stage_e_batching:NoSuch"], "NoSuch"),
        (["--max-num-seqs", "0"], "max_num_seqs must be"),
        (["--engine", "stage_d_paged:LLM"], "stage_d_paged"),
        (["--engine", "collections:OrderedDict"], "serve stage E, F"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--deadline", "-1"], "--deadline"),
        (["--deadline", "nan"], "--deadline"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--host", ""], "--host and"),
        (["--port", "65536", "--num-kvcache-blocks", "16"], "port 65536"),
    ],
)
def test_a_server_that_cannot_begin_says_why_in_one_line(options, said, capsys):
    assert main(["--port", "0", "--device", "cpu", *options]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("error: ") and said in told


def test_an_engine_of_a_plain_module_has_its_own_options(tmp_path, monkeypatch):
    (tmp_path / "my_engine.py").write_text("import stage_e_batching\n\nclass LLM(stage_e_batching.LLM):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    options, of_engine = parse(["--engine", "my_engine:LLM", "--max-num-seqs", "3"])
    assert options.engine == "my_engine:LLM" and of_engine["max_num_seqs"] == 3
