"""The API: what it answers is what the engine answers; what it does not support it refuses by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette", reason="the server of beyond/serving: pip install -e .[serve]")
pytest.importorskip("uvicorn", reason="the server of beyond/serving: pip install -e .[serve]")

from serving import assert_idle, running  # noqa: E402

import stage_e_batching  # noqa: E402
from beyond.serving.answers import Answer, bytes_of, text_of  # noqa: E402
from beyond.serving.defaults import in_words, sampling_defaults  # noqa: E402
from beyond.serving.event_stream import EventStream  # noqa: E402
from beyond.serving.protocol import Limits, parse_chat, parse_completion  # noqa: E402
from stage_a_naive.errors import ModelError  # noqa: E402
from stage_a_naive.sampling import SamplingParams  # noqa: E402
from stage_e_batching.mailbox import Event, Token  # noqa: E402

QUESTION = "What is a KV cache?"
CHAT = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm():
    llm = stage_e_batching.LLM("tutor", device="cpu", max_num_seqs=8, max_num_batched_tokens=64, num_kvcache_blocks=256)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def server(llm):
    with running(llm, limits=Limits(body_bytes=40_000), max_queue=8) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_stays_behind(llm):
    yield
    assert_idle(llm)


def post(client, path: str, **body: object) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client, path: str, **body: object) -> list[dict]:
    """The messages of a stream, without the `[DONE]` that must end it."""
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"  # a proxy is asked to pass events on as they come
    *messages, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(message.removeprefix("data: ")) for message in messages]


def refused(client, path: str, status: int = 400, **body: object) -> dict:
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == status and set(error) == {"message", "type", "param", "code"}, response.text
    assert "\n" not in error["message"]
    return error


def test_a_completion_is_the_engines(client, llm):
    [expected] = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=12), False)
    answer = post(client, "/v1/completions", model="tutor", prompt=QUESTION, **GREEDY)
    [choice] = answer["choices"]
    assert answer["object"] == "text_completion" and answer["model"] == "tutor"
    assert (choice["text"], choice["finish_reason"]) == (expected["text"], expected["finish_reason"])
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == len(expected["prompt_token_ids"])


def test_a_completion_has_16_tokens_and_a_chat_as_many_as_the_model_allows_if_nothing_is_said(client, llm):
    ask = {"ignore_eos": True, "temperature": 0}
    usage = post(client, "/v1/completions", prompt=QUESTION, **ask)["usage"]
    assert usage["completion_tokens"] == 16
    assert parse_chat({"messages": CHAT}, Limits(), llm.max_model_len).params.max_tokens == llm.max_model_len


def test_prompts_come_as_texts_as_token_ids_and_as_lists_of_them(client, llm):
    ids = llm.tokenizer.encode(QUESTION)
    one = post(client, "/v1/completions", prompt=QUESTION, **GREEDY)["choices"][0]["text"]
    for prompt, count in ((ids, 1), ([QUESTION, QUESTION], 2), ([ids, ids, ids], 3)):
        choices = post(client, "/v1/completions", prompt=prompt, **GREEDY)["choices"]
        assert [(c["index"], c["text"]) for c in choices] == [(i, one) for i in range(count)]


@pytest.mark.parametrize("empty", ["", []], ids=["text", "parts"])
def test_a_message_may_be_empty(client, llm, empty):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "system", "content": empty}, *CHAT]
    [expected] = llm.chat([{"role": "system", "content": ""}, *CHAT], greedy, False)
    answer = post(client, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=8)
    assert answer["choices"][0]["message"]["content"] == expected["text"]


@pytest.mark.parametrize("content", [QUESTION, [{"type": "text", "text": QUESTION}]], ids=["text", "parts"])
def test_a_chat_goes_through_the_models_template(client, llm, content):
    [expected] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=400), False)
    answer = post(client, "/v1/chat/completions", messages=[{"role": "user", "content": content}], temperature=0)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected["text"]}
    assert (choice["finish_reason"], expected["finish_reason"]) == ("stop", "stop")
    limited = post(client, "/v1/chat/completions", messages=CHAT, temperature=0, max_completion_tokens=3)
    assert limited["usage"]["completion_tokens"] == 3 and limited["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("logprobs", [True, False])
def test_a_stream_has_one_event_per_token_also_for_one_without_text(client, path, logprobs):
    is_chat = "chat" in path
    ask = {"messages": CHAT} if is_chat else {"prompt": QUESTION}
    ask |= {"temperature": 0, "max_tokens": 20, "stop": "the key and values"}
    ask |= {"logprobs": True if is_chat else 1} if logprobs else {}
    whole = post(client, path, **ask)
    *tokens, usage = events(client, path, stream_options={"include_usage": True}, **ask)
    choices = [message["choices"][0] for message in tokens]
    pieces = [choice["delta"]["content"] if is_chat else choice["text"] for choice in choices]
    assert len(tokens) == usage["usage"]["completion_tokens"] == 20 and usage["choices"] == []
    assert "" in pieces  # a possible start of the stop string is held back
    assert "".join(pieces) == (whole["choices"][0]["message"]["content"] if is_chat else whole["choices"][0]["text"])
    assert [choice["finish_reason"] for choice in choices] == [None] * 19 + ["length"]
    assert all(message["usage"] is None and message["id"] == usage["id"] for message in tokens)
    if is_chat:
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * 19
    if not logprobs:
        assert [choice["logprobs"] for choice in choices] == [None] * 20
    elif is_chat:
        assert [c["logprobs"]["content"] for c in choices] == [[x] for x in whole["choices"][0]["logprobs"]["content"]]
    else:
        for name, values in whole["choices"][0]["logprobs"].items():
            assert [choice["logprobs"][name] for choice in choices] == [[value] for value in values]


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@pytest.mark.parametrize("logprobs", [True, False])
def test_an_end_that_comes_after_its_last_token_is_told_too(llm, parse, logprobs):
    """As it may where another thread of the program runs the steps; else it comes with the last token."""
    [request], [output] = llm.requests([QUESTION]), llm.generate([QUESTION], SamplingParams(max_tokens=1), False)
    if parse is parse_completion:
        ask = parse({"prompt": QUESTION, "logprobs": 1 if logprobs else None}, Limits())
    else:
        ask = parse({"messages": CHAT, "logprobs": logprobs}, Limits(), 64)
    stream = EventStream(None, Answer(ask, "tutor", llm.tokenizer), include_usage=False)
    token = Token(5, "x", {5: -0.5})

    def told(*events: Event) -> list[dict]:
        frames = stream._frames([(request, event) for event in events])
        return [json.loads(each.decode().removeprefix("data: "))["choices"][0] for each in frames]

    before, end = told(Event(0, [token], "x"), Event(0, [], "", output))
    assert (before["finish_reason"], end["finish_reason"]) == (None, "length")
    assert end.get("text", "") == end.get("delta", {}).get("content", "") == ""
    assert [choice["finish_reason"] for choice in told(Event(0, [token] * 2, "xx", output))] == [None, "length"]


def test_a_streams_prompts_count_once_in_whatever_order_their_answers_end(llm):
    options = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    ask = parse_completion({"prompt": [[5], [5] * 9], **options}, Limits())
    requests = llm.requests([[5], [5], [5] * 9, [5] * 9], SamplingParams(max_tokens=1))
    outputs = llm.generate([request.prompt_token_ids for request in requests], SamplingParams(max_tokens=1), False)
    sent: list[dict] = []

    async def ends():
        for i in (0, 2, 1, 3):
            yield [(requests[i], Event(i, [], "", outputs[i]))]

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(EventStream(ends(), Answer(ask, "tutor", llm.tokenizer), include_usage=True)._send_all(send))
    assert [message["more_body"] for message in sent[1:]] == [True, True, True, False]
    last_end, usage, done = sent[-1]["body"].decode().split("\n\n")[:-1]  # one write
    assert json.loads(last_end.removeprefix("data: "))["choices"][0]["index"] == 3
    assert json.loads(usage.removeprefix("data: "))["usage"]["prompt_tokens"] == 1 + 9
    assert done == "data: [DONE]"


def test_a_connection_that_breaks_while_events_are_sent_is_no_failure_of_the_server(llm, capsys):
    [request] = llm.requests([[5]], SamplingParams(max_tokens=2))
    sent: list[dict] = []

    async def news():
        yield [(request, Event(0, [Token(5, "x")], "x"))]

    async def send(message: dict) -> None:
        sent.append(message)
        if "body" in message:
            raise BrokenPipeError

    answer = Answer(parse_completion({"prompt": [5], "stream": True}, Limits()), "tutor", llm.tokenizer)
    with pytest.raises(BrokenPipeError):
        asyncio.run(EventStream(news(), answer, include_usage=False)._send_all(send))
    assert len(sent) == 2 and capsys.readouterr().err == ""


def test_ids_that_the_tokenizer_does_not_know_are_shown_between_the_text_of_the_others(llm):
    word = llm.tokenizer.encode("龘")  # several tokens, of which none is text
    unknown = len(llm.tokenizer)
    assert text_of([*word, unknown, unknown, *word], llm.tokenizer) == f"龘⟨{unknown}⟩⟨{unknown}⟩龘"


def test_the_bytes_of_tokens_join_to_their_text_also_where_each_is_a_part_of_a_character(llm):
    text = "龘 KV\n"
    ids = llm.tokenizer.encode(text)
    answer = Answer(parse_chat({"messages": CHAT, "logprobs": True}, Limits(), 64), "tutor", llm.tokenizer)
    chunks = [json.loads(answer.chunk(0, Token(i, "", {i: -0.5}), None)) for i in ids]
    told = [chunk["choices"][0]["logprobs"]["content"][0] for chunk in chunks]
    assert told[0]["token"] == "\ufffd"  # the first character is spread over several tokens
    assert bytes(byte for token in told for byte in token["bytes"]) == text.encode()


@pytest.mark.parametrize(
    ("token", "text", "expected"),
    [("<0xE4>", "\ufffd", [0xE4]), ("\ufffd", "\ufffd", [0xEF, 0xBF, 0xBD]), (None, "⟨9⟩", list("⟨9⟩".encode()))],
)
def test_byte_fallback_special_and_unknown_tokens_have_bytes_too(token, text, expected):
    tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(id_to_token={9: token}.get))
    assert bytes_of(9, text, tokenizer) == expected


def test_of_tokens_that_look_alike_the_likeliest_is_among_the_top_logprobs(llm):
    one, other = [i for i in range(llm.vocab_size) if llm.tokenizer.decode([i]) == "\ufffd"][:2]  # parts of characters
    answer = Answer(parse_completion({"prompt": "x", "logprobs": 2}, Limits()), "tutor", llm.tokenizer)
    chunk = answer.chunk(0, Token(one, "", {one: -0.5, other: -1.5}), None)
    told = json.loads(chunk)["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [-0.5] and told["top_logprobs"] == [{"\ufffd": -0.5}]


def test_logprobs_are_the_engines_likeliest_first(client, llm):
    [expected] = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=3, logprobs=2), False)
    logprobs = post(client, "/v1/completions", prompt=QUESTION, temperature=0, max_tokens=3, logprobs=2)
    found = logprobs["choices"][0]["logprobs"]
    texts = [llm.tokenizer.decode([token_id]) for token_id in expected["token_ids"]]
    assert found["tokens"] == texts and "".join(texts) == expected["text"]
    assert found["text_offset"] == [0, len(texts[0]), len(texts[0]) + len(texts[1])]
    best = [list(step.values()) for step in expected["logprobs"]]
    assert [list(top.values()) for top in found["top_logprobs"]] == [values[:2] for values in best]
    assert found["token_logprobs"] == [values[0] for values in best]  # greedy takes the likeliest
    chat = post(client, "/v1/chat/completions", messages=CHAT, **GREEDY, logprobs=True, top_logprobs=1)
    for token in chat["choices"][0]["logprobs"]["content"]:
        [best] = token["top_logprobs"]
        assert (best["token"], best["logprob"]) == (token["token"], token["logprob"])
        assert bytes(token["bytes"]).decode() == token["token"]


def test_a_tokens_offset_is_where_it_begins_in_the_text_also_while_that_is_held_back(llm):
    text = "a KV 龘 cache"  # with a character of several tokens
    answer = Answer(parse_completion({"prompt": "x", "logprobs": 0}, Limits()), "tutor", llm.tokenizer)
    for i in llm.tokenizer.encode(text):
        told = json.loads(answer.chunk(0, Token(i, "", {i: -0.5}), None))["choices"][0]["logprobs"]
        [token], [offset] = told["tokens"], told["text_offset"]
        assert text.startswith(token.replace("\ufffd", ""), offset) and ("\ufffd" not in token or text[offset] in " 龘")
    assert (token, offset) == (" cache", 6)


def test_a_sampled_token_is_among_a_completions_top_logprobs_also_when_it_was_unlikely(client):
    """So has OpenAI's API: up to one more than were asked for."""
    ask = {"prompt": QUESTION, "temperature": 5, "seed": 1, "max_tokens": 8}
    for count in (0, 2):
        found = post(client, "/v1/completions", logprobs=count, **ask)["choices"][0]["logprobs"]
        assert {len(top) for top in found["top_logprobs"]} == {count + 1}
        for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert top[token] == logprob == min(top.values())


def test_a_chat_has_as_many_top_logprobs_as_were_asked_for_also_when_the_sampled_token_is_not_among_them(client):
    ask = {"messages": CHAT, "temperature": 5, "seed": 1, "max_tokens": 8, "logprobs": True}
    for count in (0, 2):
        told = post(client, "/v1/chat/completions", top_logprobs=count, **ask)["choices"][0]["logprobs"]["content"]
        assert {len(token["top_logprobs"]) for token in told} == {count}
        assert any(token["token"] not in [top["token"] for top in token["top_logprobs"]] for token in told)


def test_answers_to_one_prompt_differ_by_their_seed_and_can_be_had_again(client):
    ask = {"prompt": QUESTION, "temperature": 3, "max_tokens": 24}
    three = [c["text"] for c in post(client, "/v1/completions", n=3, seed=5, **ask)["choices"]]
    assert len(set(three)) == 3
    for i, text in enumerate(three):
        assert post(client, "/v1/completions", seed=5 + i, **ask)["choices"][0]["text"] == text
    streamed = ["", "", ""]
    for message in events(client, "/v1/completions", n=3, seed=5, **ask):
        streamed[message["choices"][0]["index"]] += message["choices"][0]["text"]
    assert streamed == three
    chat = events(client, "/v1/chat/completions", messages=CHAT, n=3, max_tokens=4, ignore_eos=True)
    for i in range(3):
        told = [m["choices"][0]["delta"].get("role") for m in chat if m["choices"][0]["index"] == i]
        assert told == ["assistant", None, None, None]
    _, after_the_largest = post(client, "/v1/completions", n=2, seed=2**64 - 1, **ask)["choices"]
    assert after_the_largest["text"] == post(client, "/v1/completions", seed=0, **ask)["choices"][0]["text"]


def test_the_answers_to_one_prompt_share_its_blocks(client, llm):
    block = llm.kv_cache.block_size
    prompt = [i % 1000 + 5 for i in range(3 * block + 1)]
    before = llm.engine.stats()
    usage = post(client, "/v1/completions", prompt=prompt, n=4, max_tokens=1)["usage"]
    after = llm.engine.stats()
    assert usage["prompt_tokens"] == len(prompt) and usage["completion_tokens"] == 4
    assert after["num_cached_tokens"] - before["num_cached_tokens"] == 3 * 3 * block
    assert after["num_prefill_tokens"] - before["num_prefill_tokens"] == len(prompt) + 3
    again = post(client, "/v1/completions", prompt=prompt, max_tokens=1)["usage"]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in (usage, again)]
    assert cached == [0, 3 * block]  # a prompt counts once, as does what was found of it


def test_the_engines_own_parameters_are_understood(client):
    for extra in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        sampled = post(client, "/v1/completions", prompt=QUESTION, temperature=1, max_tokens=12, seed=1, **extra)
        greedy = post(client, "/v1/completions", prompt=QUESTION, **GREEDY)
        assert sampled["choices"][0]["text"] == greedy["choices"][0]["text"]
    stopped = post(client, "/v1/chat/completions", messages=CHAT, temperature=0)["usage"]["completion_tokens"]
    on = post(client, "/v1/chat/completions", messages=CHAT, temperature=0, ignore_eos=True, max_tokens=stopped + 5)
    assert on["usage"]["completion_tokens"] == stopped + 5


# What Qwen2.5-Instruct's file has, and a limit.
QWENS = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
DEFAULTS = {name: value for name, value in QWENS.items() if name != "do_sample"} | {"max_tokens": 7}


def model_with(folder: Path, content: str | None) -> SimpleNamespace:
    """A model's source, whose directory holds this `generation_config.json`."""
    if content is not None:
        (folder / "generation_config.json").write_text(content)
    return SimpleNamespace(path=folder)


def test_sampling_defaults_are_the_models_and_only_where_they_are_wanted(tmp_path, llm):
    qwen = model_with(tmp_path, json.dumps(QWENS | {"max_new_tokens": 7, "min_p": None, "eos_token_id": [2]}))
    assert sampling_defaults(qwen, "auto") == DEFAULTS
    assert sampling_defaults(qwen, "vllm") == {}
    assert sampling_defaults(model_with(tmp_path, '{"top_k": -1, "min_p": 0.1}'), "auto") == {"min_p": 0.1, "top_k": 0}
    assert sampling_defaults(llm.source, "auto") == {}  # the tutor recommends nothing
    assert sampling_defaults(SimpleNamespace(path=None), "auto") == {}  # random weights


def test_a_directory_without_a_generation_config_has_no_sampling_defaults(tmp_path):
    assert sampling_defaults(model_with(tmp_path, None), "auto") == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a JSON list"),
        ('{"top_p": 1.5}', ": top_p must be above 0 and at most 1, got 1.5; "),
        ('{"temperature": "hot"}', ": temperature must be a finite number, 0 or more, got 'hot'; "),
        ('{"temperature": NaN}', ": temperature must be"),
        ('{"top_k": -2}', ": top_k must be"),
        ('{"min_p": true}', ": min_p must be"),
        ('{"repetition_penalty": 0}', ": repetition_penalty must be"),
        ('{"max_new_tokens": 0}', ": max_new_tokens must be an integer, 1 or more, got 0; "),
    ],
)
def test_a_generation_config_with_an_invalid_value_is_named_with_its_field(tmp_path, content, says):
    with pytest.raises(ModelError) as caught:
        sampling_defaults(model_with(tmp_path, content), "auto")
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "generation_config.json")) and says in message and "\n" not in message


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_requests_own_fields_win_over_the_servers_defaults(is_chat):
    def params(**given: object) -> SamplingParams:
        if is_chat:
            return parse_chat({"messages": CHAT, **given}, Limits(), 4096, DEFAULTS).params
        return parse_completion({"prompt": QUESTION, **given}, Limits(), DEFAULTS).params

    answer = {} if is_chat else {"max_tokens": 16}  # a completion has at most 16 tokens, as at OpenAI and in vLLM
    assert params() == params(temperature=None, top_k=None, max_tokens=None) == SamplingParams(**DEFAULTS | answer)
    own = {"temperature": 0.0, "top_p": 1.0, "top_k": 3, "repetition_penalty": 1.0, "max_tokens": 900}
    assert params(**own) == SamplingParams(**own)
    assert params(top_k=-1).top_k == params(top_k=0).top_k == 0  # both turn the default off
    assert params(top_k=-1).top_p == 0.8


def test_the_servers_defaults_are_used_and_shown(llm):
    ask = {"messages": CHAT, "seed": 5}
    with running(llm, defaults=DEFAULTS) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        [card] = client.get("/v1/models").json()["data"]
        sampled = post(client, "/v1/chat/completions", **ask)
        greedy = post(client, "/v1/completions", prompt=QUESTION, repetition_penalty=1, top_k=-1, top_p=1, **GREEDY)
    assert card["default_sampling_params"] == DEFAULTS
    [expected] = llm.chat(CHAT, SamplingParams(**DEFAULTS, seed=5), False)
    assert sampled["choices"][0]["message"]["content"] == expected["text"]
    assert sampled["usage"]["completion_tokens"] == 7
    [expected] = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=12), False)
    assert greedy["choices"][0]["text"] == expected["text"]


def test_the_defaults_are_told_in_one_line():
    assert in_words({"temperature": 0.7, "max_tokens": 32768}) == (
        "temperature 0.7, max_tokens 32768 (the model's generation_config.json)"
    )
    assert in_words({}) == "temperature 1, no filter, no penalty"


def test_models_tokens_and_health(client, llm):
    [card] = client.get("/v1/models").json()["data"]
    assert card["id"] == "tutor" and card["max_model_len"] == 4096 and card["default_sampling_params"] == {}
    assert client.get("/v1/models/tutor").json() == card
    assert client.get("/v1/models/gpt-4").json()["error"]["code"] == "model_not_found"
    text = "键值缓存 KV cache"
    ids = post(client, "/tokenize", prompt=text)["tokens"]
    assert ids == llm.tokenizer.encode(text) and post(client, "/detokenize", tokens=ids)["prompt"] == text
    told = post(client, "/tokenize", messages=CHAT, add_generation_prompt=True)
    assert told["tokens"] == llm.chat_prompts(CHAT)[0]
    rendered = post(client, "/detokenize", tokens=told["tokens"])["prompt"]
    assert rendered.startswith("<|im_start|>") and post(client, "/tokenize", prompt=rendered) == told
    assert post(client, "/tokenize", prompt="")["count"] == 0
    assert post(client, "/tokenize", prompt="x " * 5000)["count"] > 4096  # so that a client can count what it must cut
    assert refused(client, "/tokenize", prompt="x", add_special_tokens=False)["param"] == "add_special_tokens"
    assert refused(client, "/tokenize", messages=[{"role": "user"}])["param"] == "messages"
    for prompt, messages in ("x", CHAT), ("x", CHAT[0]), (5, CHAT):
        assert refused(client, "/tokenize", prompt=prompt, messages=messages)["param"] == "prompt"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"50256": -100}),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("best_of", 3),
        ("echo", True),
        ("tempreature", 0),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 2),
        ("n", 0),
        ("n", 1000),
        ("n", True),
        ("max_tokens", 0),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", {"continuous_usage_stats": True}),
        ("stream_options", "include_usage"),
        ("top_k", -2),
        ("logprobs", 21),
        ("stop", ["x"] * 17),
        ("stop", {"x": 1}),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [1, "x"]),
        ("prompt", [10**9]),
        ("prompt", ["x"] * 65),
        ("prompt", [7] * 5000),
        ("ignore_eos", 1),
    ],
)
def test_what_is_not_supported_or_out_of_range_is_refused_by_name(client, field, value):
    error = refused(client, "/v1/completions", **{"prompt": QUESTION} | {field: value})
    assert error["param"] == field and error["type"] == "invalid_request_error"


def test_as_much_as_the_limits_say_may_be_asked_for():
    most = {"prompt": ["x"] * 64, "n": 16, "stop": ["x"] * 16, "stop_token_ids": [7] * 16, "logprobs": 20}
    ask = parse_completion(most, Limits())
    assert (len(ask.prompts), ask.n, len(ask.params.stop), ask.params.logprobs) == (64, 16, 16, 20)


@pytest.mark.parametrize("field", [{"tools": [1]}, {"stream_options": {"continuous_usage_stats": True}}])
def test_what_is_not_supported_has_a_code_for_programs(client, field):
    assert refused(client, "/v1/completions", prompt=QUESTION, stream=True, **field)["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "nothing",
    [
        {"logit_bias": {}, "echo": False, "best_of": 1, "suffix": None, "logprobs": None, "length_penalty": 1.0},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "function_call": "none"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "reasoning_effort": "none"},
        {"store": False, "metadata": {}, "service_tier": "auto", "top_logprobs": 0, "top_k": -1, "min_tokens": 0},
        {"skip_special_tokens": True, "include_stop_str_in_output": False, "use_beam_search": False, "priority": 0},
        {"verbosity": "medium", "user": "someone", "safety_identifier": "someone", "prompt_cache_key": "someone"},
        {"stream_options": {"include_usage": False, "include_obfuscation": False, "continuous_usage_stats": None}},
    ],
    ids=lambda nothing: next(iter(nothing)),
)
def test_a_field_that_asks_for_nothing_is_granted(client, nothing):
    post(client, "/v1/completions", prompt=QUESTION, max_tokens=1, **nothing)
    post(client, "/v1/chat/completions", messages=CHAT, max_tokens=1, **nothing)


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        {"role": "user", "content": "hello"},
        [],
        ["hello"],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    ],
)
def test_a_conversation_that_is_none_is_refused(client, messages):
    assert refused(client, "/v1/chat/completions", messages=messages)["param"] == "messages"


@pytest.mark.parametrize("prompt", [[7] * 4096, "x " * 15_000], ids=["tokens", "text"])
def test_a_prompt_that_is_too_long_has_the_code_by_which_clients_know_it(client, prompt):
    error = refused(client, "/v1/completions", prompt=prompt)
    code, kind = "context_length_exceeded", "invalid_request_error"
    assert (error["code"], error["type"], error["param"]) == (code, kind, "prompt")
    if isinstance(prompt, str):
        error = refused(client, "/v1/chat/completions", messages=[{"role": "user", "content": prompt}])
        assert (error["code"], error["type"], error["param"]) == (code, kind, "messages")
    assert refused(client, "/v1/completions", prompt=[10**9])["code"] is None


def test_best_of_n_is_granted_where_all_n_are_asked_for(client):
    ask = {"prompt": QUESTION, "max_tokens": 1}
    assert len(post(client, "/v1/completions", n=2, best_of=2, **ask)["choices"]) == 2
    for given in ({"n": 2, "best_of": 3}, {"best_of": 0}, {"best_of": "x"}):
        error = refused(client, "/v1/completions", **ask, **given)
        assert (error["param"], error["code"]) == ("best_of", "unsupported_parameter")
        assert error["message"].startswith("best_of is supported only if it equals n")


def test_seeds_are_signed_as_openais_or_unsigned_as_the_engines(client):
    ask = {"prompt": QUESTION, "temperature": 5, "max_tokens": 8}

    def text(seed: int) -> str:
        return post(client, "/v1/completions", seed=seed, **ask)["choices"][0]["text"]

    assert text(-1) == text(2**64 - 1) and text(-(2**63)) == text(2**63)
    assert text(-1) == text(-1) != text(-2)
    for seed in (-(2**63) - 1, 2**64, 1.5, True):
        error = refused(client, "/v1/completions", seed=seed, **ask)
        assert error["param"] == "seed" and error["message"].startswith(f"seed must be an integer from {-(2**63)} to")


def test_a_refusal_has_the_name_that_the_client_used(client):
    error = refused(client, "/v1/chat/completions", messages=CHAT, max_completion_tokens=0)
    assert error["param"] == "max_completion_tokens" and error["message"].startswith("max_completion_tokens must")
    error = refused(client, "/v1/chat/completions", messages=CHAT, max_tokens=5, max_completion_tokens=5)
    assert error["param"] == "max_tokens" and "give one" in error["message"]
    assert refused(client, "/v1/chat/completions", messages=CHAT, top_logprobs=1)["param"] == "top_logprobs"
    error = refused(client, "/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=21)
    assert error["param"] == "top_logprobs" and error["message"].startswith("top_logprobs must")


def test_what_is_wrong_with_the_request_itself_has_its_own_status(client):
    error = refused(client, "/v1/completions", 404, prompt="x", model="gpt-4")
    assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
    assert refused(client, "/v1/completions", 413, prompt="x" * 50_000)
    long_number, nan = b'{"n": 1' + b"0" * 5000 + b"}", b'{"prompt": "x", "user": NaN}'
    for body in (b"", b"{", b"[1]", nan, b"[" * 100_00, b"\xff", b'{"prompt": "\xff"}', long_number):
        response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"]
    form = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert form.status_code == 415
    method = client.get("/v1/completions")
    assert (method.status_code, method.headers["Allow"]) == (405, "POST")
    assert method.json()["error"]["message"] == "GET /v1/completions: method not allowed"
    for path in ("/v1/models", "/v1/models/tutor", "/live/events"):
        method = client.post(path, json={})
        assert method.status_code == 405 and set(method.headers["Allow"].split(", ")) == {"GET", "HEAD"}
    for path in ("/page", "/v1", "/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/../../etc/passwd"):
        response = client.get(path)
        assert response.status_code == 404 and set(response.json()) == {"error"}
