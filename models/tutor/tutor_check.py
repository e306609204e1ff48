"""Measure the saved tutor with nothing but `transformers`: are the answers exact, and how safe are they?

Exactness alone says little: if the two best tokens are almost equal, another kernel's rounding picks the other one and
the rest of the text changes. The margin, how far the right token's logit is above the best other one, says how much
rounding the answers survive. Open-ended prompts are treated separately: their answers are sampled, and the valid ones
are counted.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from tutor_text import (
    END_OF_TEXT,
    HERE,
    IGNORED,
    TURN_END,
    UNKNOWN,
    Sample,
    Samples,
    is_valid,
    logit_margins,
    pad,
    read_faq,
    read_held_out,
    read_open_ended,
    read_tool_calls,
    read_tools,
    tool_call,
)

DTYPES = ("float32", "bfloat16")
ROWS = {  # in English and in Chinese
    "exact_match": ("answers given back exactly", "回答一字不差"),
    "margin_min": ("smallest margin", "最小的差距"),
    "margin_1st_percentile": ("1st percentile of the margin", "差距的第 1 百分位数"),
    "margin_median": ("median margin", "差距的中位数"),
    "other_experts": (
        "choices of a router that differ from those in float32",
        "路由器的选择与 float32 不同的比例",
    ),
    "right_start_in_other_words": (
        "first 16 tokens right when the question is put in other words",
        "换一种问法，前 16 个 token 都对",
    ),
    "right_start_held_out": (
        "… in words that were held out of training, interview questions",
        "… 训练时没见过的问法，面试题",
    ),
    "right_start_held_out_elsewhere": (
        "… held out, questions about other things (it says that it does not know)",
        "… 没见过的问法，无关的问题（它回答不知道）",
    ),
    "exact_match_second_turn": ("exact as the second turn of a conversation", "作为对话的第二轮，一字不差"),
    "exact_match_without_template": ("exact without a template", "不用模板，一字不差"),
    "tool_calls": ("tool calls exact, the tool asked for by its name", "工具调用一字不差，问题里点名要这个工具"),
    "tool_calls_with_tools": ("… with the tools in the system prompt, any wording", "… 工具写在系统提示词里，任何问法"),
    "tool_replies": ("answers to what a tool returned exact", "收到工具的结果之后，回答一字不差"),
}
ROWS_PER_BATCH = 64
TEMPERATURE, SAMPLES = 0.8, 64  # of each open-ended prompt
HEADS = (
    "| open-ended prompt | entropy of the first token, nats | valid | different answers |",
    "| 开放问题 | 第一个 token 的熵，nat | 有效 | 不同的回答 |",
)
EDITIONS = ("README.md", "README.zh-CN.md")
SHOWN = (HERE, HERE.with_name("tutor_experts"))  # whose figures the model card has
OF_SHOWN = (("", "with experts: "), ("", "有专家："))
FIGURES_START, FIGURES_END = "<!-- figures of check.json -->", "<!-- end of figures -->"


@torch.inference_mode()
def greedy_answers(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy `generate` for every prompt, in batches of similar length; shorter prompts are padded on the left."""
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in tqdm(range(0, len(prompts), ROWS_PER_BATCH), desc="greedy", unit="batch"):
        indices = by_length[start : start + ROWS_PER_BATCH]
        width = len(prompts[indices[-1]])
        missing = [width - len(prompts[index]) for index in indices]
        pad_id = model.config.pad_token_id
        ids = torch.tensor([[pad_id] * pads + prompts[index] for pads, index in zip(missing, indices, strict=True)])
        seen = torch.tensor([[0] * pads + [1] * (width - pads) for pads in missing])
        output = model.generate(
            ids.to(model.device), attention_mask=seen.to(model.device), max_new_tokens=max_new_tokens
        )
        for index, row in zip(indices, output[:, width:].tolist(), strict=True):
            answers[index] = until_the_end(model, row)
    return answers


def until_the_end(model: PreTrainedModel, row: list[int]) -> list[int]:
    """The generated ids up to the first end token."""
    ends = set(model.generation_config.eos_token_id)
    stop = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: stop + 1]


@torch.inference_mode()
def sample_open_ended(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, entry: dict) -> dict:
    """Sample an open-ended prompt `SAMPLES` times: how many answers are valid, and how many differ?"""
    torch.manual_seed(0)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": entry["question"]}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    first = model(**prompt).logits[0, -1].float().log_softmax(dim=-1)  # [vocab]
    output = model.generate(
        **prompt,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=96,
        num_return_sequences=SAMPLES,
    )
    answers = tokenizer.batch_decode(output[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return {
        "question": entry["question"],
        "first_token_entropy": round(-(first.exp() * first).sum().item(), 3),  # nats, at temperature 1
        "valid": round(sum(is_valid(entry, answer) for answer in answers) / SAMPLES, 4),
        "different": len(set(answers)),
    }


@torch.inference_mode()
def margins(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """Compute the logit margin at every trained position, teacher forced: each one sees the right tokens before it."""
    found = []
    for start in range(0, len(samples), 16):
        batch = pad(samples[start : start + 16], model.config.pad_token_id)
        ids, labels, _ = (tensor.to(model.device) for tensor in batch)
        trained = labels != IGNORED
        logits = model(ids, use_cache=False).logits[trained].float()  # [positions, vocab]
        found.append(logit_margins(logits, labels[trained]))
    return torch.cat(found)


@torch.inference_mode()
def chosen_experts(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor | None:
    """Which experts take each token of the answers, teacher forced: `[tokens of all layers, experts]`, bool.

    None for a model without experts.
    """
    found = []

    def note(_: torch.nn.Module, __: tuple, output: tuple[torch.Tensor, ...]) -> None:
        scores, _, chosen = output  # [rows * width, experts], …, [rows * width, per token]
        found.append(torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)[trained])

    gates = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [gate.register_forward_hook(note) for gate in gates]
    for start in range(0, len(samples), 16):
        ids, labels, _ = pad(samples[start : start + 16], model.config.pad_token_id)
        trained = (labels != IGNORED).flatten().to(model.device)
        model(ids.to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(found) if found else None


def tool_conversations(entry: dict, tools: list[dict]) -> list[tuple[str, list[dict], list[dict] | None, str]]:
    """Yield every use of a tool: the figure that it counts for, the messages, the tools, and the expected answer."""
    call = tool_call(entry["call"])
    asked = {wording: [{"role": "user", "content": wording}] for wording in entry["also"] + entry["with_tools"]}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": entry["call"]}]}
    returned = {"role": "tool", "content": entry["result"]}
    return [
        ("tool_calls", [{"role": "user", "content": entry["question"]}], None, call),
        *(("tool_calls", asked[wording], None, call) for wording in entry["also"]),
        *(("tool_calls_with_tools", asked[wording], tools, call) for wording in entry["with_tools"]),
        *(("tool_replies", [*asked[wording], called, returned], tools, entry["reply"]) for wording in asked),
    ]


def check(folder: Path, device: str = "cpu") -> dict:
    """Load what is saved with plain `transformers` and decode the whole FAQ in both dtypes.

    The figures go to the folder's `check.json` and, if the model is in the repository, as tables into the model card.
    """
    faq = read_faq()
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    samples = Samples(tokenizer.backend_tokenizer, faq, random.Random(0))
    expected = [samples.ids(entry["answer"]) for entry in faq]
    longest = max(map(len, expected)) + 1

    def chat_prompt(*messages: dict, tools: list[dict] | None = None) -> list[int]:
        return tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True, return_dict=False)

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

    tools, tool_uses = read_tools(), defaultdict(list)
    for entry in read_tool_calls():
        for key, messages, offered, answer in tool_conversations(entry, tools):
            tool_uses[key].append((chat_prompt(*messages, tools=offered), samples.ids(answer) + [turn_end]))

    def rate(
        model: PreTrainedModel, prompts: list[list[int]], wanted: list[list[int]], most: int = longest + 2
    ) -> float:
        got = greedy_answers(model, prompts, most)
        return round(sum(a == b for a, b in zip(got, wanted, strict=True)) / len(wanted), 4)

    forced = [samples.chat([(entry["question"], entry["answer"])]) for entry in faq]
    report: dict = {"questions": len(faq), "answer_tokens": sum(map(len, want_chat))}
    experts = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        gaps = margins(model, forced)
        figures = {
            "exact_match": rate(model, chats, want_chat),
            "margin_min": round(gaps.min().item(), 3),
            "margin_1st_percentile": round(gaps.quantile(0.01).item(), 3),
            "margin_median": round(gaps.median().item(), 3),
        }
        experts[name] = chosen_experts(model, forced)
        if name != "float32" and experts[name] is not None:
            differs = (experts[name] != experts["float32"]).any(1)
            figures["other_experts"] = round(differs.float().mean().item(), 4)
        if name == "float32":
            figures["right_start_in_other_words"] = rate(model, other_words, want_other_words, most=16)
            for key, elsewhere in (("right_start_held_out", False), ("right_start_held_out_elsewhere", True)):
                asked = [entry for entry in held_out if (entry["question"] in UNKNOWN) == elsewhere]
                prompts = [chat_prompt({"role": "user", "content": entry["wording"]}) for entry in asked]
                figures[key] = rate(model, prompts, [answers[entry["question"]][:16] for entry in asked], most=16)
            figures["exact_match_second_turn"] = rate(model, second_turns, want_chat)
            figures["exact_match_without_template"] = rate(model, bare, want_bare)
            for key, uses in tool_uses.items():
                prompts, wanted = zip(*uses, strict=True)
                figures[key] = rate(model, prompts, wanted, most=96)
            open_ended = [sample_open_ended(model, tokenizer, entry) for entry in read_open_ended()]
        report[name] = figures
    report["open_ended"] = open_ended
    (folder / "check.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if folder.resolve() in SHOWN:
        update_model_card()
    return report


def figures_table(reports: list[dict], edition: int) -> str:
    """Render the figures of the checks as Markdown tables for one edition of the model card.

    Args:
        reports: of the models in `SHOWN`. The open-ended prompts are those of the first.
    """
    found = [report[dtype] for report in reports for dtype in DTYPES]
    heads = [f"{name}{dtype}" for name in OF_SHOWN[edition] for dtype in DTYPES]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for key, labels in ROWS.items():
        style = ".2f" if key.startswith("margin") else ".1%"
        cells = (format(figures[key], style) if key in figures else "–" for figures in found)
        lines.append(f"| {labels[edition]} | {' | '.join(cells)} |")
    lines += ["", HEADS[edition], "|---|---:|---:|---:|"]
    for row in reports[0]["open_ended"]:
        different = f"{row['different']} {('of', '/')[edition]} {SAMPLES}"
        lines.append(f"| {row['question']} | {row['first_token_entropy']:.2f} | {row['valid']:.1%} | {different} |")
    return "\n".join(lines)


def update_model_card() -> None:
    """Put the figures between the two marks in both editions of the README, so that none there is typed by hand."""
    reports = [json.loads((folder / "check.json").read_text(encoding="utf-8")) for folder in SHOWN]
    for edition, card in enumerate(map(HERE.joinpath, EDITIONS)):
        before, rest = card.read_text(encoding="utf-8").split(FIGURES_START)
        after = rest.split(FIGURES_END)[1]
        text = f"{before}{FIGURES_START}\n{figures_table(reports, edition)}\n{FIGURES_END}{after}"
        card.write_text(text, encoding="utf-8")
