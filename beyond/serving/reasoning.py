"""Tell what a model thinks from what it answers: Qwen3 and others write `<think>…</think>` in front of the answer.

A stream's pieces may end inside a mark, so text that may yet turn out to be the beginning of one is held back. An
answer that is complete goes through the same code, in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<think>", "</think>"
PARSERS = ("qwen3",)  # vLLM's name


@dataclass(frozen=True)
class ChatOptions:
    """What a server does with chats.

    Attributes:
        template_kwargs: arguments of the chat template; those of a request win.
        reasoning_parser: one of `PARSERS`, or None, which leaves answers as the model wrote them.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_parser: str | None = None


class ReasoningSplit:
    """Splits one answer.

    Args:
        prompt: its last characters: a template may have written the first mark itself.
    """

    def __init__(self, prompt: str) -> None:
        self._reasons: bool | None = prompt.rstrip().endswith(BEGIN) or None  # None: the answer has not begun
        self._held = ""  # text that is not told yet

    def feed(self, text: str, ends: bool) -> tuple[str, str]:
        """Take in the next text; returns what is new in the reasoning and in the answer.

        Args:
            ends: whether nothing comes behind it.
        """
        self._held += text
        reasoning = ""
        if self._reasons is None:
            begun = self._held.lstrip()
            if BEGIN.startswith(begun) and begun != BEGIN and not ends:
                return "", ""
            self._reasons = begun.startswith(BEGIN)
            self._held = begun.removeprefix(BEGIN) if self._reasons else self._held
        if self._reasons:
            reasoning, mark, rest = self._held.partition(END)
            if not mark:
                sure = len(reasoning) if ends else len(reasoning) - _beginning_of_mark(reasoning)
                self._held = reasoning[sure:]
                return reasoning[:sure], ""
            self._reasons, self._held = False, rest
        answer, self._held = self._held, ""
        return reasoning, answer


def _beginning_of_mark(text: str) -> int:
    """How many characters at the end of a text may begin the mark of the end."""
    return next(length for length in range(len(END), -1, -1) if text.endswith(END[:length]))
