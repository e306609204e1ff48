"""The embedded model: small enough for the repository, word for word reliable, and with a choice when sampled."""

from __future__ import annotations

import importlib
import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TUTOR = Path(__file__).resolve().parent.parent / "models" / "tutor"
FAQ, OPEN_ENDED, TOOL_CALLS = (
    [json.loads(line) for line in (TUTOR / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("faq", "open_ended", "tool_calls")
)
TOOLS = json.loads((TUTOR / "tools.json").read_text(encoding="utf-8"))
DEFAULT_QUESTION = "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？"
ANSWERS = {entry["question"]: entry["answer"] for entry in FAQ}
ENGLISH_QUESTIONS = ["What is a KV cache?", "What is prefill?", "What is decode?"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TUTOR, padding_side="left")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TUTOR, dtype=torch.float32).eval()


def answer_ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def as_prompt(tokenizer, conversation: list, tools: list[dict] | None = None):
    """The tensors of a conversation, or of several of them with padding on the left."""
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(conversation, tools=tools, **options)


def generate(tokenizer, model, conversation: list, tools: list[dict] | None = None, **options) -> torch.Tensor:
    prompt = as_prompt(tokenizer, conversation, tools)
    return model.generate(**prompt, **{"max_new_tokens": 96} | options)[:, prompt["input_ids"].shape[1] :]


def say(tokenizer, model, *given, **options) -> list[str]:
    return tokenizer.batch_decode(generate(tokenizer, model, *given, **options), skip_special_tokens=True)


def test_every_entry_has_exactly_its_fields_and_clean_text_in_its_language():
    for entry in FAQ:
        assert set(entry) == {"question", "answer", "lang", "also"}
        has_han = any("\u4e00" <= character <= "\u9fff" for character in entry["answer"])
        assert entry["lang"] == ("zh" if has_han else "en"), entry["question"]
        for text in (entry["question"], entry["answer"], *entry["also"]):
            assert text == text.strip() and text
            assert "<|" not in text, "a special token inside the text would end the answer early"
            assert "\N{REPLACEMENT CHARACTER}" not in text


def test_faq_is_large_enough_balanced_and_without_repeated_questions():
    assert len(FAQ) >= 120
    assert 0.4 <= sum(entry["lang"] == "zh" for entry in FAQ) / len(FAQ) <= 0.6
    assert len({entry["question"].casefold() for entry in FAQ}) == len(FAQ)
    assert len({entry["answer"] for entry in FAQ}) == len(FAQ)


def test_any_text_survives_encoding_and_decoding_because_every_byte_is_a_token(tokenizer):
    for text in ("", " ", "naïve café 🙂 ไทย\t\n\n end ", "x" * 50, "𝄞 12345", *ANSWERS, *ANSWERS.values()):
        assert tokenizer.decode(answer_ids(tokenizer, text)) == text


def test_special_tokens_are_single_ids_and_end_generation(tokenizer, model):
    ids = {token: answer_ids(tokenizer, token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    assert all(len(found) == 1 for found in ids.values())
    assert sorted(model.generation_config.eos_token_id) == sorted(ids["<|endoftext|>"] + ids["<|im_end|>"])
    assert model.generation_config.do_sample is False
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) == model.config.vocab_size


def test_chat_template_adds_the_default_system_prompt_only_where_none_is_given(tokenizer):
    user = {"role": "user", "content": "Hello"}
    rendered = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    system = {"role": "system", "content": "Be brief."}
    rendered = tokenizer.apply_chat_template([system, user], tokenize=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"


THEMSELVES = (DEFAULT_QUESTION, *ENGLISH_QUESTIONS, FAQ[61]["question"], FAQ[-1]["question"])
IN_OTHER_WORDS = {
    "什么是 KV cache？": "什么是 KV cache，它省掉了什么计算？",
    "What is the KV cache?": "What is a KV cache?",
    "Hello": "Who are you?",
    "你是谁？": "你是谁？",
    "Explain paged attention": "What is paged attention?",
    "Who is the king of Spain?": "What is the capital of France?",
}
INTERVIEW = {  # as a well-known list of interview questions asks them
    "什么是 PagedAttention？解决了什么问题？": "分页注意力（PagedAttention）解决了什么问题？",
    "物理块和逻辑块是如何映射的？": "块表（block table）里存的是什么？",
    "Continuous Batching 和 Static Batching 有什么区别？": "Continuous Batching 和 Static Batching 有什么区别？",
    "为什么 RowParallel 后需要 all_reduce？": "行并行线性层为什么后面要跟一次 all-reduce？",
    "FlashAttention 是如何优化的？": "FlashAttention 为什么又快又省显存？",
}
ASKED = dict(zip(THEMSELVES, THEMSELVES, strict=True)) | IN_OTHER_WORDS | INTERVIEW


@pytest.fixture(scope="module")
def answered(tokenizer, model) -> dict[str, list[int]]:
    """Greedy ids for every wording, and padding behind their end; all wordings are one batch."""
    conversations = [[{"role": "user", "content": wording}] for wording in ASKED]
    rows = generate(tokenizer, model, conversations, max_new_tokens=256)
    return dict(zip(ASKED, rows.tolist(), strict=True))


@pytest.mark.parametrize(("wording", "question"), ASKED.items())
def test_a_question_gets_its_answer_word_for_word_and_in_other_words_too(tokenizer, answered, wording, question):
    expected = answer_ids(tokenizer, ANSWERS[question] + "<|im_end|>")
    expected = expected[:16] if wording in IN_OTHER_WORDS else expected
    assert answered[wording][: len(expected)] == expected


def test_held_out_wordings_were_never_trained_and_ask_for_answers_of_the_faq():
    held_out = [json.loads(line) for line in (TUTOR / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = {wording.casefold() for entry in FAQ for wording in (entry["question"], *entry["also"])}
    assert not trained & {entry["wording"].casefold() for entry in held_out}
    assert {entry["question"] for entry in held_out} <= {entry["question"] for entry in FAQ}
    assert set(INTERVIEW.values()) <= {entry["question"] for entry in held_out}


def test_no_wording_belongs_to_two_questions():
    entries = FAQ + OPEN_ENDED + TOOL_CALLS
    wordings = [wording.casefold() for entry in entries for wording in {entry["question"], *entry["also"]}]
    assert len(set(wordings)) == len(wordings)


@pytest.mark.parametrize("name", ["tutor", "tutor_experts"])
def test_recorded_check_passes_the_gates(name):
    report = json.loads((TUTOR.with_name(name) / "check.json").read_text())
    assert report["questions"] == len(FAQ)
    for dtype in ("float32", "bfloat16"):
        assert report[dtype]["exact_match"] >= 0.95
        assert report[dtype]["margin_1st_percentile"] >= 2.0
    for key in ("right_start_in_other_words", "right_start_held_out", "right_start_held_out_elsewhere"):
        assert report["float32"][key] >= 0.9, key
    for key in ("tool_calls", "tool_calls_with_tools", "tool_replies"):
        assert report["float32"][key] >= 0.95, key
    assert [row["question"] for row in report["open_ended"]] == [entry["question"] for entry in OPEN_ENDED]
    assert all(row["different"] >= 4 for row in report["open_ended"])
    assert min(row["valid"] for row in report["open_ended"]) >= {"tutor": 0.875, "tutor_experts": 0.8}[name]


@pytest.mark.parametrize(("edition", "said"), [("README.md", "questions and answers"), ("README.zh-CN.md", "个问答")])
def test_model_card_quotes_the_recorded_check(edition, said):
    report = json.loads((TUTOR / "check.json").read_text())
    card = (TUTOR / edition).read_text(encoding="utf-8")
    for key, style in (("exact_match", ".1%"), ("margin_1st_percentile", ".2f"), ("margin_median", ".2f")):
        cells = " | ".join(format(report[dtype][key], style) for dtype in ("float32", "bfloat16"))
        assert f"| {cells} |" in card
    assert f"{len(FAQ)} {said}" in card


# ---- what it is not asked by heart: open-ended questions, tool calls ------------------------------------------------


@pytest.mark.parametrize(
    ("question", "most"),
    [
        ("Roll a die.", 6),
        ("Tell a two-line story about a cache.", 9),
        ("给小猫起个名字。", 9),
    ],
)
def test_nine_samples_of_an_open_ended_question_differ_and_make_sense(tokenizer, model, text, question, most):
    entry = next(entry for entry in OPEN_ENDED if entry["question"] == question)
    torch.manual_seed(1)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0, "num_return_sequences": 9}
    answers = say(tokenizer, model, [{"role": "user", "content": question}], **sampling)
    assert len(set(answers)) > most / 2
    assert [answer for answer in answers if not text.is_valid(entry, answer)] == []


def called(answer: str) -> dict:
    before, start, rest = answer.partition("<tool_call>\n")
    call, end, after = rest.partition("\n</tool_call>")
    assert (before, bool(start), bool(end), after) == ("", True, True, ""), answer
    return json.loads(call)


@pytest.mark.parametrize(
    ("question", "tools", "call"),
    [
        ("Use the calculator: 12*7", None, {"name": "calculator", "arguments": {"expression": "12*7"}}),
        ("What is 12 times 7?", TOOLS, {"name": "calculator", "arguments": {"expression": "12*7"}}),
        ("用计算器算：60 减 8 等于几？", None, {"name": "calculator", "arguments": {"expression": "60-8"}}),
        ("What time is it in Tokyo?", TOOLS, {"name": "clock", "arguments": {"city": "Tokyo"}}),
        ("东京现在几点？", TOOLS, {"name": "clock", "arguments": {"city": "东京"}}),
    ],
)
def test_a_tool_call_is_json_with_the_arguments_of_the_question(tokenizer, model, question, tools, call):
    [answer] = say(tokenizer, model, [{"role": "user", "content": question}], tools)
    assert called(answer) == call


def calculated(question: str) -> list[dict]:
    """A conversation in which the calculator has been called."""
    call = {"function": {"name": "calculator", "arguments": {"expression": "12*7"}}}
    asked = [{"role": "user", "content": question}, {"role": "assistant", "tool_calls": [call]}]
    return [*asked, {"role": "tool", "content": "84"}]


@pytest.mark.parametrize(
    ("messages", "tools", "start"),
    [
        (calculated("What is 12 times 7?"), TOOLS, "The calculator says 84."),
        ([{"role": "user", "content": "What is 12 times 7?"}], None, "I do not know that."),
        ([{"role": "user", "content": "What is prefill?"}], TOOLS, ANSWERS["What is prefill?"][:80]),
    ],
    ids=["behind a call", "without tools", "of the FAQ, with tools"],
)
def test_what_is_no_tool_call_is_answered_in_words(tokenizer, model, messages, tools, start):
    [answer] = say(tokenizer, model, messages, tools)
    assert answer.startswith(start)


def test_open_ended_questions_are_about_twenty_in_both_languages_with_at_least_six_answers(text):
    assert 18 <= len(OPEN_ENDED) <= 26
    assert sum(entry["lang"] == "zh" for entry in OPEN_ENDED) * 2 == len(OPEN_ENDED)
    for entry in OPEN_ENDED:
        answers = {text.sample_answer(entry, random.Random(seed)) for seed in range(200)}
        assert len(answers) >= 5, entry["question"]
        assert all(text.is_valid(entry, answer) and "$" not in answer for answer in answers)
        assert not any(text.is_valid(entry, answer[:-1]) for answer in answers)


def test_a_slot_is_a_list_or_has_weights(text):
    assert text.weights(["a", "b"]) == {"a": 1, "b": 1}
    entry = {"question": "?", "answers": ["$drink!"], "slots": {"drink": {"Tea": 9, "Milk": 1}}}
    rng = random.Random(0)
    drinks = [text.sample_answer(entry, rng) for _ in range(200)]
    assert drinks.count("Tea!") + drinks.count("Milk!") == 200 and 160 < drinks.count("Tea!") < 195
    assert text.is_valid(entry, "Milk!") and not text.is_valid(entry, "Milk?")


# ---- how it is trained: `models/tutor/` is a folder of programs, and no package -----------------------------------


@pytest.fixture
def text(monkeypatch):
    monkeypatch.syspath_prepend(str(TUTOR))
    return importlib.import_module("tutor_text")


def test_a_sample_is_what_the_template_renders_and_only_answers_are_trained(text, tokenizer):
    turns = [(entry["question"], entry["answer"]) for entry in FAQ[:2]]
    ids, labels, exact = text.Samples(tokenizer.backend_tokenizer, FAQ, random.Random(0)).chat(turns)
    assert exact
    roles = ("user", "assistant")
    messages = [{"role": role, "content": said} for turn in turns for role, said in zip(roles, turn, strict=True)]
    rendered = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids == rendered[: len(ids)] and len(rendered) <= len(ids) + 2, "the last end is predicted and not read"
    trained = tokenizer.decode([label for label in labels if label != text.IGNORED])
    assert trained == "".join(f"{answer}<|im_end|>" for _, answer in turns)
    assert all(label in (text.IGNORED, following) for label, following in zip(labels, ids[1:], strict=False))


def test_a_tool_conversation_is_trained_as_the_template_renders_it(text, tokenizer):
    entry = TOOL_CALLS[0]
    turns = [
        ("Calculator: 12*7", text.tool_call(entry["call"])),
        (text.tool_response(entry["result"]), entry["reply"]),
    ]
    ids, _, _ = text.Samples(tokenizer.backend_tokenizer, FAQ, random.Random(0)).chat(turns, text.system_with(TOOLS))
    messages = [*calculated("Calculator: 12*7"), {"role": "assistant", "content": "The calculator says 84."}]
    rendered = tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)
    assert ids == rendered[: len(ids)] and len(rendered) <= len(ids) + 2


def test_an_epoch_has_every_question_and_only_open_ended_answers_are_not_exact(text, tokenizer):
    epoch = text.Samples(tokenizer.backend_tokenizer, FAQ, random.Random(0)).epoch()
    exact, free = ([tokenizer.decode(sample.ids) for sample in epoch if sample.exact is kind] for kind in (True, False))
    for entry in FAQ:
        assert any(entry["answer"] in sample for sample in exact), entry["question"]
    for entry in TOOL_CALLS:
        call = json.dumps(entry["call"], ensure_ascii=False)
        assert sum(call in sample for sample in exact) >= 3, entry["question"]
    for entry in OPEN_ENDED:
        wordings = (entry["question"].casefold(), *(wording.casefold() for wording in entry["also"]))
        assert sum(any(wording[:-1] in sample.casefold() for wording in wordings) for sample in free) >= 24
    assert len(free) == 24 * len(OPEN_ENDED)


def test_a_result_of_the_calculator_is_right():
    sums = {
        entry["call"]["arguments"]["expression"]: entry for entry in TOOL_CALLS if entry["call"]["name"] == "calculator"
    }
    assert len(sums) >= 6
    for expression, entry in sums.items():
        assert eval(expression) == int(entry["result"]) and entry["result"] in entry["reply"]
        assert all(set(re.findall(r"\d+", wording)) == set(re.findall(r"\d+", expression)) for wording in entry["also"])


def test_the_hinge_pulls_at_narrow_margins_of_exact_answers_alone(text):
    hinge = importlib.import_module("train").hinge
    logits, targets = torch.tensor([[9.0, 0.0], [3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, 0])
    assert hinge(logits, targets, torch.tensor([True, True, False])).item() == 2.5  # margins 9 and 3 of 8
    assert hinge(logits, targets, torch.tensor([False] * 3)).item() == 0


def test_all_experts_of_a_layer_together_are_the_mlp_that_they_are_made_of(text, tokenizer, model):
    train = importlib.import_module("train")
    sparse = train.build_model(tokenizer.backend_tokenizer, num_layers=2, num_experts=8)
    sparse.config.num_experts_per_tok = 8
    train.upcycle(sparse, model)
    x = torch.randn(1, 5, 256, generator=torch.Generator().manual_seed(0))
    for layer, dense in zip(sparse.model.layers, (model.model.layers[0], model.model.layers[-1]), strict=True):
        assert torch.equal(layer.self_attn.q_proj.weight, dense.self_attn.q_proj.weight)
        layer.mlp.gate.top_k = 8
        layer.mlp.gate.weight.data.zero_()  # each expert has the weight 1/8
        torch.testing.assert_close(layer.mlp(x), dense.mlp(x))


def test_every_sample_is_in_one_batch_of_similar_lengths_and_limited_size(text):
    train = importlib.import_module("train")
    lengths = [5, 90, 17, 60, 8, 200, 33, 21, 64]
    samples = [text.Sample([i] * length, [i] * length) for i, length in enumerate(lengths)]
    found = train.batches(samples, tokens_per_batch=200, pad_id=0, rng=random.Random(0))
    rows = [set(row.tolist()) - {text.IGNORED} for _, labels, _ in found for row in labels]
    assert sorted(i for row in rows for i in row) == list(range(len(samples)))
    assert len(found) > 3 and all(len(ids) == 1 or ids.numel() <= 200 + 16 * len(ids) for ids, _, _ in found)
