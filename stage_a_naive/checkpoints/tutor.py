"""The embedded model: where it is, which questions it knows, and which of them are nearest to another question.

The tutor repeats one list of answers, continues a few open-ended prompts, and calls two tools. To any other question it
may give a fluent but wrong answer. So the command line warns about an unknown question and lists the nearest known
ones.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from stage_a_naive.contract.errors import ModelError

TUTOR_PATH = Path(__file__).resolve().parents[2] / "models" / "tutor"
SMALL_WORDS = re.compile(r"\b(a|an|the|is|are|of|do|does|what|please)\b|请|的|是|吗|呢")


def require_tutor() -> None:
    """Check that the embedded model is here.

    Raises:
        ModelError: this is a copy of the stages without the rest of the repository.
    """
    if not TUTOR_PATH.is_dir():
        raise ModelError(
            f"there is no {TUTOR_PATH}: an installed package has the stages alone, for models that are a directory or "
            "on the hub; the tutor, random: models and stage C's sources need a clone of the repository (git clone, "
            "then pip install -e . in it)"
        )


def read_faq() -> list[dict]:
    """Read the FAQ: `question`, `answer`, `lang`, and `also`, other wordings from the tutor's training."""
    return _read_lines("faq.jsonl")


def read_open_ended() -> list[dict]:
    """Read the questions with many correct answers: `question`, `also`, `lang`, and how the answers are made."""
    return _read_lines("open_ended.jsonl")


def read_tool_calls() -> list[dict]:
    """Read the questions that the tutor answers with a tool call: `question`, `also`, `lang`, and the `call`."""
    return _read_lines("tool_calls.jsonl")


def is_known(question: str, entries: list[dict]) -> bool:
    """Return whether the tutor was trained on this question; case, spaces and punctuation do not matter."""
    wanted = _letters(question)
    return any(wanted == _letters(wording) for entry in entries for wording in (entry["question"], *entry["also"]))


def nearest_questions(question: str, entries: list[dict], count: int = 3) -> list[str]:
    """Find the questions most similar to a question, best first; leave out those that share nothing with it.

    Two texts are compared by their pairs of neighbouring characters (Dice's coefficient). This works for English words,
    for Chinese, which has no spaces between words, and for typing errors.
    """
    wanted = _pairs(question)

    def likeness(text: str) -> float:
        found = _pairs(text)
        total = wanted.total() + found.total()
        return 2 * (wanted & found).total() / total if total else 0.0

    scores = {entry["question"]: max(map(likeness, (entry["question"], *entry["also"]))) for entry in entries}
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:count]
    return [text for text in best if scores[text] > 0.3]


def _read_lines(name: str) -> list[dict]:
    require_tutor()
    return [json.loads(line) for line in (TUTOR_PATH / name).read_text(encoding="utf-8").splitlines()]


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


def _pairs(text: str) -> Counter[str]:
    letters = _letters(SMALL_WORDS.sub(" ", text.casefold()))
    return Counter(letters[i : i + 2] for i in range(len(letters) - 1))
