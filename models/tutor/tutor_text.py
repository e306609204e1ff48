"""What the tutor reads: the FAQ, the tokenizer made from it, and the training samples.

A chat model never sees a "message". It sees one string in which special tokens mark the turns (ChatML here, as in
Qwen), cut into token ids. Everything that turns the FAQ into such ids lives in this file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

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
IGNORED = -100  # the label of a position whose prediction is not trained

# The split of text into words that Qwen2 uses (its published tokenizer.json): a merge never crosses such a piece.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\n" + DEFAULT_SYSTEM + "<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def read_faq() -> list[dict]:
    """Read the FAQ: one object per line, with `question`, `answer`, `lang`, and `also`, the question in other words."""
    return [json.loads(line) for line in (HERE / "faq.jsonl").read_text(encoding="utf-8").splitlines()]


def read_held_out() -> list[dict]:
    """Read the wordings that training never sees: `wording`, and the FAQ's `question` whose answer it should get."""
    return [json.loads(line) for line in (HERE / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]


def train_tokenizer(faq: list[dict]) -> Tokenizer:
    """Byte-level BPE over the FAQ: start from 256 bytes, merge the most frequent pair until the vocabulary is full.

    A pair must occur twice to be merged, so that a sentence found only once is not swallowed whole. Other wordings of
    the questions have no say in it.
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


Sample = tuple[list[int], list[int]]  # token ids, and for each position the id to predict there or IGNORED


class Samples:
    """Turns FAQ entries into training samples, a fresh random mixture in every epoch.

    Most samples are exactly what the chat template renders. The others make the tutor sturdier: a question after
    another one (so that answers do not depend on the position), another system prompt, a question in other words, in
    lower case or without its question mark, and a bare question with no template at all.
    """

    def __init__(self, tokenizer: Tokenizer, faq: list[dict], rng: random.Random) -> None:
        self.tokenizer, self.faq, self.rng = tokenizer, faq, rng

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, turns: list[tuple[str, str]], system: str = DEFAULT_SYSTEM) -> Sample:
        """Render turns of (question, answer) as ChatML; only the answers and their end tokens are trained."""
        ids = self.ids(f"{TURN_START}system\n{system}{TURN_END}\n")
        trained = [False] * len(ids)
        for turn, (question, answer) in enumerate(turns):
            gap = "\n" if turn else ""  # the template closes the turn before with a line break
            prompt = self.ids(f"{gap}{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n")
            reply = self.ids(f"{answer}{TURN_END}")
            ids += prompt + reply
            trained += [False] * len(prompt) + [True] * len(reply)
        return self._shift(ids, trained)

    def bare(self, question: str, answer: str) -> Sample:
        """A question without a template: the model goes on with a line break, the answer, and the end of the text."""
        prompt, reply = self.ids(question), self.ids("\n") + self.ids(f"{answer}{END_OF_TEXT}")
        return self._shift(prompt + reply, [False] * len(prompt) + [True] * len(reply))

    @staticmethod
    def _shift(ids: list[int], trained: list[bool]) -> Sample:
        return ids[:-1], [token if train else IGNORED for token, train in zip(ids[1:], trained[1:], strict=True)]

    def as_typed(self, question: str) -> str:
        """The question, one time in ten as a hurried user would type it."""
        return question.rstrip("?？。").lower() if self.rng.random() < 0.1 else question

    def epoch(self) -> list[Sample]:
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


def pad(samples: list[Sample], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad to one rectangle. Causal attention never looks right, so no mask is needed."""
    width = max(len(ids) for ids, _ in samples)
    ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in samples])  # [rows, width]
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in samples])  # [rows, width]
    return ids, labels


def logit_margins(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How far the right token's logit is above the best other one. [rows, vocab], [rows] -> [rows]"""
    right = logits.gather(1, targets[:, None])
    others = logits.scatter(1, targets[:, None], float("-inf"))
    return right[:, 0] - others.amax(dim=1)
