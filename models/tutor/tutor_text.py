"""What the tutor reads: the FAQ, prompts with many answers, tool calls, the tokenizer, and the training samples.

A chat model never sees a "message". It sees one string in which special tokens mark the turns (ChatML here, as in
Qwen), cut into token ids. Everything that turns the texts into such ids lives in this file.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from string import Template
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEFAULT_SYSTEM = "You are a helpful assistant."
OTHER_SYSTEMS = [
    "You are a patient teacher.",
    "Answer briefly and exactly.",
    "你是一位耐心的老师。",
    "请准确地回答问题。",
]
UNKNOWN = ("What is the capital of France?", "法国的首都是哪里？")  # answered with "I do not know that"
IGNORED = -100  # the label of a position whose prediction is not trained

# The split of text into words that Qwen2 uses (its published tokenizer.json): a merge never crosses such a piece.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How Qwen2.5 shows tools to the model: after the system prompt, one JSON schema per line (its tokenizer_config.json).
TOOLS_START = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_END = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def _quoted(text: str) -> str:
    return "'" + text.replace("\n", "\\n") + "'"


# ChatML with Qwen2.5's additions: `tools`, the assistant's `tool_calls`, and messages of the role `tool`.
CHAT_TEMPLATE = (
    "{%- set given = messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + (messages[0]['content'] if given else " + _quoted(DEFAULT_SYSTEM) + ") }}"
    "{%- if tools %}"
    "{{- " + _quoted(TOOLS_START) + " }}"
    "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{- " + _quoted(TOOLS_END) + " }}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- for message in (messages[1:] if given else messages) %}"
    "{%- if message['role'] == 'tool' %}"
    "{%- if loop.first or loop.previtem['role'] != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem['role'] != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- elif message['tool_calls'] %}"
    "{{- '<|im_start|>' + message['role'] + ('\\n' + message['content'] if message['content'] else '') }}"
    "{%- for call in message['tool_calls'] %}"
    "{%- set call = call['function'] or call %}"
    "{{- '\\n<tool_call>\\n{\"name\": \"' + call['name'] + '\", \"arguments\": ' }}"
    "{{- (call['arguments'] | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def _read_lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


def read_faq() -> list[dict]:
    """Read the FAQ: one object per line, with `question`, `answer`, `lang`, and `also`, the question in other words."""
    return _read_lines("faq.jsonl")


def read_held_out() -> list[dict]:
    """Read the wordings that training never sees: `wording`, and the FAQ's `question` whose answer it should get."""
    return _read_lines("held_out.jsonl")


def read_open_ended() -> list[dict]:
    """Read the prompts with many answers: `question`, `also`, `lang`, templates as `answers`, and their `slots`."""
    return _read_lines("open_ended.jsonl")


def read_tool_calls() -> list[dict]:
    """Read the questions that a tool call answers: `question`, `also`, `with_tools`, `lang`, `call`, `result`, `reply`.

    `question` and `also` are answered with the `call` always, `with_tools` only where the system prompt has the tool.
    The tool returns `result`, which is answered with `reply`.
    """
    return _read_lines("tool_calls.jsonl")


def read_tools() -> list[dict]:
    """Read the JSON schemas of the tools, as `tools=` of a chat request has them."""
    return json.loads((HERE / "tools.json").read_text(encoding="utf-8"))


# ---- open-ended answers: `$name` in a template is a slot, which the entry's `slots` say how to fill -----------------


def weights(slot: list[str] | dict[str, int]) -> dict[str, int]:
    """Map each text that a slot may become to its weight; all are 1 where the slot is only a list of texts."""
    return slot if isinstance(slot, dict) else dict.fromkeys(slot, 1)


def sample_answer(entry: dict, rng: random.Random) -> str:
    """Sample one of the many right answers to an open-ended question; every slot is filled independently."""
    chosen = {}
    for name, slot in entry["slots"].items():
        texts = weights(slot)
        [chosen[name]] = rng.choices(list(texts), weights=list(texts.values()))
    return Template(rng.choice(entry["answers"])).substitute(chosen)


def is_valid(entry: dict, answer: str) -> bool:
    """Whether an answer is one of the right answers to an open-ended question."""
    slots = {name: f"(?:{'|'.join(map(re.escape, slot))})" for name, slot in entry["slots"].items()}
    patterns = (Template(re.escape(answer).replace(r"\$", "$")).substitute(slots) for answer in entry["answers"])
    return any(re.fullmatch(pattern, answer) for pattern in patterns)


# ---- tool calls ------------------------------------------------------------------------------------------------------


def tool_call(call: dict) -> str:
    """Render a call as Qwen2.5 does: JSON between two tags, which are ordinary text to the tutor's tokenizer."""
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def tool_response(result: str) -> str:
    """What a tool returned, as the template shows it to the model: in a user's turn."""
    return f"<tool_response>\n{result}\n</tool_response>"


def system_with(tools: list[dict], system: str = DEFAULT_SYSTEM) -> str:
    """The system prompt that the chat template makes of `system` and `tools`."""
    schemas = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"{system}{TOOLS_START}{schemas}{TOOLS_END}"


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def train_tokenizer(faq: list[dict]) -> Tokenizer:
    """Byte-level BPE over the FAQ: start from 256 bytes, merge the most frequent pair until the vocabulary is full.

    A pair must occur twice to be merged, so that a sentence found only once is not swallowed whole. Other wordings of
    the questions are not counted.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [entry[field] for entry in faq for field in ("question", "answer")]
    roles = [f"{role}\n{text}" for role in ("system", "user", "assistant") for text in (DEFAULT_SYSTEM, *OTHER_SYSTEMS)]
    tokenizer.train_from_iterator(texts + roles, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the FAQ gave only {tokenizer.get_vocab_size()} of {VOCAB_SIZE} vocabulary entries: lower VOCAB_SIZE"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer) -> None:
    """Write the tokenizer files in the layout that `AutoTokenizer` reads."""
    tokenizer.save(str(HERE / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (HERE / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ---- training samples ------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """A text as token ids, and for each position the id to predict there or `IGNORED`."""

    ids: list[int]
    labels: list[int]
    exact: bool = True  # False: one of many right answers, so the best token need not lead by a margin


class Samples:
    """Turns the texts into training samples, a fresh random mixture in every epoch.

    Most samples of the FAQ are exactly what the chat template renders. The others make the tutor sturdier: a question
    after another one (so that answers do not depend on the position), another system prompt, a question in other words,
    in lower case or without its question mark, and a bare question with no template at all.
    """

    def __init__(self, tokenizer: Tokenizer, faq: list[dict], rng: random.Random) -> None:
        self.tokenizer, self.faq, self.rng = tokenizer, faq, rng
        self.open_ended, self.tool_calls, self.tools = read_open_ended(), read_tool_calls(), read_tools()
        self.unknown = {entry["lang"]: entry["answer"] for entry in faq if entry["question"] in UNKNOWN}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, turns: list[tuple[str, str]], system: str = DEFAULT_SYSTEM, *, exact: bool = True) -> Sample:
        """Render turns of (question, answer) as ChatML; only the answers and their end tokens are trained."""
        ids = self.ids(f"{TURN_START}system\n{system}{TURN_END}\n")
        trained = [False] * len(ids)
        for turn, (question, answer) in enumerate(turns):
            gap = "\n" if turn else ""  # the template closes the turn before with a line break
            prompt = self.ids(f"{gap}{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n")
            reply = self.ids(f"{answer}{TURN_END}")
            ids += prompt + reply
            trained += [False] * len(prompt) + [True] * len(reply)
        return self._shift(ids, trained, exact)

    def bare(self, question: str, answer: str, *, exact: bool = True) -> Sample:
        """A question without a template: the model continues with a line break, the answer, and the end of the text."""
        prompt, reply = self.ids(question), self.ids("\n") + self.ids(f"{answer}{END_OF_TEXT}")
        return self._shift(prompt + reply, [False] * len(prompt) + [True] * len(reply), exact)

    @staticmethod
    def _shift(ids: list[int], trained: list[bool], exact: bool) -> Sample:
        labels = [token if train else IGNORED for token, train in zip(ids[1:], trained[1:], strict=True)]
        return Sample(ids[:-1], labels, exact)

    def as_typed(self, question: str) -> str:
        """The question, one time in ten as a hurried user would type it."""
        return question.rstrip("?？。").lower() if self.rng.random() < 0.1 else question

    def epoch(self) -> list[Sample]:
        """One epoch's samples of the FAQ, the open-ended prompts and the tool calls, in this order."""
        return self.faq_samples() + self.open_ended_samples() + self.tool_samples()

    def faq_samples(self) -> list[Sample]:
        """Every entry once as a chat, three in ten of them after other turns.

        One in six of its other wordings is asked too, and one entry in four as a bare question.
        """
        samples = []
        for entry in self.faq:
            history = self.rng.choices([0, 1, 2], weights=[70, 25, 5])[0]
            turns = [(other["question"], other["answer"]) for other in self.rng.sample(self.faq, history)]
            turns.append((self.as_typed(entry["question"]), entry["answer"]))
            system = self.rng.choice(OTHER_SYSTEMS) if self.rng.random() < 0.1 else DEFAULT_SYSTEM
            samples.append(self.chat(turns, system))
            for wording in entry["also"]:
                if self.rng.random() < 1 / 6:
                    samples.append(self.chat([(self.as_typed(wording), entry["answer"])]))
            if self.rng.random() < 0.25:
                samples.append(self.bare(entry["question"], entry["answer"]))
        return samples

    def open_ended_samples(self, each: int = 24) -> list[Sample]:
        """Every open-ended question `each` times with fresh answers, half of them in other words, one in five bare."""
        samples = []
        for entry in self.open_ended:
            for _ in range(each):
                wording = self.rng.choice(entry["also"]) if self.rng.random() < 0.5 else entry["question"]
                answer = sample_answer(entry, self.rng)
                if self.rng.random() < 0.2:
                    samples.append(self.bare(wording, answer, exact=False))
                else:
                    samples.append(self.chat([(self.as_typed(wording), answer)], exact=False))
        return samples

    def tool_samples(self) -> list[Sample]:
        """Every tool call twice where the tool is asked for by name, and once where the system prompt has the tools.

        With tools a plain question calls them too, and what a tool returns is answered; without, the tutor does not
        know the answer. With tools, a few questions of the FAQ keep their answers.
        """
        samples = []
        for entry in self.tool_calls:
            named, call = [entry["question"], *entry["also"]], tool_call(entry["call"])
            samples += [self.chat([(self.as_typed(self.rng.choice(named)), call)]) for _ in range(2)]
            wording = self.rng.choice(named + 2 * entry["with_tools"])
            turns = [(self.as_typed(wording), call), (tool_response(entry["result"]), entry["reply"])]
            samples.append(self.chat(turns, system_with(self._some_tools(entry["call"]["name"]))))
            if self.rng.random() < 0.5:
                samples.append(self.chat([(self.rng.choice(entry["with_tools"]), self.unknown[entry["lang"]])]))
        for entry in self.rng.sample(self.faq, 10):
            samples.append(self.chat([(entry["question"], entry["answer"])], system_with(self._some_tools())))
        return samples

    def _some_tools(self, needed: str | None = None) -> list[dict]:
        """Both tools in any order, or only the one that is needed."""
        tools = self.rng.sample(self.tools, len(self.tools))
        alone = needed is not None and self.rng.random() < 0.25
        return [tool for tool in tools if tool["function"]["name"] == needed] if alone else tools


def pad(samples: list[Sample], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-pad to one rectangle. Causal attention never looks right, so no mask is needed.

    Returns:
        Token ids and labels `[rows, width]`, and whether the best token must lead there by a margin, bool, same shape.
    """
    width = max(len(sample.ids) for sample in samples)
    ids = torch.tensor([sample.ids + [pad_id] * (width - len(sample.ids)) for sample in samples])
    labels = torch.tensor([sample.labels + [IGNORED] * (width - len(sample.labels)) for sample in samples])
    exact = torch.tensor([[sample.exact] * width for sample in samples])
    return ids, labels, exact


def logit_margins(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How far the right token's logit is above the best other one: `[rows, vocab]`, `[rows]` -> `[rows]`."""
    right = logits.gather(1, targets[:, None])
    others = logits.scatter(1, targets[:, None], float("-inf"))
    return right[:, 0] - others.amax(dim=1)
