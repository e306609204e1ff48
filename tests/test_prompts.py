"""Valid prompts and conversations, and those refused with a one-line error before anything runs."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from stage_a_naive import LLM, SamplingParams
from stage_a_naive.chat import chatml, note_missing_template, render_chat
from stage_a_naive.contract.errors import PromptTooLong
from stage_a_naive.contract.prompts import check_text_length
from stage_a_naive.entrypoints import frontend
from stage_d_paged import LLM as PagedLLM

pytestmark = pytest.mark.fast
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("random:qwen2-tiny", device="cpu")


@pytest.fixture
def own() -> LLM:
    """An engine that a test may change."""
    return LLM("random:qwen2-tiny", device="cpu")


@pytest.fixture
def with_bos(own: LLM) -> LLM:
    """The tutor's tokenizer, made to begin every text with a token, as Llama's does."""
    backend, bos = own.tokenizer.backend_tokenizer, "<|im_start|>"
    template = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    backend.post_processor = template
    return own


def prompt_ids(llm: LLM, prompts: object) -> list[list[int]]:
    return [output["prompt_token_ids"] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_every_spelling_of_a_prompt_means_the_same(tiny: LLM) -> None:
    ids = tiny.tokenizer.encode("abc def")
    spellings = [
        "abc def",
        ids,
        tuple(ids),
        np.array(ids),
        [np.int64(i) for i in ids],
        torch.tensor(ids),
        {"prompt": "abc def"},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids), "prompt": "abc def"},
    ]
    got = prompt_ids(tiny, spellings)
    assert got == [ids] * len(spellings)
    assert all(type(i) is int for row in got for i in row)
    assert prompt_ids(tiny, {"prompt": "abc def"}) == prompt_ids(tiny, np.array([ids])) == [ids]
    assert prompt_ids(tiny, [torch.tensor([5]), np.array([6])]) == [[5], [6]]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([b"abc"], "prompt 0.*bytes first"),
        (["ok", [True, False]], "prompt 1: token ids are integers, got True"),
        ([[1, 2.0]], r"token ids are integers, got 2\.0"),
        ([np.array([1.0])], r"token ids are integers, got 1\.0"),
        ([["a", "b"]], "token ids are integers, got 'a'"),
        (["ok", {"prompt_token_ids": ["a"]}], "prompt 1: token ids are integers, got 'a'"),
        ({"prompt": "abc", "multi_modal_data": {}}, "multi_modal_data"),
        ({}, "a dictionary has"),
        ({"prompt": None}, "a prompt is text or a list of token ids, got None"),
        ({"prompt_token_ids": "abc"}, "a prompt is text or a list of token ids, got 'abc'"),
        ([None], "prompt 0: a prompt is text or a list of token ids, got None"),
        (3, "got 3"),
        ([np.int64(1), np.int64(2)], "wrap it in a list"),
        (torch.tensor([1, 2]), "wrap it in a list"),
        ([[1], np.array(2)], r"prompt 1: a prompt is text or a list of token ids, got array\(2\)"),
        ([[1, 2**70]], "is outside the vocabulary"),
        (["fine", "broken \ud800 text"], r"prompt 1 is not valid Unicode text: character 7 is '\\ud800'"),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(tiny: LLM, prompts: object, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        tiny.generate(prompts, GREEDY, use_tqdm=False)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_what_is_asked_may_come_from_generators(tiny: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    [expected] = tiny.chat(messages, GREEDY, use_tqdm=False)
    for asked in (iter(messages), iter([iter(messages)])):
        [output] = tiny.chat(asked, (params for params in [GREEDY]), use_tqdm=False)
        assert output["token_ids"] == expected["token_ids"]


def test_a_prompt_of_twenty_megabytes_is_refused_before_it_is_cut_into_tokens(own: LLM, monkeypatch) -> None:
    monkeypatch.setattr(frontend, "encode_fast", None)
    for text in ("word " * 4_000_000, "é" * 10_000_000):
        with pytest.raises(PromptTooLong, match="characters, which are at least .* tokens; at most 4095 fit"):
            own.generate(text, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="at most 4095 fit"):
        own.chat([{"role": "user", "content": "word " * 4_000_000}], GREEDY, use_tqdm=False)


def test_a_long_text_of_long_tokens_is_not_refused_by_its_length(tiny: LLM) -> None:
    text = " " * 700
    ids = tiny.tokenizer.encode(text)
    fits, too_short = (PagedLLM("random:qwen2-tiny", device="cpu", max_model_len=len(ids) + n) for n in (2, 0))
    assert prompt_ids(fits, text) == [ids]
    with pytest.raises(ValueError, match=f"prompt 0 has {len(ids)} tokens"):
        too_short.generate(text, GREEDY, use_tqdm=False)


def test_a_text_that_a_tokenizer_may_compose_is_refused_only_if_its_composed_form_is_too_long() -> None:
    composing, other = (SimpleNamespace(backend_tokenizer=SimpleNamespace(normalizer=n)) for n in (object(), None))
    for text, tokenizer, fits in (
        ("e\u0301" * 30, composing, True),  # 60 characters, which are 30 when they are composed
        ("\u00e9" * 60, composing, False),
        ("e\u0301" * 30, other, False),
        ("x" * 49, other, True),  # four tokens at least, and four fit
        ("e\u0301" * 100, composing, False),
    ):
        with nullcontext() if fits else pytest.raises(ValueError, match="at least .* tokens; at most 4 fit"):
            check_text_length(0, text, tokenizer, longest_token=10, max_tokens=4)


@pytest.mark.parametrize("text", ["", "abc def", "<|im_start|>user\nx<|im_end|>", " é 中文 👩‍👩‍👧  \n"])
@pytest.mark.parametrize("split", [False, True])
def test_text_gets_the_ids_of_transformers_whatever_the_tokenizer_was_asked_before(with_bos, text, split) -> None:
    tokenizer = with_bos.tokenizer
    tokenizer.split_special_tokens = split
    for special in (True, False):
        tokenizer(["a", "b c d"], padding="max_length", max_length=3, truncation=True, split_special_tokens=not split)
        got = with_bos.encode(0, text, special)
        assert got == tokenizer.encode(text, add_special_tokens=special)


def test_a_tokenizer_that_begins_texts_with_a_token_does_so_once_for_raw_text_and_for_chats(with_bos: LLM) -> None:
    bos = with_bos.tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = with_bos.tokenizer("abc").input_ids
    assert ids[0] == bos and prompt_ids(with_bos, ["abc", ids]) == [ids, ids]
    messages = [{"role": "user", "content": "abc"}]
    [output] = with_bos.chat(messages, GREEDY, use_tqdm=False)
    rendered = with_bos.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert output["prompt_token_ids"] == rendered
    assert output["prompt_token_ids"][0] == bos != output["prompt_token_ids"][1]


def test_without_a_chat_template_a_conversation_begins_as_raw_text_does(with_bos: LLM, capsys) -> None:
    with_bos.tokenizer.chat_template = None
    note_missing_template.cache_clear()
    messages = [{"role": "user", "content": "abc"}]
    [output] = with_bos.chat(messages, GREEDY, use_tqdm=False)
    assert chatml(messages) == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    assert output["prompt_token_ids"] == with_bos.tokenizer(chatml(messages)).input_ids
    with_bos.chat(messages, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err.count("has no chat template, so it is given ChatML") == 1, "said once"


def test_parts_of_text_are_joined_to_one_content(tiny: LLM) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    one, joined = ([{"role": "user", "content": content}] for content in (parts, "first\nsecond"))
    assert render_chat(tiny.tokenizer, one) == render_chat(tiny.tokenizer, joined)
    assert tiny.chat(one, GREEDY, use_tqdm=False)[0]["token_ids"]


CALLS = [{"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"city": "Paris"}'}}]


def test_a_call_of_a_tool_is_written_as_the_model_made_it(tiny: LLM) -> None:
    """OpenAI's clients send back its arguments as JSON text, and no other text."""
    read = [{"function": {"name": "clock", "arguments": {"city": "Paris"}}}]
    asked, told = {"role": "user", "content": "What time is it?"}, {"role": "tool", "content": "noon"}
    texts = {
        render_chat(tiny.tokenizer, [asked, {"role": "assistant", **called}, told])
        for called in (
            {"content": None, "tool_calls": CALLS},
            {"tool_calls": CALLS},
            {"content": "", "tool_calls": read},
            {"content": [], "tool_calls": tuple(CALLS)},
        )
    }
    [text] = texts
    assert '<tool_call>\n{"name": "clock", "arguments": {"city": "Paris"}}\n</tool_call>' in text and "None" not in text
    plain = [asked, {"role": "assistant", "content": "Noon."}]
    assert render_chat(tiny.tokenizer, [asked, plain[1] | {"tool_calls": []}]) == render_chat(tiny.tokenizer, plain)
    assert CALLS[0]["function"]["arguments"] == '{"city": "Paris"}', "the caller's messages are left alone"


NAMED = {
    "default": "{{ messages[0].content }} {{ enable_thinking }}",
    "tool_use": "{{ messages[0].content }} with {{ tools[0].name }}",
}


def test_a_template_of_several_is_chosen_by_name_and_by_whether_there_are_tools(own: LLM, tmp_path: Path) -> None:
    own.tokenizer.chat_template = NAMED
    own.tokenizer.save_pretrained(tmp_path)
    own.tokenizer.chat_template = AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert own.tokenizer.chat_template == NAMED, "as it is read from a file"
    asked, tools = [{"role": "user", "content": "abc"}], [{"name": "clock"}]

    def render(**arguments: object) -> str:
        return render_chat(own.tokenizer, asked, arguments)

    assert render(enable_thinking=False) == "abc False"
    assert render(tools=tools) == render(tools=tools, chat_template="tool_use") == "abc with clock"
    assert render(chat_template="default", enable_thinking=1) == "abc 1"
    for wrong, says in (
        ({"chat_template": "{{ 1 }}"}, "no chat template '{{ 1 }}'; give one of default, tool_use as chat_template_kw"),
        ({"tools": tools, "enable_thinking": False}, "has no argument 'enable_thinking'"),
        ({"tokenize": True}, "has no argument 'tokenize'"),
        ({"chat_template": ["default"]}, "no chat template"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            render(**wrong)
    own.tokenizer.chat_template = {"tool_use": NAMED["tool_use"]}
    assert render(tools=tools) == "abc with clock"
    with pytest.raises(ValueError, match="no chat template 'default'; give one of tool_use"):
        render()


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "assistant", "content": None}], "content of a message is text"),
        (
            [{"role": "user", "content": "a", "tool_calls": CALLS}],
            r"messages\[0\].tool_calls must be a list, in a message",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"messages\[0\].tool_calls\[0\].function.arguments must be an object or its JSON text, got '{'",
        ),
        ([{"role": "user", "content": b"abc"}], "content of a message is text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "list of text parts"),
        ([{"role": None, "content": "abc"}], "role of a message is text"),
        ({"role": "user", "content": "abc"}, "a conversation is a list of at least one message, got {'role'"),
        ("What is a KV cache?", "a conversation is a list of at least one message, got 'What"),
        (["What is a KV cache?"], "conversation 0: a conversation is a list"),
        (3, "got 3"),
        ([], r"got \[\]"),
        ([[{"role": "user", "content": "abc"}], []], r"conversation 1: a conversation is .*, got \[\]"),
        ([[{"role": "user", "content": "abc"}], 3], "conversation 1: .*, got 3"),
        ([{"role": "user", "content": "abc"}, "abc"], "a message is a dict with 'role' and 'content', got 'abc'"),
        ([{"role": "user", "content": "broken \udcff"}], "not valid Unicode"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(tiny: LLM, messages: object, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        tiny.chat(messages, GREEDY, use_tqdm=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must\nalternate') }}", "{{ messages[7].content }}", "{% if %}"]
)
def test_a_chat_template_that_raises_is_named_in_one_line(own: LLM, template: str) -> None:
    own.tokenizer.chat_template = template
    with pytest.raises(ValueError, match="chat template refuses the conversation: .") as caught:
        own.chat([{"role": "user", "content": "abc"}], GREEDY, use_tqdm=False)
    assert "\n" not in str(caught.value)
