"""Tools of a chat: which calls the server finds in an answer, which it makes certain, and the agent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import engine, httpx, messages, running, served
from tokenizers import AddedToken
from transformers import AutoTokenizer

from beyond import LLM
from beyond.serving.tool_calls import CallParser, error_in_calls
from beyond.serving.tools import HERMES, LLAMA3_JSON, parse_tools, tool_format, write_grammar
from stage_a_naive import SamplingParams
from stage_a_naive.chat import for_template
from stage_a_naive.checkpoints.tutor import TUTOR_PATH

pytest.importorskip("llguidance")

ROOT = Path(__file__).resolve().parent.parent
CHATS = "/v1/chat/completions"
TOOLS = json.loads((TUTOR_PATH / "tools.json").read_text())
STRICT = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]
TIMES = [{"role": "user", "content": "What is 12 times 7?"}]
CACHE = [{"role": "user", "content": "What is a KV cache?"}]
CALL = ("calculator", {"expression": "12*7"})
CLOCK = {"type": "function", "function": {"name": "clock"}}


def changed(**fields: object) -> list[dict]:
    """The tools, the second with other fields."""
    return [TOOLS[0], TOOLS[1] | {"function": TOOLS[1]["function"] | fields}]


# ---- calls in a text ------------------------------------------------------------------------------------------------

ARGUMENTS = '{"a": "}\\"{", "b": [{}, 1]}'
H = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
L = f'{{"name": "f", "parameters": {ARGUMENTS}}}'
TEXTS = [  # format, text, content, number of calls
    (HERMES, "A cache. ", "A cache. ", 0),
    (HERMES, H, "", 1),
    (HERMES, f"So:\n{H}\n{H}\n", "So:", 2),
    (HERMES, "a <tool_ b <tool_call", "a <tool_ b <tool_call", 0),
    (HERMES, f"<tool_call>no</tool_call> but\n{H}", "<tool_call>no</tool_call> but", 1),
    (HERMES, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', 0),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
        0,
    ),
    (HERMES, L, L, 0),
    (LLAMA3_JSON, " A cache {", " A cache {", 0),
    (LLAMA3_JSON, L, "", 1),
    (LLAMA3_JSON, f" {L}; {L}", "", 2),
    (LLAMA3_JSON, f"So: {L}", f"So: {L}", 0),
    (LLAMA3_JSON, '{"answer": 1}', '{"answer": 1}', 0),
]


def read(form, text: str, cuts: list[int], several: bool = True) -> tuple[str, list[str]]:
    """What a client puts together of a text that comes in pieces: its content, and the arguments of its calls."""
    parser, content, calls = CallParser(form, several), "", []
    places = [0, *sorted(cuts), len(text)]
    for start, end in zip(places, places[1:], strict=False):
        delta = parser.feed(text[start:end], ends=end == len(text) and start == places[-2])
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function" and call["id"] and call["function"]["name"] == "f"
                calls.append("")
            calls[call["index"]] += call["function"]["arguments"]
    assert len(calls) == parser.num_calls
    return content, calls


@pytest.mark.fast
@pytest.mark.parametrize(("form", "text", "content", "num_calls"), TEXTS)
def test_calls_are_found_in_a_text_however_it_is_cut(form, text, content, num_calls):
    expected = content, [ARGUMENTS] * num_calls
    assert read(form, text, []) == expected
    assert read(form, text, list(range(1, len(text)))) == expected
    assert all(read(form, text, [at]) == expected for at in range(len(text)))


@pytest.mark.fast
@given(st.text('<tool_call>/{}"\\name:,argumentsp \n'))
def test_any_text_is_read_alike_whole_and_in_pieces(text):
    for form in (HERMES, LLAMA3_JSON):
        assert read(form, text, []) == read(form, text, list(range(1, len(text))))


@pytest.mark.fast
def test_arguments_are_told_as_they_come_and_an_answer_that_is_cut_has_what_came():
    assert read(HERMES, H[: H.index("[")], []) == ("", [ARGUMENTS[: ARGUMENTS.index("[")]])
    parser = CallParser(HERMES)
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    assert parser.feed('{"a"')["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a"'}
    assert parser.feed(": 1") == {"tool_calls": [{"index": 0, "function": {"arguments": ": 1"}}]}


@pytest.mark.fast
def test_without_parallel_calls_the_first_is_told_and_no_other():
    assert read(HERMES, f"{H}\n{H}", [], several=False) == ("", [ARGUMENTS])


# ---- what a request may ask for -------------------------------------------------------------------------------------


@pytest.mark.fast
def test_the_format_is_that_of_the_chat_template():
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    assert tool_format(tokenizer) == HERMES
    tokenizer.chat_template = '{{ tools }}{"name": function name, "parameters": dictionary}'
    assert tool_format(tokenizer) == LLAMA3_JSON and tool_format(tokenizer, "hermes") == HERMES
    tokenizer.chat_template = '{{ tools }}<tool_call> "parameters"'
    assert tool_format(tokenizer) == HERMES
    tokenizer.chat_template = "{{ messages }}"
    assert tool_format(tokenizer) is None
    assert parse_tools({"tools": TOOLS, "tool_choice": "none"}, None) is None
    with pytest.raises(ValueError, match="tools are unknown to the model's chat template"):
        parse_tools({"tools": TOOLS}, None)


@pytest.mark.fast
def test_with_auto_the_arguments_of_strict_tools_alone_are_constrained():
    assert parse_tools({"tools": TOOLS}, HERMES).grammar is None
    mixed = parse_tools({"tools": [STRICT[0], TOOLS[1]]}, HERMES)
    assert list(mixed.schemas[0]["properties"]) == ["expression"] and mixed.schemas[1] == {"type": "object"}
    assert parse_tools({"tools": TOOLS, "tool_choice": CLOCK}, HERMES).schemas.keys() == {1}


def accepts(tokenizer: object, grammar: str, text: str) -> bool:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    state = LLMatcher(from_tokenizer(tokenizer, None, [2]), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not state.is_error(), state.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


X = {
    "x": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
}
HERMES_X = '<tool_call>\n{"name": "x", "arguments": {"n": 1}}\n</tool_call>'
LLAMA_X = '{"name": "x", "parameters": {"n": 1}}'


@pytest.mark.parametrize("tags", ["text", "tokens"])
@pytest.mark.parametrize(("form", "call"), [(HERMES, HERMES_X), (LLAMA3_JSON, LLAMA_X)], ids=["hermes", "llama3_json"])
def test_a_grammar_allows_calls_by_the_schema_and_text_only_where_it_may_come(form, call, tags):
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    if tags == "tokens" and form is HERMES:  # as in Qwen2.5
        tags = (form.opening, "<think>", "</think>", form.closing)
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
        form = tool_format(tokenizer)
        assert len(form.token_ids) == 2 and len(form.marks) == 2
    wrong, two = call.replace("1", '"1"'), call + form.between + call
    must = write_grammar(X, form, must_call=True, several=True)
    assert [accepts(tokenizer, must, text) for text in (call, two, wrong, "No.")] == [True, True, False, False]
    one = write_grammar(X, form, must_call=True, several=False)
    assert [accepts(tokenizer, one, text) for text in (call, two)] == [True, False]
    may = write_grammar(X, form, must_call=False, several=True)
    assert [accepts(tokenizer, may, text) for text in (call, two, wrong, "No.")] == [True, True, False, True]
    if form.opening:
        assert accepts(tokenizer, may, f"<think>\nI ask.</think>{call}") and accepts(
            tokenizer, may, "<think>So</think>."
        )
        assert accepts(tokenizer, may, f"I ask.\n{call}") and not accepts(tokenizer, may, f"I ask.\n{wrong}")


WRONG = [
    ({"tools": {}}, "tools must be a list of at most 128"),
    ({"tools": TOOLS * 65}, "tools must be a list of at most 128"),
    ({"tools": [{"type": "search"}]}, "tools[0] must be"),
    ({"tools": changed(name="two words")}, "tools[1].function.name must be"),
    ({"tools": changed(name=None)}, "tools[1].function.name must be"),
    ({"tools": changed(name="calculator")}, "tools[1].function.name 'calculator' is that of tools[0]"),
    ({"tools": changed(description=1)}, "tools[1].function.description must be"),
    ({"tools": changed(parameters=[])}, "tools[1].function.parameters must be"),
    ({"tools": changed(strict="yes")}, "tools[1].function.strict must be"),
    ({"tools": changed(returns={})}, "tools[1].function has 'returns'"),
    ({"tools": changed(parameters={"type": "string"}, strict=True)}, "tools[1].function.parameters/type must be"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice names 'x'"),
    ({"tool_choice": "required"}, "tool_choice is 'required', but there are no tools"),
    ({"tools": [], "tool_choice": CLOCK}, "tool_choice is {"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls must be"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format cannot be combined with tools"),
    ({"tools": TOOLS, "chat_template_kwargs": {"tools": TOOLS}}, "tools and chat_template_kwargs both have tools"),
    ({"functions": [{"name": "x"}]}, "'functions' is not supported"),
]
WRONG_CALLS = [
    ("x", "messages[1].tool_calls must be"),
    ([1], "messages[1].tool_calls[0] must be"),
    ([{"function": {"name": "f", "arguments": "{"}}], "messages[1].tool_calls[0].function.arguments must be"),
    ([{"function": {"name": "f", "arguments": "[]"}}], "messages[1].tool_calls[0].function.arguments must be"),
]


llm = engine(LLM)
server = served()


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def refused(client, **body: object) -> dict:
    response = client.post(CHATS, json={"messages": TIMES} | body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(("body", "says"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_with_a_tool_is_said_by_its_place(client, body, says):
    error = refused(client, **body)
    assert error["message"].startswith(says)
    assert error["param"] == says.strip("'").split("[")[0].split()[0].strip("'")


@pytest.mark.parametrize(("calls", "says"), WRONG_CALLS, ids=lambda value: str(value)[:60])
def test_what_is_wrong_with_the_calls_of_a_message_is_said_by_their_place(client, calls, says):
    error = refused(client, messages=[*TIMES, {"role": "assistant", "content": None, "tool_calls": calls}])
    assert error["message"].startswith(says) and error["param"] == "messages"


NOT = {"type": "object", "properties": {"city": {"anyOf": [{"type": "string"}, {"not": {}}]}}}
ITSELF = {"type": "object", "$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"city": {"$ref": "#/$defs/a"}}}
PATTERN = {"type": "object", "properties": {"city": {"type": "string", "pattern": "("}}}
IMPOSSIBLE = {"type": "object", "properties": {"city": {"enum": []}}, "required": ["city"]}
UNANSWERABLE = [
    (NOT, 'tools[1].function.parameters/properties/city/anyOf/1 cannot be compiled: Unimplemented keys: ["not"]'),
    (IMPOSSIBLE, "tools[1].function.parameters cannot be compiled"),
    (PATTERN, "tools[1].function.parameters/properties/city cannot be compiled"),
]


@pytest.mark.parametrize(("schema", "says"), UNANSWERABLE, ids=["not supported", "impossible", "no pattern"])
def test_a_schema_that_cannot_be_had_is_refused_for_its_request_alone(client, schema, says):
    error = refused(client, tools=changed(parameters=schema), tool_choice=CLOCK)
    assert error["message"].startswith(says) and error["param"] == "tools"
    assert called(client, tools=TOOLS) == ([CALL], None, "tool_calls")


def test_a_schema_that_never_ends_is_refused_with_its_place(client):
    error = refused(client, tools=changed(parameters=ITSELF), tool_choice=CLOCK, temperature=0)
    place = "tools[1].function.parameters/$defs/a"
    assert error["message"].startswith(f"{place} cannot be compiled: it cannot be satisfied")
    assert called(client, tools=TOOLS) == ([CALL], None, "tool_calls")


# ---- answers --------------------------------------------------------------------------------------------------------


def called(client, chat: list = TIMES, **body: object) -> tuple[list[tuple[str, dict]], str | None, str]:
    response = client.post(CHATS, json={"messages": chat, "temperature": 0, "max_tokens": 100} | body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    read = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return read, choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["free", "strict"])
def test_with_auto_the_model_calls_a_tool_or_answers(client, tools):
    assert called(client, tools=tools) == ([CALL], None, "tool_calls")
    calls, text, reason = called(client, CACHE, tools=tools, max_tokens=400)
    assert (calls, reason) == ([], "stop") and text == called(client, CACHE, max_tokens=400)[1]


def test_with_none_the_model_knows_of_no_tool(client):
    assert called(client, tools=TOOLS, tool_choice="none") == called(client)


ARGUMENT_OF = {"calculator": ["expression"], "clock": ["city"]}


def test_a_call_that_is_required_or_named_comes_and_fits_its_schema(client):
    for parallel in (True, False):
        calls, _, reason = called(client, CACHE, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        assert reason == "tool_calls" and calls and (parallel or len(calls) == 1)
        assert all(list(arguments) == ARGUMENT_OF[name] for name, arguments in calls)
    bounded = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    [(name, arguments)], *_ = called(client, TIMES, tools=changed(parameters=bounded), tool_choice=CLOCK)
    assert name == "clock" and arguments in ({"city": "Oslo"}, {"city": "Rome"})
    assert called(client, TIMES, tools=changed(parameters=None), tool_choice=CLOCK)[0] == [("clock", {})]


def test_a_call_that_is_cut_says_so(client):
    response = client.post(CHATS, json={"messages": TIMES, "temperature": 0, "max_tokens": 40, "tools": TOOLS})
    [choice] = response.json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and call["function"]["arguments"].startswith('{"expression')
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    ask = {"messages": TIMES, "temperature": 0, "max_tokens": 100, "tools": TOOLS, "stop": "12"}
    [choice] = client.post(CHATS, json=ask).json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["tool_calls"]


UNIQUE = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3, "uniqueItems": True}
TWICE = {"type": "object", "properties": {"city": UNIQUE}, "required": ["city"]}  # no grammar can count what came


def test_constrained_arguments_that_do_not_match_their_schema_are_an_error(client):
    ask = {"messages": TIMES, "temperature": 0, "max_tokens": 100, "tools": changed(parameters=TWICE)}
    forced = ask | {"tool_choice": CLOCK}
    error = refused(client, **forced)
    assert (error["code"], error["param"]) == ("form_failed", "tools")
    assert error["message"].startswith("tools: the arguments of the call of clock do not match tools[1] ($.city: [")
    events = [
        json.loads(line[6:]) for line in client.post(CHATS, json=forced | {"stream": True}).text.split("\n\n")[:-2]
    ]
    assert events[-1] == {"error": error}
    assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])
    several = [
        choice
        for event in messages(client.post(CHATS, json=forced | {"stream": True, "n": 2}).text)[:-1]
        for choice in event.get("choices", ())
    ]
    assert [choice["error"] for choice in several if choice["finish_reason"] == "error"] == [error] * 2
    assert called(client, tools=changed(parameters=TWICE)) == ([CALL], None, "tool_calls"), "it is not constrained"
    cut = refused(client, **ask | {"tools": STRICT, "stop": "12"})
    assert cut["code"] == "form_failed"


@pytest.mark.fast
def test_calls_are_checked_by_the_schemas_that_constrained_them():
    tools = parse_tools({"tools": [STRICT[0], changed(parameters=TWICE)[1]]}, HERMES)
    text = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert error_in_calls(tools, "no call") is None
    assert error_in_calls(tools, text % ("calculator", '{"expression": "1"}')) is None
    assert error_in_calls(tools, text % ("clock", '{"city": ["a", "a"]}')) is None, "only strict tools are constrained"
    for name, arguments, says in (
        ("calculator", '{"expression": 1}', r"calculator do not match tools\[0\] \(\$.expression: 1 is not of type"),
        ("calculator", '{"expression": "1", "more": 1}', "Additional properties"),
        ("calculator", "{1}", "JSONDecodeError"),
        ("map", "{}", "the model called map, which it must not"),
    ):
        assert re.search(says, str(error_in_calls(tools, f"So: {text % ('clock', '{}')}\n{text % (name, arguments)}")))
    begun = '<tool_call>\n{"name": "clock", "arguments": {"city'
    assert "the call of clock is not complete" in str(error_in_calls(tools, begun))


def test_a_stream_tells_the_name_first_and_then_arguments_piece_by_piece(client):
    ask = {"messages": TIMES, "temperature": 0, "max_tokens": 100, "tools": TOOLS, "n": 2, "stream": True}
    *chunks, usage = messages(client.post(CHATS, json=ask | {"stream_options": {"include_usage": True}}).text)
    for index in range(2):
        told = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert told[0]["delta"] == {"role": "assistant"}
        pieces = [call for choice in told for call in choice["delta"].get("tool_calls", ())]
        first, *others = pieces
        assert first["function"]["name"] == "calculator" and first["id"] and len(others) > 5
        assert all(set(piece) == {"index", "function"} for piece in others)
        assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == CALL[1]
        assert [choice["finish_reason"] for choice in told if choice["finish_reason"]] == ["tool_calls"]
        assert not any("content" in choice["delta"] for choice in told)
    assert len(chunks) == usage["usage"]["completion_tokens"]


def test_a_caller_of_the_engine_puts_tools_into_the_prompt_himself(server):
    params = SamplingParams(temperature=0, max_tokens=100)
    [output] = server.llm.llm.chat(TIMES, params, False, chat_template_kwargs={"tools": TOOLS})
    assert output["text"].startswith('<tool_call>\n{"name": "calculator"')


def test_what_a_tool_returned_is_answered(client, server):
    response = client.post(CHATS, json={"messages": TIMES, "temperature": 0, "max_tokens": 100, "tools": TOOLS}).json()
    message = response["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "84"}
    calls, text, reason = called(client, [*TIMES, message, result], tools=TOOLS)
    assert (calls, text, reason) == ([], "The calculator says 84.", "stop")
    without = {name: value for name, value in message.items() if name != "content"}
    assert for_template([without]) == for_template([message])
    ids = client.post("/tokenize", json={"messages": [*TIMES, message, result]}).json()["tokens"]
    assert '"arguments": {"expression": "12*7"}' in server.llm.llm.tokenizer.decode(ids)


def test_an_engine_without_constrained_decoding_finds_calls_and_refuses_to_make_them_certain():
    from stage_e_batching import LLM as Plain

    with running(Plain("tutor", device="cpu")) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        assert called(client, tools=TOOLS) == ([CALL], None, "tool_calls")
        error = refused(client, tools=TOOLS, tool_choice="required")
        assert "cannot constrain answers" in error["message"] and error["param"] == "tools"


def test_the_llama_format_is_used_where_the_server_is_told_so(server):
    other = running(server.llm.llm, tool_call_parser="llama3_json")
    with other as server, httpx.Client(base_url=server.url, timeout=120) as client:
        [(name, _)], text, reason = called(client, tools=TOOLS, tool_choice=CLOCK)
        assert (name, text, reason) == ("clock", None, "tool_calls")
        calls, text, _ = called(client, tools=TOOLS)
        assert calls == [] and text.startswith("<tool_call>")


# ---- an agent -------------------------------------------------------------------------------------------------------


def agent(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "beyond/serving/examples/agent.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_agent_runs_the_tools_that_the_model_calls_and_answers(server):
    pytest.importorskip("openai", reason="the client: pip install openai")
    questions = "What is 12 times 7?", "What time is it in Paris?", "What is 13*5?", CACHE[0]["content"]
    done = agent("--url", f"{server.url}/v1", *questions)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:6] == [
        questions[0],
        '  calculator {"expression": "12*7"}: 84',
        "  The calculator says 84.",
        questions[1],
        '  clock {"city": "Paris"}: 14:05',
        "  It is 14:05 in Paris.",
    ]
    assert lines[-2] == questions[3] and lines[-1].startswith("  A KV cache keeps")


def test_the_agent_says_where_it_found_no_server():
    pytest.importorskip("openai", reason="the client: pip install openai")
    done = agent("--url", "http://127.0.0.1:1/v1", "What is 12 times 7?")
    assert done.returncode == 1 and "at http://127.0.0.1:1/v1?" in done.stderr and "Traceback" not in done.stderr
