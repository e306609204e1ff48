"""`/v1/messages`, asked by Anthropic's own client."""

from __future__ import annotations

import pytest
from serving import CHAT, QUESTION, engine, httpx, running

from beyond.serving.messages import MessageEvents, as_chat, as_message
from beyond.serving.protocol import RequestError
from stage_a_naive.sampling import SamplingParams

anthropic = pytest.importorskip("anthropic", reason="the client: pip install anthropic")

KEY = "sk-a-key-for-tests"
GREEDY = {"temperature": 0}  # a field that newer clients have no argument for
ASK = {"model": "tutor", "messages": CHAT, "max_tokens": 12, "extra_body": GREEDY}

llm = engine(max_num_seqs=8, num_kvcache_blocks=256)


@pytest.fixture(scope="module")
def server(llm):
    with running(llm, api_key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(llm) -> dict:
    return llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=12), False)[0]


def test_the_client_asks_and_streams(client, expected) -> None:
    whole = client.messages.create(**ASK)
    assert [block.text for block in whole.content] == [expected["text"]]
    assert (whole.stop_reason, whole.role, whole.model) == ("max_tokens", "assistant", "tutor")
    length = len(expected["prompt_token_ids"])
    assert whole.usage.output_tokens == 12
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == length
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == expected["text"]
        last = stream.get_final_message()
    assert (last.content[0].text, last.stop_reason, last.usage.output_tokens) == (expected["text"], "max_tokens", 12)
    assert last.usage.input_tokens == length
    assert client.messages.create(**ASK | {"max_tokens": 500}).stop_reason == "end_turn"


def test_a_conversation_is_counted_as_it_is_asked(client, llm) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    told = client.messages.count_tokens(model="tutor", system=system, messages=CHAT)
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert told.input_tokens == len(llm.chat_prompts(chat)[0])
    usage = client.messages.create(**ASK, system=system).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == told.input_tokens


def test_the_client_raises_its_own_errors(server, client) -> None:
    with pytest.raises(anthropic.BadRequestError, match="'tools' is not supported"):
        client.messages.create(**ASK, tools=[{"name": "clock", "input_schema": {"type": "object"}}])
    with pytest.raises(anthropic.BadRequestError, match="temperature must be"):
        client.messages.create(**ASK | {"extra_body": {"temperature": -1}})
    with pytest.raises(anthropic.NotFoundError, match="tutor"):
        client.messages.create(**ASK | {"model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**ASK)
    response = httpx.post(f"{server.url}/v1/messages", json={}, headers={"x-api-key": KEY}, timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


def chat_of(**given: object) -> dict:
    return as_chat({"messages": CHAT, "max_tokens": 5} | given)


def test_fields_become_those_of_a_chat() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    chat = chat_of(stop_sequences=["x"], top_k=3, metadata={"user_id": "me"}, output_config={"format": form})
    assert chat["stop"] == ["x"] and chat["top_k"] == 3
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    thought = [{"type": "thinking", "thinking": "why", "signature": ""}, {"type": "text", "text": "so"}]
    turns = [*CHAT, {"role": "assistant", "content": thought}, *CHAT]
    assert chat_of(messages=turns, thinking={"type": "disabled"})["messages"] == [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": QUESTION},
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"effort": "low"}},
        {"output_config": {"format": {"type": "json_object"}}},
        {"system": 5},
        {"messages": "hello"},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user"}]},
        {"mcp_servers": [{}]},
    ],
    ids=str,
)
def test_what_a_chat_does_not_have_is_refused_by_name(wrong) -> None:
    with pytest.raises(RequestError) as caught:
        chat_of(**wrong)
    assert caught.value.param == next(iter(wrong))


def chunk(finish_reason: str | None = None, **delta: str) -> dict:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return {"id": "chatcmpl-1", "model": "tutor", "choices": choices, "usage": usage}


def test_reasoning_is_a_block_of_its_own_in_front_of_the_text() -> None:
    message = {"content": "so", "reasoning": "why", "reasoning_content": "why"}
    answer = chunk() | {"choices": [{"message": message, "finish_reason": "stop"}]}
    assert [(block["type"], block[block["type"]]) for block in as_message(answer)["content"]] == [
        ("thinking", "why"),
        ("text", "so"),
    ]
    translate = MessageEvents()
    chunks = [chunk(content="", reasoning="wh"), chunk(reasoning="y"), chunk(content="s"), chunk("stop", content="o")]
    told = [event for one in chunks for event in translate(one)]
    assert [name.removeprefix("content_block_") for name, _ in told] == (
        ["message_start", "start", "delta", "delta", "stop", "start", "delta", "delta", "stop"]
        + ["message_delta", "message_stop"]
    )
    assert [
        event["delta"].get("thinking") or event["delta"].get("text") for name, event in told if "block_delta" in name
    ] == [
        "wh",
        "y",
        "s",
        "o",
    ]
    assert [event["index"] for name, event in told if "index" in event] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_an_answer_without_text_has_an_empty_block_and_an_error_ends_a_stream() -> None:
    translate = MessageEvents()
    told = list(translate(chunk("length", content="")))
    assert [name for name, _ in told][1:3] == ["content_block_start", "content_block_stop"]
    [(name, event)] = translate({"error": {"message": "the engine is gone"}})
    assert (name, event["error"]["message"]) == ("error", "the engine is gone")
