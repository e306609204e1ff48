"""`/v1/messages`, asked by Anthropic's own client."""

from __future__ import annotations

import json

import pytest
from serving import CHAT, QUESTION, engine, httpx, served

from beyond import LLM
from beyond.serving.messages import STOP_REASONS, MessageEvents, as_chat, as_message
from beyond.serving.protocol import RequestError
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.sampling import SamplingParams

anthropic = pytest.importorskip("anthropic", reason="the client: pip install anthropic")

KEY = "sk-a-key-for-tests"
GREEDY = {"temperature": 0}  # a field that newer clients have no argument for
ASK = {"model": "tutor", "messages": CHAT, "max_tokens": 12, "extra_body": GREEDY}
FUNCTIONS = [tool["function"] for tool in json.loads((TUTOR_PATH / "tools.json").read_text())]
TOOLS = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in FUNCTIONS
]
TIMES = [{"role": "user", "content": "What is 12 times 7?"}]
TOLD = "The calculator says 84."

llm = engine(LLM, max_num_seqs=8, num_kvcache_blocks=256)
server = served(api_key=KEY)


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
    whole = client.messages.create(**ASK | {"max_tokens": 500})
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)


def test_a_stop_sequence_that_ended_an_answer_is_told(client, llm, expected) -> None:
    stop = expected["text"][10:15]
    ask = ASK | {"stop_sequences": ["<|never|>", stop]}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        last = stream.get_final_message()
    for told in (whole, last):
        assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", stop)
        assert told.content[0].text == expected["text"].partition(stop)[0]
    whole = client.messages.create(**ASK | {"max_tokens": 500, "stop_sequences": [llm.tokenizer.eos_token]})
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)


def test_a_conversation_is_counted_as_it_is_asked(client, llm) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    told = client.messages.count_tokens(model="tutor", system=system, messages=CHAT)
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert told.input_tokens == len(llm.chat_prompts(chat)[0])
    usage = client.messages.create(**ASK, system=system).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == told.input_tokens


def test_the_client_raises_its_own_errors(server, client) -> None:
    nowhere = {"name": "clock", "input_schema": {"type": "object"}, "where": "here"}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\] has 'where'; a tool has name, .*, input_schema"):
        client.messages.create(**ASK, tools=[nowhere])
    with pytest.raises(anthropic.BadRequestError, match="tool_choice names 'map'; the tools are calculator, clock"):
        client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "tool", "name": "map"})
    with pytest.raises(anthropic.BadRequestError, match="temperature must be"):
        client.messages.create(**ASK | {"extra_body": {"temperature": -1}})
    with pytest.raises(anthropic.NotFoundError, match="tutor"):
        client.messages.create(**ASK | {"model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**ASK)
    response = httpx.post(f"{server.url}/v1/messages", json={}, headers={"x-api-key": KEY}, timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


def test_the_client_gets_calls_and_an_answer_to_their_results(client) -> None:
    ask = ASK | {"messages": TIMES, "max_tokens": 60, "tools": TOOLS}
    whole = client.messages.create(**ask)
    [call] = whole.content
    assert (call.type, call.name, call.input, whole.stop_reason) == (
        "tool_use",
        "calculator",
        {"expression": "12*7"},
        "tool_use",
    )
    with client.messages.stream(**ask) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        last = stream.get_final_message()
    assert len(pieces) > 1 and json.loads("".join(pieces)) == call.input == last.content[0].input
    assert (last.stop_reason, last.content[0].name) == ("tool_use", "calculator")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "84"}]}
    turns = [*TIMES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    told = client.messages.create(**ask | {"messages": turns})
    assert ([block.text for block in told.content], told.stop_reason) == ([TOLD], "end_turn")
    counted = client.messages.count_tokens(model="tutor", messages=turns, tools=TOOLS).input_tokens
    assert counted == told.usage.input_tokens + told.usage.cache_read_input_tokens


def test_the_choice_of_a_tool_is_the_chats(client) -> None:
    pytest.importorskip("llguidance", reason="constrained decoding: pip install llguidance")
    ask = ASK | {"max_tokens": 90, "tools": TOOLS}
    told = client.messages.create(**ask, tool_choice={"type": "tool", "name": "clock"})
    assert [(block.name, list(block.input)) for block in told.content] == [("clock", ["city"])]
    told = client.messages.create(**ask, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [block.type for block in told.content] == ["tool_use"]
    told = client.messages.create(**ask | {"messages": TIMES}, tool_choice={"type": "none"})
    assert [block.type for block in told.content] == ["text"]
    asked = {"model": "tutor", "messages": TIMES, "tools": TOOLS, "tool_choice": {"type": "none"}}
    bare = client.messages.count_tokens(model="tutor", messages=TIMES).input_tokens
    assert client.messages.count_tokens(**asked).input_tokens == bare


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


def test_results_of_tools_are_messages_and_calls_part_of_one() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"n": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "84"},
        {"type": "tool_result", "tool_use_id": "2"},
    ]
    turns = [
        *CHAT,
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "user", "content": [*results, {"type": "text", "text": "so?"}]},
    ]
    tool = {"type": "custom", "name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}, "strict": True}
    chat = chat_of(messages=turns, tools=[tool], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert chat["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "84"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": "so?"},
    ]
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("auto", False)


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
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "{}"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 84}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": ["clock"]},
        {"tool_choice": "any"},
        {"tool_choice": {"type": "tool"}},
        {"tool_choice": {"type": ["any"]}},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
        {"mcp_servers": [{}]},
    ],
    ids=str,
)
def test_what_a_chat_does_not_have_is_refused_by_name(wrong) -> None:
    with pytest.raises(RequestError) as caught:
        chat_of(**wrong)
    assert caught.value.param == next(iter(wrong))


def chunk(finish_reason: str | None = None, **delta: object) -> dict:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason, "stop_reason": None}]
    return {"id": "chatcmpl-1", "model": "tutor", "choices": choices, "usage": usage}


def test_reasoning_is_a_block_of_its_own_in_front_of_the_text() -> None:
    message = {"content": "so", "reasoning": "why", "reasoning_content": "why"}
    answer = chunk() | {"choices": [{"message": message, "finish_reason": "stop", "stop_reason": None}]}
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


def call(index: int, name: str, arguments: str = "") -> dict:
    """The beginning of a call in a stream, or all of one."""
    return {
        "index": index,
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def more(index: int, arguments: str) -> dict:
    return {"index": index, "function": {"arguments": arguments}}


def test_calls_are_blocks_behind_the_text_in_whatever_pieces_they_come() -> None:
    chunks = [
        chunk(content="So"),
        chunk(tool_calls=[call(0, "f")]),
        chunk(tool_calls=[more(0, '{"n"')]),
        chunk(content="and", tool_calls=[more(0, ": 1}"), call(1, "g", "{}"), call(2, "h", "{")]),
        chunk("tool_calls", tool_calls=[more(2, "}")]),
    ]
    translate = MessageEvents()
    told = [event for one in chunks for event in translate(one)]
    blocks = [event["content_block"] for name, event in told if name == "content_block_start"]
    assert [block.get("name", block["type"]) for block in blocks] == ["text", "f", "text", "g", "h"]
    inputs = [""] * len(blocks)
    for name, event in told:
        if name == "content_block_delta":
            inputs[event["index"]] += event["delta"].get("partial_json", "")
    assert inputs == ["", '{"n": 1}', "", "{}", "{}"]
    assert [event["index"] for name, event in told if name == "content_block_stop"] == list(range(5))
    assert [event["delta"]["stop_reason"] for name, event in told if name == "message_delta"] == ["tool_use"]


@pytest.mark.parametrize(
    ("arguments", "reason", "read"),
    [('{"n": 1, "m": "a', "length", {"n": 1}), ('{"n', "stop", {}), ("{n: 1}", "tool_calls", None)],
)
def test_arguments_that_were_cut_are_told_as_far_as_they_came_and_others_that_cannot_be_read_are_an_error(
    arguments, reason, read
) -> None:
    message = {"content": None, "tool_calls": [call(0, "f", arguments)]}
    answer = chunk() | {"choices": [{"message": message, "finish_reason": reason, "stop_reason": None}]}
    *_, (name, event) = MessageEvents()(chunk(reason, tool_calls=[call(0, "f", arguments)]))
    if read is not None:
        told = as_message(answer)
        assert (told["content"][0]["input"], told["stop_reason"], name) == (read, STOP_REASONS[reason], "message_stop")
        return
    with pytest.raises(RequestError, match="the model called f with arguments that are no JSON") as caught:
        as_message(answer)
    assert caught.value.code == "form_failed"
    assert (name, event["error"]["message"]) == ("error", str(caught.value))
