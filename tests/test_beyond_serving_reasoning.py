"""Reasoning separated from the answer, and the server's arguments for the chat template."""

from __future__ import annotations

import json

import pytest
from serving import CHAT, QUESTION, engine, httpx, messages, running

from beyond.serving.__main__ import main, parse
from beyond.serving.answers import Answer
from beyond.serving.protocol import Limits, parse_chat
from beyond.serving.reasoning import ChatOptions, ReasoningSplit
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls.mailbox import Token

CHATS = "/v1/chat/completions"
THINKING = "{{ messages[0].content }}{% if not enable_thinking | default(true) %} /no_think{% endif %}"

llm = engine(max_num_seqs=8, num_kvcache_blocks=256)


def split(text: str, size: int, prompt: str = "") -> tuple[str, str]:
    """What is reported of an answer that comes in pieces of `size` characters."""
    splitter, pieces = ReasoningSplit(prompt), [text[i : i + size] for i in range(0, len(text), size)] or [""]
    told = [splitter.feed(piece, i == len(pieces)) for i, piece in enumerate(pieces, 1)]
    return "".join(reasoning for reasoning, _ in told), "".join(answer for _, answer in told)


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "prompt", "told"),
    [
        ("<think>\nwhy\n</think>\n\nso", "<|im_start|>assistant\n", ("\nwhy\n", "\n\nso")),
        ("\n<think>why</think>so", "", ("why", "so")),
        ("why</think>so", "<|im_start|>assistant\n<think>\n", ("why", "so")),
        ("so <think>x</think>", "<think>\n\n</think>\n\n", ("", "so <think>x</think>")),
        ("<think>a < b </ c</thin", "", ("a < b </ c</thin", "")),
        ("<think></think></think>", "", ("", "</think>")),
        ("<thought>", "", ("", "<thought>")),
        ("  ", "", ("", "  ")),
        ("<thi", "", ("", "<thi")),
        ("", "", ("", "")),
    ],
)
def test_reasoning_and_answer_are_the_same_in_pieces_of_any_size(text, prompt, told, size) -> None:
    assert split(text, size, prompt) == told


def told(llm, splits: bool, *pieces: str, **body: object) -> tuple[list[dict], dict]:
    """The deltas of a stream of these pieces, and the message of the same answer as a whole."""
    ask, requests = parse_chat({"messages": CHAT, **body}, Limits(), 64), llm.requests([QUESTION])
    stream, whole = (Answer(ask, requests, "tutor", llm.tokenizer, splits) for _ in range(2))
    deltas = []
    for i, piece in enumerate(pieces, 1):
        chunk = json.loads(stream.chunk(0, Token(5, piece), {"finish_reason": "stop"} if i == len(pieces) else None))
        deltas.append(chunk["choices"][0]["delta"])
    metrics = {"num_prompt_tokens": 1, "num_generated_tokens": len(pieces), "num_cached_tokens": 0}
    output = {"text": "".join(pieces), "finish_reason": "stop", "metrics": metrics}
    return deltas, whole.whole([output], [[]])["choices"][0]["message"]


def test_a_chats_reasoning_has_its_fields_in_whole_and_in_a_stream(llm) -> None:
    pieces = "<think>", "wh", "y</", "think>", "so"
    deltas, message = told(llm, True, *pieces)
    assert message == {"role": "assistant", "reasoning": "why", "reasoning_content": "why", "content": "so"}
    for name in ("reasoning", "reasoning_content"):
        assert [delta.get(name) for delta in deltas] == [None, "wh", "y", None, None]
    assert [delta["content"] for delta in deltas] == ["", "", "", "", "so"]
    for splits, form in ((False, {}), (True, {"response_format": {"type": "json_object"}})):
        deltas, message = told(llm, splits, *pieces, **form)
        assert "".join(delta["content"] for delta in deltas) == message["content"] == "".join(pieces)
        assert not any("reasoning" in one for one in [message, *deltas])


def test_a_server_splits_reasoning_only_where_it_was_asked_to(llm) -> None:
    """The tutor does not think, but its template can begin to."""
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 8}
    template = "{{ messages[0].content }}<think>"
    [expected] = llm.generate([QUESTION + "<think>"], SamplingParams(temperature=0, max_tokens=8), False)
    for parser, name in (("qwen3", "reasoning"), (None, "content")):
        with pytest.MonkeyPatch.context() as patch, running(llm, chat=ChatOptions({}, parser)) as server:
            patch.setattr(llm.tokenizer, "chat_template", template)
            whole = httpx.post(server.url + CHATS, json=body, timeout=60).json()
            stream = httpx.post(server.url + CHATS, json=body | {"stream": True}, timeout=60)
        assert whole["choices"][0]["message"][name] == expected["text"]
        deltas = [chunk["choices"][0]["delta"] for chunk in messages(stream.text)]
        assert "".join(delta.get(name, "") for delta in deltas) == expected["text"]


def test_a_servers_template_arguments_are_those_of_requests_that_say_nothing_else(llm, monkeypatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", THINKING)
    with running(llm, chat=ChatOptions({"enable_thinking": False})) as server:

        def ids(**given: object) -> list[int]:
            body = {"messages": CHAT, **given}
            return httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]

        assert ids() == ids(chat_template_kwargs={}) == llm.tokenizer.encode(QUESTION + " /no_think")
        assert ids(chat_template_kwargs={"enable_thinking": True}) == llm.tokenizer.encode(QUESTION)


def test_the_command_line_has_both_and_refuses_what_no_model_could_use(capsys) -> None:
    options, _ = parse(["--chat-template-kwargs", '{"enable_thinking": false}', "--reasoning-parser", "qwen3"])
    assert (options.chat_template_kwargs, options.reasoning_parser) == ({"enable_thinking": False}, "qwen3")
    for wrong in ("{", "[1]", "enable_thinking=false"):
        with pytest.raises(SystemExit):
            parse(["--chat-template-kwargs", wrong])
        assert "must be a JSON object" in capsys.readouterr().err
    assert main(["--port", "0", "--device", "cpu", "--chat-template-kwargs", '{"thinking": 1}']) == 2
    assert "the model's chat template has no argument 'thinking'" in capsys.readouterr().err
