"""`/v1/responses`, asked by OpenAI's own client."""

from __future__ import annotations

from contextlib import closing
from typing import Literal

import pytest
from serving import CHAT, QUESTION, engine, running

from beyond.serving.protocol import RequestError
from beyond.serving.responses import ResponseEvents, as_chat, as_response
from stage_a_naive.sampling import SamplingParams

openai = pytest.importorskip("openai", reason="the client: pip install openai")
pydantic = pytest.importorskip("pydantic")

ASK = {"model": "tutor", "input": QUESTION, "max_output_tokens": 16, "temperature": 0, "store": False}

llm = engine(max_num_seqs=8, num_kvcache_blocks=256)


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    strict = {"_strict_response_validation": True}  # an answer that is not of the API's type is an error
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **strict) as client:
        yield client


def test_the_client_asks_and_streams(client, llm) -> None:
    [expected] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=16), False)
    whole = client.responses.create(**ASK)
    assert (whole.output_text, whole.status) == (expected["text"], "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(expected["prompt_token_ids"]), 16)
    events = list(client.responses.create(**ASK, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected["text"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert events[-1].response.output_text == expected["text"] and events[-1].response.usage.output_tokens == 16
    assert client.responses.create(**ASK | {"max_output_tokens": 500}).status == "completed"


def test_pydantic_ai_asks(server, llm, monkeypatch) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="the client: pip install pydantic-ai-slim[openai]")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    agent = pydantic_ai.Agent("openai:tutor", model_settings={"temperature": 0, "max_tokens": 16})
    [expected] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=16), False)
    assert agent.run_sync(QUESTION).output == expected["text"]


@pytest.mark.slow
def test_litellm_asks(server, llm, monkeypatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks for a list of prices
    litellm = pytest.importorskip("litellm", reason="the client: pip install litellm")
    [expected] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=16), False)
    ask = {"messages": CHAT, "temperature": 0, "max_tokens": 16, "api_key": "none", "num_retries": 0}
    for model, url in (("openai/tutor", f"{server.url}/v1"), ("anthropic/tutor", server.url)):
        answer = litellm.completion(model=model, api_base=url, **ask)
        assert answer.choices[0].message.content == expected["text"]


def test_a_conversation_with_instructions_is_that_chat(client, llm) -> None:
    thought = {"type": "reasoning", "id": "rea_1", "summary": []}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A cache."}]}
    turns = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}, thought, said, *CHAT]
    told = client.responses.create(**ASK | {"input": turns}, instructions="Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, *CHAT, {"role": "assistant", "content": "A cache."}, *CHAT]
    [expected] = llm.chat(chat, SamplingParams(temperature=0, max_tokens=16), False)
    assert told.output_text == expected["text"]


@pytest.mark.parametrize(
    "wrong", [{"store": True}, {"previous_response_id": "resp_1"}, {"conversation": "c"}, {"background": True}], ids=str
)
def test_what_would_have_to_be_stored_is_refused_by_name(client, wrong) -> None:
    with pytest.raises(openai.BadRequestError, match="is not supported here") as caught:
        client.responses.create(**ASK | wrong)
    assert caught.value.param == next(iter(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": 5},
        {"input": [5]},
        {"input": [{"role": "critic", "content": "x"}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"instructions": 5},
        {"text": 5},
        {"text": {"format": 5}},
        {"text": {"verbosity": "low"}},
        {"tools": [{"type": "function"}]},
    ],
    ids=str,
)
def test_what_a_chat_does_not_have_is_refused_by_name(wrong) -> None:
    with pytest.raises(RequestError) as caught:
        as_chat({"input": "x"} | wrong)
    assert caught.value.param == next(iter(wrong))


def test_a_form_of_the_text_is_that_of_the_chat() -> None:
    form = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
    chat = as_chat({"input": "x", "text": {"format": form}})
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert as_chat({"input": "x", "text": {"format": {"type": "text"}}})["response_format"] == {"type": "text"}


class Stage(pydantic.BaseModel):
    """A form for answers."""

    letter: Literal["A", "B", "C"]
    cached: bool


def test_clients_get_answers_of_the_form_that_they_ask_for() -> None:
    pytest.importorskip("llguidance", reason="constrained decoding: pip install llguidance")
    anthropic = pytest.importorskip("anthropic", reason="the client: pip install anthropic")
    from beyond import LLM

    with closing(LLM("tutor", device="cpu", num_kvcache_blocks=64)) as llm, running(llm) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            told = client.responses.parse(model="tutor", input=QUESTION, text_format=Stage)
        assert isinstance(told.output_parsed, Stage)
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            told = client.messages.parse(model="tutor", messages=CHAT, max_tokens=90, output_format=Stage)
        assert isinstance(told.parsed_output, Stage)


def chunk(finish_reason: str | None = None, **delta: str) -> dict:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return {"id": "chatcmpl-1", "created": 1, "model": "tutor", "choices": choices, "usage": usage}


def test_reasoning_is_an_item_of_its_own_in_front_of_the_message() -> None:
    message = {"content": "so", "reasoning": "why", "reasoning_content": "why"}
    whole = as_response({}, chunk() | {"choices": [{"message": message, "finish_reason": "stop"}]})
    translate = ResponseEvents({})
    chunks = [chunk(content="", reasoning="wh"), chunk(reasoning="y"), chunk(content="s"), chunk("stop", content="o")]
    told = [event for one in chunks for event in translate(one)]
    assert told[-1][0] == "response.completed" and told[-1][1]["response"]["output"] == whole["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in whole["output"]] == [
        ("reasoning", "why"),
        ("message", "so"),
    ]
    assert [name for name, _ in told if name.endswith(".delta")] == (
        ["response.reasoning_text.delta"] * 2 + ["response.output_text.delta"] * 2
    )


def test_an_answer_without_text_has_an_empty_message_and_an_error_ends_a_stream() -> None:
    translate = ResponseEvents({})
    *_, (name, event) = translate(chunk("length", content=""))
    assert name == "response.incomplete" and event["response"]["output"][0]["content"][0]["text"] == ""
    [(name, event)] = translate({"error": {"message": "the engine is gone", "code": None, "param": None}})
    assert (name, event["message"]) == ("error", "the engine is gone")
