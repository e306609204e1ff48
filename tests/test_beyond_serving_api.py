"""The API: what it answers is what the engine answers; what it does not support it refuses by name."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import CHAT, QUESTION, assert_idle, engine, httpx, messages, running

from beyond.serving.answers import Answer, bytes_of, text_of
from beyond.serving.async_llm import Stream
from beyond.serving.defaults import sampling_defaults
from beyond.serving.event_stream import EventStream
from beyond.serving.protocol import Limits, parse_chat, parse_completion
from stage_a_naive.contract.errors import ModelError
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls.mailbox import Event, Token

COMPLETIONS, CHATS, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
GREEDY = {"temperature": 0, "max_tokens": 12}
GREEDY_PARAMS = SamplingParams(**GREEDY)

llm = engine(max_num_seqs=8, max_num_batched_tokens=64, num_kvcache_blocks=256)


@pytest.fixture(scope="module")
def client(llm):
    options = {"limits": Limits(body_bytes=40_000), "max_queue": 8}
    with running(llm, **options) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_stays_behind(llm):
    yield
    assert_idle(llm)


def post(client, path: str, **body: object) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def choices(client, **body: object) -> list[dict]:
    return post(client, CHATS if "messages" in body else COMPLETIONS, **body)["choices"]


def events(client, **body: object) -> list[dict]:
    """The messages of a stream."""
    response = client.post(CHATS if "messages" in body else COMPLETIONS, json=body | {"stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"  # a proxy is asked to pass events on as they come
    return messages(response.text)


def refused(client, path: str, status: int = 400, **body: object) -> dict:
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == status and set(error) == {"message", "type", "param", "code"}, response.text
    assert "\n" not in error["message"]
    return error


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_text", [True, False], ids=["texts", "token ids"])
@pytest.mark.parametrize("count", [None, 1, 3])
def test_a_completion_is_the_engines_for_one_prompt_or_a_list_of_them(client, llm, is_text, count):
    [expected] = llm.generate([QUESTION], GREEDY_PARAMS, False)
    prompt = QUESTION if is_text else expected["prompt_token_ids"]
    answer = post(client, COMPLETIONS, model="tutor", prompt=[prompt] * count if count else prompt, **GREEDY)
    assert answer["object"] == "text_completion" and answer["model"] == "tutor"
    found = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
    assert found == [(i, expected["text"], expected["finish_reason"]) for i in range(count or 1)]
    assert answer["usage"]["completion_tokens"] == 12 * (count or 1)
    assert answer["usage"]["prompt_tokens"] == len(expected["prompt_token_ids"]) * (count or 1)


@pytest.mark.parametrize("content", [QUESTION, [{"type": "text", "text": QUESTION}]], ids=["text", "parts"])
@pytest.mark.parametrize("system", [None, "", []], ids=["no system message", "an empty one", "one without parts"])
def test_a_chat_goes_through_the_models_template(client, llm, content, system):
    before = [] if system is None else [{"role": "system", "content": ""}]
    [expected] = llm.chat([*before, *CHAT], GREEDY_PARAMS, False)
    before = [message | {"content": system} for message in before]
    [choice] = choices(client, messages=[*before, {"role": "user", "content": content}], **GREEDY)
    assert choice["message"] == {"role": "assistant", "content": expected["text"]}


THINKING = "{{ messages[0].content }}{% if not enable_thinking | default(true) %} /no_think{% endif %}"


def test_a_chats_template_has_its_arguments_and_those_that_it_lacks_are_refused(client, llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", THINKING)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    [expected] = llm.generate([QUESTION + " /no_think"], GREEDY_PARAMS, False)
    assert llm.chat(CHAT, GREEDY_PARAMS, False, **off)[0]["token_ids"] == expected["token_ids"]
    [choice] = choices(client, messages=CHAT, **off, **GREEDY)
    assert choice["message"]["content"] == expected["text"]
    assert post(client, TOKENIZE, messages=CHAT, **off)["tokens"] == expected["prompt_token_ids"]
    for name in ("thinking", "chat_template", "tokenize"):  # of no use to this template; a template; a function's own
        error = refused(client, CHATS, messages=CHAT, chat_template_kwargs={name: "x"})
        assert error["message"].startswith(f"the model's chat template has no argument '{name}'")
    assert refused(client, CHATS, messages=CHAT, chat_template_kwargs=[1])["param"] == "chat_template_kwargs"


def test_a_chat_without_a_limit_goes_on_to_its_end(client):
    [choice] = choices(client, messages=CHAT, temperature=0)
    assert choice["finish_reason"] == "stop" and choice["message"]["content"].endswith(".")


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_a_stream_has_one_event_per_token_also_for_one_without_text(client, is_chat, logprobs):
    ask = {"messages": CHAT} if is_chat else {"prompt": QUESTION}
    ask |= {"temperature": 0, "max_tokens": 20, "stop": "the key and values"}
    ask |= {"logprobs": True if is_chat else 1} if logprobs else {}
    [whole] = choices(client, **ask)
    *tokens, usage = events(client, stream_options={"include_usage": True}, **ask)
    told = [message["choices"][0] for message in tokens]
    pieces = [choice["delta"]["content"] if is_chat else choice["text"] for choice in told]
    assert len(tokens) == usage["usage"]["completion_tokens"] == 20 and usage["choices"] == []
    assert "" in pieces  # a possible start of the stop string is held back
    assert "".join(pieces) == (whole["message"]["content"] if is_chat else whole["text"])
    assert [choice["finish_reason"] for choice in told] == [None] * 19 + ["length"]
    assert all(message["usage"] is None and message["id"] == usage["id"] for message in tokens)
    if is_chat:
        assert [choice["delta"].get("role") for choice in told] == ["assistant"] + [None] * 19
    if not logprobs:
        assert [choice["logprobs"] for choice in told] == [None] * 20
    else:
        for name, values in whole["logprobs"].items():
            assert [choice["logprobs"][name] for choice in told] == [[value] for value in values]


@pytest.mark.parametrize("is_chat", [True, False])
def test_what_stopped_an_answer_is_told_at_its_end(client, llm, is_chat):
    ask = ({"messages": CHAT} if is_chat else {"prompt": QUESTION}) | {"temperature": 0, "max_tokens": 30}
    [free] = choices(client, **ask)
    text = free["message"]["content"] if is_chat else free["text"]
    token = llm.tokenizer.encode(text)[3]
    for given, reason in (({"stop": text[9:14]}, text[9:14]), ({"stop_token_ids": [token]}, token), ({}, None)):
        [whole] = choices(client, **ask, **given)
        *before, last = [event["choices"][0] for event in events(client, **ask, **given)]
        assert whole["stop_reason"] == last["stop_reason"] == reason
        assert whole["finish_reason"] == last["finish_reason"] == ("length" if reason is None else "stop")
        assert not any("stop_reason" in choice for choice in before)


def sent(answer: Answer, *news: tuple, breaks: bool = False, include_usage: bool = False) -> list[dict]:
    """What the web server is given to send while these (request, event) come, one after each write."""
    requests = {request.index: request for request, _ in news}.values()
    stream, found, coming = Stream(list(requests), SimpleNamespace(forget=lambda stream: None)), [], iter(news)

    async def send(message: dict) -> None:
        found.append(message)
        if breaks and "body" in message:
            raise BrokenPipeError
        if (one := next(coming, None)) is not None:
            stream.put(*one)

    async def receive() -> None:
        await asyncio.Event().wait()  # the client stays

    asyncio.run(EventStream(stream, answer, include_usage)({}, receive, send))
    return found


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_an_end_that_comes_after_its_last_token_is_told_too(llm, is_chat, logprobs):
    """As it may where another thread of the program runs the steps; else it comes with the last token."""
    [request], [output] = llm.requests([QUESTION]), llm.generate([QUESTION], SamplingParams(max_tokens=1), False)
    if is_chat:
        ask = parse_chat({"messages": CHAT, "logprobs": logprobs}, Limits(), 64)
    else:
        ask = parse_completion({"prompt": QUESTION, "logprobs": 1 if logprobs else None}, Limits())
    token = Token(5, "x", {5: -0.5})

    def told(*events: Event) -> list[dict]:
        found = sent(Answer(ask, [request], "tutor", llm.tokenizer), *((request, event) for event in events))
        text = b"".join(message.get("body", b"") for message in found).decode()
        return [message["choices"][0] for message in messages(text)]

    before, end = told(Event(0, [token], "x"), Event(0, [], "", output))
    assert (before["finish_reason"], end["finish_reason"]) == (None, "length")
    assert end.get("text", "") == end.get("delta", {}).get("content", "") == ""
    assert [choice["finish_reason"] for choice in told(Event(0, [token] * 2, "xx", output))] == [None, "length"]


def test_a_streams_prompts_count_once_in_whatever_order_their_answers_end(llm):
    ask = parse_completion({"prompt": [[5], [5] * 9], "n": 2, "stream": True}, Limits())
    requests = llm.requests([[5], [5], [5] * 9, [5] * 9], SamplingParams(max_tokens=1))
    outputs = llm.generate([request.prompt_token_ids for request in requests], SamplingParams(max_tokens=1), False)
    news = [(requests[i], Event(i, [], "", outputs[i])) for i in (0, 2, 1, 3)]
    last = sent(Answer(ask, requests, "tutor", llm.tokenizer), *news, include_usage=True)[-1]
    end, usage = messages(last["body"].decode())  # one write
    assert end["choices"][0]["index"] == 3 and usage["usage"]["prompt_tokens"] == 1 + 9


def test_a_connection_that_breaks_while_events_are_sent_is_no_failure_of_the_server(llm, capsys):
    [request] = llm.requests([[5]], SamplingParams(max_tokens=2))
    answer = Answer(parse_completion({"prompt": [5], "stream": True}, Limits()), [request], "tutor", llm.tokenizer)
    assert len(sent(answer, (request, Event(0, [Token(5, "x")], "x")), breaks=True)) == 2
    assert capsys.readouterr().err == ""


def test_answers_to_one_prompt_differ_by_their_seed_and_can_be_had_again(client):
    ask = {"prompt": QUESTION, "temperature": 3, "max_tokens": 24}
    three = [choice["text"] for choice in choices(client, n=3, seed=5, **ask)]
    assert len(set(three)) == 3
    assert [choices(client, seed=5 + i, **ask)[0]["text"] for i in range(3)] == three
    streamed = ["", "", ""]
    for message in events(client, n=3, seed=5, **ask):
        streamed[message["choices"][0]["index"]] += message["choices"][0]["text"]
    assert streamed == three
    chat = events(client, messages=CHAT, n=3, max_tokens=4, ignore_eos=True)
    for i in range(3):
        told = [m["choices"][0]["delta"].get("role") for m in chat if m["choices"][0]["index"] == i]
        assert told == ["assistant", None, None, None]


def test_seeds_are_signed_as_openais_or_unsigned_as_the_engines(client):
    def texts(seed: int, n: int = 1) -> list[str]:
        return [c["text"] for c in choices(client, prompt=QUESTION, temperature=5, max_tokens=8, seed=seed, n=n)]

    assert texts(-1) == texts(2**64 - 1) and texts(-(2**63)) == texts(2**63)
    assert texts(-1) == texts(-1) != texts(-2)
    assert texts(2**64 - 1, n=2) == texts(2**64 - 1) + texts(0)


def test_the_answers_to_one_prompt_share_its_blocks(client, llm):
    block = llm.kv_cache.block_size
    prompt = [i % 1000 + 5 for i in range(3 * block + 1)]
    before = llm.calls.stats()
    usage = post(client, COMPLETIONS, prompt=prompt, n=4, max_tokens=1)["usage"]
    after = llm.calls.stats()
    assert usage["prompt_tokens"] == len(prompt) and usage["completion_tokens"] == 4
    assert after["num_cached_tokens"] - before["num_cached_tokens"] == 3 * 3 * block
    assert after["num_prefill_tokens"] - before["num_prefill_tokens"] == len(prompt) + 3
    again = post(client, COMPLETIONS, prompt=prompt, max_tokens=1)["usage"]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in (usage, again)]
    assert cached == [0, 3 * block]  # a prompt counts once, as does what was found of it


def test_a_bias_asks_for_a_token_or_keeps_it_out(client, llm):
    [first, *_] = llm.generate([QUESTION], GREEDY_PARAMS, False)[0]["token_ids"]
    text = llm.tokenizer.decode([first])
    [without] = choices(client, prompt=QUESTION, **GREEDY, logit_bias={str(first): -100})
    assert text not in without["text"]
    [chat] = choices(client, messages=CHAT, **GREEDY, logit_bias={str(first): 100})
    assert chat["message"]["content"] == text * 12


VLLMS = {
    "min_tokens": {"min_tokens": 9, "stop": "a"},
    "bad_words": {"bad_words": ["cache", "key"]},
    "allowed_token_ids": {"allowed_token_ids": [70, 71, 72]},
    "include_stop_str_in_output": {"stop": "a", "include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {"2": 100}},
}


@pytest.mark.parametrize("asked", VLLMS.values(), ids=VLLMS)
@pytest.mark.parametrize("n", [1, 2])
def test_vllms_parameters_are_the_engines_whole_and_streamed(client, llm, asked, n):
    given = {"seed": 3, "max_tokens": 12, "n": n} | asked
    expected = [o["text"] for o in llm.generate([QUESTION], SamplingParams(**given), False)]
    assert [choice["text"] for choice in choices(client, prompt=QUESTION, **given)] == expected
    texts = [""] * n
    for event in events(client, prompt=QUESTION, **given):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=lambda extra: next(iter(extra)))
def test_the_engines_own_filters_are_understood(client, extra):
    [sampled] = choices(client, prompt=QUESTION, temperature=1, max_tokens=12, seed=1, **extra)
    assert sampled["text"] == choices(client, prompt=QUESTION, **GREEDY)[0]["text"]


def test_developers_say_what_the_system_says(client):
    def ids(role: str) -> list[int]:
        told = [{"role": role, "content": "Be brief."}, *CHAT]
        assert choices(client, messages=told, max_tokens=1)
        return post(client, "/tokenize", messages=told)["tokens"]

    assert ids("developer") == ids("system") != ids("assistant")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank"])
def test_what_needs_another_kind_of_model_is_refused_in_one_line(client, path):
    answer = client.post(path, json={"model": "tutor", "input": QUESTION})
    error = answer.json()["error"]
    assert answer.status_code == 404 and error["code"] == "unsupported_endpoint"
    assert error["message"].startswith(f"{path} needs a model for embeddings or ranking") and "\n" not in answer.text


def test_orchestrators_ask_for_the_version_and_a_ping(client):
    assert re.fullmatch(r"\d+\.\d+\.\d+", client.get("/version").json()["version"])
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200


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
    assert client.get("/health").status_code == 200


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_the_engines_likeliest_first(client, llm):
    [expected] = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=3, logprobs=2), False)
    found = choices(client, prompt=QUESTION, temperature=0, max_tokens=3, logprobs=2)[0]["logprobs"]
    texts = [llm.tokenizer.decode([token_id]) for token_id in expected["token_ids"]]
    assert found["tokens"] == texts and "".join(texts) == expected["text"]
    assert found["text_offset"] == [0, len(texts[0]), len(texts[0]) + len(texts[1])]
    best = [list(step.values()) for step in expected["logprobs"]]
    assert [list(top.values()) for top in found["top_logprobs"]] == [values[:2] for values in best]
    assert found["token_logprobs"] == [values[0] for values in best]  # greedy takes the likeliest
    [chat] = choices(client, messages=CHAT, **GREEDY, logprobs=True, top_logprobs=1)
    for token in chat["logprobs"]["content"]:
        [best] = token["top_logprobs"]
        assert (best["token"], best["logprob"]) == (token["token"], token["logprob"])
        assert bytes(token["bytes"]).decode() == token["token"]


@pytest.mark.parametrize("count", [0, 2])
def test_an_unlikely_sampled_token_is_among_a_completions_top_logprobs_and_not_among_a_chats(client, count):
    """As in OpenAI's API: a completion has up to one more than were asked for."""
    ask = {"temperature": 5, "seed": 1, "max_tokens": 8}
    found = choices(client, prompt=QUESTION, logprobs=count, **ask)[0]["logprobs"]
    assert {len(top) for top in found["top_logprobs"]} == {count + 1}
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob == min(top.values())
    [chat] = choices(client, messages=CHAT, logprobs=True, top_logprobs=count, **ask)
    tops = [(one["token"], [top["token"] for top in one["top_logprobs"]]) for one in chat["logprobs"]["content"]]
    assert {len(top) for _, top in tops} == {count} and any(token not in top for token, top in tops)


def told_logprobs(llm, count: int | None, *tokens: dict[int, float]) -> list[dict]:
    """What is told of tokens, each given by its logprobs; of a chat where `count` is None."""
    if count is None:
        ask = parse_chat({"messages": CHAT, "logprobs": True}, Limits(), 64)
    else:
        ask = parse_completion({"prompt": "x", "logprobs": count}, Limits())
    answer = Answer(ask, llm.requests(["x"]), "tutor", llm.tokenizer)
    chunks = [json.loads(answer.chunk(0, Token(next(iter(one)), "", one))) for one in tokens]
    return [chunk["choices"][0]["logprobs"] for chunk in chunks]


def test_the_bytes_of_tokens_join_to_their_text_also_where_each_is_a_part_of_a_character(llm):
    text = "龘 KV\n"
    found = told_logprobs(llm, None, *({i: -0.5} for i in llm.tokenizer.encode(text)))
    told = [one["content"][0] for one in found]
    assert told[0]["token"] == "\ufffd"  # the first character is spread over several tokens
    assert bytes(byte for token in told for byte in token["bytes"]) == text.encode()


def test_of_tokens_that_look_alike_the_likeliest_is_among_the_top_logprobs(llm):
    one, other = [i for i in range(llm.vocab_size) if llm.tokenizer.decode([i]) == "\ufffd"][:2]  # parts of characters
    [told] = told_logprobs(llm, 2, {one: -0.5, other: -1.5})
    assert told["token_logprobs"] == [-0.5] and told["top_logprobs"] == [{"\ufffd": -0.5}]


def test_a_tokens_offset_is_where_it_begins_in_the_text_also_while_that_is_held_back(llm):
    text = "a KV 龘 cache"  # with a character of several tokens
    for told in told_logprobs(llm, 0, *({i: -0.5} for i in llm.tokenizer.encode(text))):
        [token], [offset] = told["tokens"], told["text_offset"]
        assert text.startswith(token.replace("\ufffd", ""), offset) and ("\ufffd" not in token or text[offset] in " 龘")
    assert (token, offset) == (" cache", 6)


def test_ids_that_the_tokenizer_does_not_know_are_shown_between_the_text_of_the_others(llm):
    word = llm.tokenizer.encode("龘")  # several tokens, of which none is text
    unknown = len(llm.tokenizer)
    assert text_of([*word, unknown, unknown, *word], llm.tokenizer) == f"龘⟨{unknown}⟩⟨{unknown}⟩龘"


@pytest.mark.parametrize(
    ("token", "text", "expected"),
    [("<0xE4>", "\ufffd", [0xE4]), ("\ufffd", "\ufffd", [0xEF, 0xBF, 0xBD]), (None, "⟨9⟩", list("⟨9⟩".encode()))],
)
def test_byte_fallback_special_and_unknown_tokens_have_bytes_too(token, text, expected):
    tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(id_to_token={9: token}.get))
    assert bytes_of(9, text, tokenizer) == expected


# ---- what a request has if it says nothing --------------------------------------------------------------------------

# What Qwen2.5-Instruct's file has, and a limit.
QWENS = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
DEFAULTS = {name: value for name, value in QWENS.items() if name != "do_sample"} | {"max_tokens": 7}


def model_with(folder: Path, content: str) -> SimpleNamespace:
    """A model's source, whose directory holds this `generation_config.json`."""
    (folder / "generation_config.json").write_text(content)
    return SimpleNamespace(path=folder)


def test_sampling_defaults_are_the_models_and_only_where_they_are_wanted(tmp_path, llm):
    assert sampling_defaults(SimpleNamespace(path=tmp_path), "auto") == {}  # there is no file
    qwen = model_with(tmp_path, json.dumps(QWENS | {"max_new_tokens": 7, "min_p": None, "eos_token_id": [2]}))
    assert sampling_defaults(qwen, "auto") == DEFAULTS
    assert sampling_defaults(qwen, "vllm") == {}
    assert sampling_defaults(model_with(tmp_path, '{"top_k": -1, "min_p": 0.1}'), "auto") == {"min_p": 0.1, "top_k": 0}
    assert sampling_defaults(llm.source, "auto") == {}  # the tutor recommends nothing
    assert sampling_defaults(SimpleNamespace(path=None), "auto") == {}  # random weights


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
    def params(defaults: dict = DEFAULTS, **given: object) -> SamplingParams:
        if is_chat:
            return parse_chat({"messages": CHAT, **given}, Limits(), 4096, defaults).params
        return parse_completion({"prompt": QUESTION, **given}, Limits(), defaults).params

    answer = {} if is_chat else {"max_tokens": 16}  # a completion has at most 16 tokens, as at OpenAI and in vLLM
    assert params({}) == SamplingParams(max_tokens=4096 if is_chat else 16)  # a chat as many as the model allows
    assert params() == params(temperature=None, top_k=None, max_tokens=None) == SamplingParams(**DEFAULTS | answer)
    if is_chat:
        assert params(max_completion_tokens=3).max_tokens == 3
    own = {"temperature": 0.0, "top_p": 1.0, "top_k": 3, "repetition_penalty": 1.0, "max_tokens": 900}
    assert params(**own) == SamplingParams(**own)
    assert params(top_k=-1).top_k == params(top_k=0).top_k == 0  # both turn the default off
    assert params(top_k=-1).top_p == 0.8


def test_the_servers_defaults_are_used_and_shown(llm):
    with running(llm, defaults=DEFAULTS) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        [card] = client.get("/v1/models").json()["data"]
        sampled = post(client, CHATS, messages=CHAT, seed=5)
        [greedy] = choices(client, prompt=QUESTION, repetition_penalty=1, top_k=-1, top_p=1, **GREEDY)
    assert card["default_sampling_params"] == DEFAULTS
    [expected] = llm.chat(CHAT, SamplingParams(**DEFAULTS, seed=5), False)
    assert sampled["choices"][0]["message"]["content"] == expected["text"]
    assert sampled["usage"]["completion_tokens"] == 7
    assert greedy["text"] == llm.generate([QUESTION], GREEDY_PARAMS, False)[0]["text"]


# ---- refusals -------------------------------------------------------------------------------------------------------

WRONG = {  # fields of a completion, with values that are not supported or out of range
    "logit_bias": [{"4096": -100}, {"7": -101}, {"x": 1}, {"7": "1"}, [[7, 1]], {str(i): 1 for i in range(1025)}],
    "bad_words": [[" "], 3, {"a": 1}, ["a"] * 129],
    "allowed_token_ids": [[], [4096], ["a"], [7] * 1025],
    "min_tokens": [-1, 1000, "1"],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": [0],
    "tools": [[{"type": "function"}]],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, "json"],
    "structured_outputs": [{}, {"json": 1}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"json_object": False}],
    "guided_json": [{"type": "object"}],
    "guided_regex": ["a"],
    "best_of": [3],
    "echo": [1],
    "prompt_logprobs": [-1, 21, True],
    "tempreature": [0],
    "temperature": [-1, "hot"],
    "top_p": [2],
    "n": [0, 1000, True],
    "max_tokens": [0],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, "include_usage"],
    "top_k": [-2],
    "logprobs": [21],
    "stop": [["x"] * 17, {"x": 1}],
    "prompt": [[], "", [1, "x"], [10**9], ["x"] * 65, [7] * 5000],
    "ignore_eos": [1],
    "seed": [-(2**63) - 1, 2**64, 1.5, True],
}


ASK = {"prompt": QUESTION, "max_tokens": 1}
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
WITHOUT_TEXT = [{"role": "user"}, {"role": "user", "content": [IMAGE]}]
LONG_PROMPT = "x " * 15_000
BEST = {"param": "best_of", "code": "unsupported_parameter", "message": "best_of is supported only if it equals n"}
TOO_LONG = {"code": "context_length_exceeded", "message": "This model's maximum context length is 4096 tokens: "}
NO_MODEL = {"param": "model", "code": "model_not_found"}
NO_FORMS = {"param": "structured_outputs", "message": "structured_outputs of prompt 0: this engine cannot"}
NO_FORMAT = {"param": "response_format", "message": "response_format of prompt 0: this engine cannot constrain"}
TWO_FORMS = {"param": "response_format", "message": "response_format and structured_outputs both ask"}
TWO_SEEDS = {"param": "seed", "message": f"seed must be an integer from {-(2**63)} to"}
REFUSALS = [  # path, body, what the error says; its message begins so
    *((COMPLETIONS, ASK | {field: value}, {"param": field}) for field in WRONG for value in WRONG[field]),
    *((CHATS, {"messages": none}, {"param": "messages"}) for none in ("hello", CHAT[0], [], ["hello"])),
    *((path, {"messages": [m]}, {"param": "messages"}) for path in (CHATS, TOKENIZE) for m in WITHOUT_TEXT),
    (CHATS, {"max_completion_tokens": 0}, {"param": "max_completion_tokens", "message": "max_completion_tokens must"}),
    (CHATS, {"max_tokens": 5, "max_completion_tokens": 5}, {"param": "max_tokens", "message": "max_tokens and max_"}),
    (CHATS, {"top_logprobs": 1}, {"param": "top_logprobs"}),
    (CHATS, {"logprobs": True, "top_logprobs": 21}, {"param": "top_logprobs", "message": "top_logprobs must"}),
    (COMPLETIONS, ASK | {"seed": 2**64}, TWO_SEEDS),
    (COMPLETIONS, ASK | {"tools": [1]}, {"code": "unsupported_parameter"}),
    (COMPLETIONS, ASK | {"stream": True, "stream_options": {"x": True}}, {"code": "unsupported_parameter"}),
    *((COMPLETIONS, ASK | given, BEST) for given in ({"n": 2, "best_of": 3}, {"best_of": 0}, {"best_of": "x"})),
    (COMPLETIONS, {"prompt": [10**9]}, {"param": "prompt", "code": None}),
    (CHATS, {"response_format": {"type": "json_object"}}, NO_FORMS | NO_FORMAT),
    (CHATS, {"messages": CHAT, "chat_template_kwargs": {"messages": []}}, {"message": "the model's chat template has"}),
    (COMPLETIONS, ASK | {"structured_outputs": {"regex": "a"}}, NO_FORMS),
    (
        COMPLETIONS,
        ASK | {"guided_choice": ["a"]},
        {"message": "'guided_choice' is vLLM's name of old"},
    ),
    (CHATS, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, TWO_FORMS),
    (COMPLETIONS, {"prompt": [7] * 4096}, TOO_LONG | {"param": "prompt"}),
    (COMPLETIONS, {"prompt": LONG_PROMPT}, TOO_LONG | {"param": "prompt"}),
    (CHATS, {"messages": [{"role": "user", "content": LONG_PROMPT}]}, TOO_LONG | {"param": "messages"}),
    (COMPLETIONS, ASK | {"model": "gpt-4"}, NO_MODEL),
    (TOKENIZE, {"prompt": "x", "add_special_tokens": 1}, {"param": "add_special_tokens"}),
    (COMPLETIONS, ASK | {"echo": True, "stream": True}, {"param": "echo", "code": "unsupported_parameter"}),
    *((TOKENIZE, {"prompt": p, "messages": m}, {"param": "prompt"}) for p, m in (("x", CHAT), ("x", {}), (5, CHAT))),
]


@pytest.mark.parametrize(("path", "body", "says"), REFUSALS, ids=lambda value: str(value)[:40])
def test_a_refusal_says_what_was_wrong_to_people_and_to_programs(client, path, body, says):
    body = {"messages": CHAT} | body if path == CHATS else body
    error = refused(client, path, 404 if says is NO_MODEL else 400, **body)
    start = says.get("message", "")
    assert error["message"].startswith(start) and error["type"] == "invalid_request_error"
    assert says.items() <= (error | {"message": start}).items()


def test_as_much_as_the_limits_say_may_be_asked_for():
    most = {"prompt": ["x"] * 64, "n": 16, "stop": ["x"] * 16, "stop_token_ids": [7] * 16, "logprobs": 20}
    ask = parse_completion(most, Limits())
    assert (len(ask.prompts), ask.n, len(ask.params.stop), ask.params.logprobs) == (64, 16, 16, 20)


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
        {"n": 2, "best_of": 2},
    ],
    ids=lambda nothing: next(iter(nothing)),
)
def test_a_field_that_asks_for_nothing_is_granted(client, nothing):
    assert len(choices(client, prompt=QUESTION, max_tokens=1, **nothing)) == nothing.get("n", 1)
    chat = {name: value for name, value in nothing.items() if name != "best_of" or value == 1}
    choices(client, messages=CHAT, max_tokens=1, **chat)


NOT_JSON = [b"", b"{", b"[1]", b'{"prompt": "x", "user": NaN}', b"[" * 100_00, b"\xff", b'{"prompt": "\xff"}']


@pytest.mark.parametrize("body", [*NOT_JSON, b'{"n": 1' + b"0" * 5000 + b"}"], ids=lambda body: repr(body[:20]))
def test_a_body_that_is_no_json_object_is_refused(client, body):
    response = client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_what_is_wrong_with_the_request_itself_has_its_own_status(client):
    assert refused(client, COMPLETIONS, 413, prompt="x" * 50_000)
    form = client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert form.status_code == 415
    method = client.get(COMPLETIONS)
    assert (method.status_code, method.headers["Allow"]) == (405, "POST")
    assert method.json()["error"]["message"] == "GET /v1/completions: method not allowed"
    for path in ("/v1/models", "/v1/models/tutor", "/live/events"):
        method = client.post(path, json={})
        assert method.status_code == 405 and set(method.headers["Allow"].split(", ")) == {"GET", "HEAD"}


NO_FILES = ["/page", "/page/", "/page/none.js", "/page/../live_view.py", "/page/%2e%2e/live_view.py", "/v1"]
NO_FILES += ["/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/../../etc/passwd"]


@pytest.mark.parametrize("path", NO_FILES)
def test_no_path_leads_to_a_file_that_is_not_the_pages(client, path):
    response = client.get(path)
    assert response.status_code == 404 and set(response.json()) == {"error"}
