"""Measure the saved tutor with nothing but `transformers`: are the answers exact, and how safe are they?

Exactness alone says little: if the two best tokens are almost equal, another kernel's rounding picks the other one and
the rest of the text changes. The margin, how far the right token's logit is above the best other one, says how much
rounding the answers survive.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
from tutor_text import (
    END_OF_TEXT,
    HERE,
    IGNORED,
    TURN_END,
    Sample,
    Samples,
    logit_margins,
    pad,
    read_faq,
    read_held_out,
)

ROWS = {
    "exact_match": "answers given back exactly",
    "margin_min": "smallest margin",
    "margin_1st_percentile": "1st percentile of the margin",
    "margin_median": "median margin",
    "right_start_in_other_words": "first 16 tokens right when the question is put in other words",
    "right_start_held_out": "… in words that were held out of training, interview questions",
    "right_start_held_out_elsewhere": "… held out, questions about other things (it says that it does not know)",
    "exact_match_second_turn": "exact as the second turn of a conversation",
    "exact_match_without_template": "exact without a template",
}
UNKNOWN = ("What is the capital of France?", "法国的首都是哪里？")  # answered with "I do not know that"
FIGURES_START, FIGURES_END = "<!-- figures of check.json -->", "<!-- end of figures -->"


@torch.inference_mode()
def greedy_answers(model: Qwen2ForCausalLM, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy `generate` for every prompt; prompts of equal length share a batch, so nothing is padded."""
    by_length = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: list[list[int]] = [[] for _ in prompts]
    ends = set(model.generation_config.eos_token_id)
    for length, indices in tqdm(sorted(by_length.items()), desc="greedy", unit="batch"):
        ids = torch.tensor([prompts[index] for index in indices])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens)
        for index, row in zip(indices, output[:, length:].tolist(), strict=True):
            stop = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
            answers[index] = row[: stop + 1]
    return answers


@torch.inference_mode()
def margins(model: Qwen2ForCausalLM, samples: list[Sample]) -> torch.Tensor:
    """The logit margin at every trained position, teacher forced: each position sees the right tokens before it."""
    found = []
    for start in range(0, len(samples), 16):
        ids, labels = pad(samples[start : start + 16], model.config.pad_token_id)
        trained = labels != IGNORED
        logits = model(ids, use_cache=False).logits[trained].float()  # [positions, vocab]
        found.append(logit_margins(logits, labels[trained]))
    return torch.cat(found)


def check() -> dict:
    """Load what is saved with plain `transformers` and decode the whole FAQ in both dtypes.

    The figures go to `check.json` and, as a table, into the model card.
    """
    faq = read_faq()
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    samples = Samples(tokenizer.backend_tokenizer, faq, random.Random(0))
    expected = [samples.ids(entry["answer"]) for entry in faq]
    longest = max(map(len, expected)) + 1

    def chat_prompt(*messages: dict[str, str]) -> list[int]:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)

    chats = [chat_prompt({"role": "user", "content": entry["question"]}) for entry in faq]
    turn_end, text_end = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    want_chat = [answer + [turn_end] for answer in expected]
    bare = [samples.ids(entry["question"]) for entry in faq]
    other_words = [chat_prompt({"role": "user", "content": text}) for entry in faq for text in entry["also"]]
    answers = {entry["question"]: want for entry, want in zip(faq, want_chat, strict=True)}
    held_out = read_held_out()
    second_turns = [
        chat_prompt(
            {"role": "user", "content": faq[index - 1]["question"]},
            {"role": "assistant", "content": faq[index - 1]["answer"]},
            {"role": "user", "content": entry["question"]},
        )
        for index, entry in enumerate(faq)
    ]
    want_other_words = [want[:16] for want, entry in zip(want_chat, faq, strict=True) for _ in entry["also"]]
    want_bare = [samples.ids("\n") + answer + [text_end] for answer in expected]

    def rate(
        model: Qwen2ForCausalLM, prompts: list[list[int]], wanted: list[list[int]], most: int = longest + 2
    ) -> float:
        got = greedy_answers(model, prompts, most)
        return round(sum(a == b for a, b in zip(got, wanted, strict=True)) / len(wanted), 4)

    forced = [samples.chat([(entry["question"], entry["answer"])]) for entry in faq]
    report: dict = {"questions": len(faq), "answer_tokens": sum(map(len, want_chat))}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(HERE, dtype=dtype).eval()
        gaps = margins(model, forced)
        figures = {
            "exact_match": rate(model, chats, want_chat),
            "margin_min": round(gaps.min().item(), 3),
            "margin_1st_percentile": round(gaps.quantile(0.01).item(), 3),
            "margin_median": round(gaps.median().item(), 3),
        }
        if dtype == torch.float32:
            figures["right_start_in_other_words"] = rate(model, other_words, want_other_words, most=16)
            for key, elsewhere in (("right_start_held_out", False), ("right_start_held_out_elsewhere", True)):
                asked = [entry for entry in held_out if (entry["question"] in UNKNOWN) == elsewhere]
                prompts = [chat_prompt({"role": "user", "content": entry["wording"]}) for entry in asked]
                figures[key] = rate(model, prompts, [answers[entry["question"]][:16] for entry in asked], most=16)
            figures["exact_match_second_turn"] = rate(model, second_turns, want_chat)
            figures["exact_match_without_template"] = rate(model, bare, want_bare)
        report[str(dtype).removeprefix("torch.")] = figures
    (HERE / "check.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    update_model_card(report)
    return report


def figures_table(report: dict) -> str:
    """The figures of a check as the Markdown table of the model card."""
    lines = ["| | float32 | bfloat16 |", "|---|---|---|"]
    for key, label in ROWS.items():
        values = [report[dtype].get(key) for dtype in ("float32", "bfloat16")]
        style = ".2f" if key.startswith("margin") else ".1%"
        cells = ["–" if value is None else format(value, style) for value in values]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def update_model_card(report: dict) -> None:
    """Put the figures between the two marks in `README.md`, so that no figure there is typed by hand."""
    card = HERE / "README.md"
    before, rest = card.read_text(encoding="utf-8").split(FIGURES_START)
    after = rest.split(FIGURES_END)[1]
    text = f"{before}{FIGURES_START}\n{figures_table(report)}\n{FIGURES_END}{after}"
    card.write_text(text, encoding="utf-8")
