"""`/v1/responses`, asked by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from serving import CHAT, QUESTION, engine, served

from beyond import LLM
from beyond.serving.protocol import RequestError
from beyond.serving.responses import ResponseEvents, as_chat, as_response
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.sampling import SamplingParams

openai = pytest.importorskip("openai", reason="the client: pip install openai")
pydantic = pytest.importorskip("pydantic")

ASK = {"model": "tutor", "input": QUESTION, "max_output_tokens": 16, "temperature": 0, "store": False}
TOOLS = [{"type": "function"} | tool["function"] for tool in json.loads((TUTOR_PATH / "tools.json").read_text())]
TIMES = [{"role": "user", "content": "What is 12 times 7?"}]
TOLD = "The calculator says 84."

llm = engine(LLM, max_num_seqs=8, num_kvcache_blocks=256)
server = served()


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


def test_the_client_gets_calls_and_an_answer_to_their_results(client) -> None:
    ask = ASK | {"input": TIMES, "max_output_tokens": 60, "tools": TOOLS}
    whole = client.responses.create(**ask)
    [call] = whole.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "calculator",
        {"expression": "12*7"},
    )
    assert (whole.status, [tool.name for tool in whole.tools]) == ("completed", ["calculator", "clock"])
    with client.responses.stream(
        **{name: value for name, value in ask.items() if name != "tools"}, tools=TOOLS
    ) as stream:
        events = list(stream)
        last = stream.get_final_response()
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 1 and "".join(pieces) == call.arguments == last.output[0].arguments
    assert [event.arguments for event in events if event.type == "response.function_call_arguments.done"] == [
        call.arguments
    ]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "84"}
    told = client.responses.create(**ask | {"input": [*TIMES, call.model_dump(), result]})
    assert told.output_text == TOLD
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.name must be"):
        client.responses.create(**ask | {"tools": [{"type": "function", "name": "two words"}]})
    with pytest.raises(openai.BadRequestError, match=r'"required" or {"type": "function", "name": …}, got'):
        client.responses.create(**ask, tool_choice={"type": "function"})


def test_the_choice_of_a_tool_is_the_chats(client) -> None:
    pytest.importorskip("llguidance", reason="constrained decoding: pip install llguidance")
    ask = ASK | {"max_output_tokens": 90, "tools": TOOLS}
    told = client.responses.create(**ask, tool_choice={"type": "function", "name": "clock"})
    assert [(item.name, list(json.loads(item.arguments))) for item in told.output] == [("clock", ["city"])]
    told = client.responses.create(**ask, tool_choice="required", parallel_tool_calls=False)
    assert [item.type for item in told.output] == ["function_call"] and told.parallel_tool_calls is False
    told = client.responses.create(**ask | {"input": TIMES}, tool_choice="none")
    assert [item.type for item in told.output] == ["message"] and told.tool_choice == "none"


def test_pydantic_ai_runs_tools(server, monkeypatch) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="the client: pip install pydantic-ai-slim[openai]")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def calculator(expression: str) -> str:
        """Work out an arithmetic expression."""
        return {"12*7": "84"}[expression]

    agent = pydantic_ai.Agent("openai:tutor", tools=[calculator], model_settings={"temperature": 0})
    assert agent.run_sync(TIMES[0]["content"]).output == TOLD


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
        {"input": [{"type": "function_call_output", "output": 5}]},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"instructions": 5},
        {"text": 5},
        {"text": {"format": 5}},
        {"text": {"verbosity": "low"}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [5]},
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


def test_clients_get_answers_of_the_form_that_they_ask_for(server, client) -> None:
    pytest.importorskip("llguidance", reason="constrained decoding: pip install llguidance")
    anthropic = pytest.importorskip("anthropic", reason="the client: pip install anthropic")
    told = client.responses.parse(model="tutor", input=QUESTION, text_format=Stage)
    assert isinstance(told.output_parsed, Stage)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        told = client.messages.parse(model="tutor", messages=CHAT, max_tokens=90, output_format=Stage)
    assert isinstance(told.parsed_output, Stage)


def chunk(finish_reason: str | None = None, **delta: object) -> dict:
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


def test_calls_and_their_results_are_part_of_the_conversation() -> None:
    said = {"role": "assistant", "content": "I ask."}
    calls = [{"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in ("1", "2")]
    result = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "84"}]}
    chat = as_chat({"input": [*CHAT, said, *calls, result, calls[1]], "tools": TOOLS, "parallel_tool_calls": False})
    called = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ("1", "2")]
    assert chat["messages"][1:] == [
        said | {"tool_calls": called},
        {"role": "tool", "tool_call_id": "1", "content": "84"},
        {"role": "assistant", "content": "", "tool_calls": called[1:]},
    ]
    assert chat["tools"] == json.loads((TUTOR_PATH / "tools.json").read_text()) and not chat["parallel_tool_calls"]


def test_calls_are_items_behind_the_message_in_whatever_pieces_they_come() -> None:
    def call(index: int, arguments: str) -> dict:
        function = {"name": "fgh"[index], "arguments": arguments}
        return {"index": index, "id": f"call_{index}", "type": "function", "function": function}

    def more(index: int, arguments: str) -> dict:
        return {"index": index, "function": {"arguments": arguments}}

    chunks = [
        chunk(content="So"),
        chunk(tool_calls=[call(0, "")]),
        chunk(tool_calls=[more(0, '{"n"')]),
        chunk(content="and", tool_calls=[more(0, ": 1}"), call(1, "{}"), call(2, "{")]),
        chunk("length", tool_calls=[more(2, '"m')]),
    ]
    translate = ResponseEvents({"tools": TOOLS})
    told = [event for one in chunks for event in translate(one)]
    assert told[-1][0] == "response.incomplete"
    items = told[-1][1]["response"]["output"]
    assert [(item.get("name"), item.get("arguments"), item["status"]) for item in items] == [
        (None, None, "completed"),
        ("f", '{"n": 1}', "completed"),
        (None, None, "completed"),
        ("g", "{}", "completed"),
        ("h", '{"m', "incomplete"),
    ]
    assert len({item["id"] for item in items}) == 5
    assert [event["item"] for name, event in told if name == "response.output_item.done"] == items
    deltas: dict[str, str] = {}
    for name, event in told:
        if name.endswith("arguments.delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert [deltas.get(item["id"]) for item in items] == [item.get("arguments") for item in items]
    message = {"content": "So", "tool_calls": [call(0, '{"m')]}
    whole = as_response({}, chunk() | {"choices": [{"message": message, "finish_reason": "length"}]})
    assert [(item["type"], item["status"]) for item in whole["output"]] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
