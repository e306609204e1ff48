"""Separate a model's reasoning from its answer: Qwen3 and others write `<think>…</think>` before the answer.

A stream's pieces may end inside a mark, so text that may be the beginning of a mark is held back. A complete answer
goes through the same code, as one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<think>", "</think>"
PARSERS = ("qwen3",)  # vLLM's name


@dataclass(frozen=True)
class ChatOptions:
    """A server's options of chats.

    Attributes:
        template_kwargs: arguments of the chat template; a request's take precedence.
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
        """Add the next text; returns the new parts of the reasoning and of the answer.

        Args:
            ends: whether this is the last text.
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
    """Count the characters at the end of a text that may begin the closing mark."""
    return next(length for length in range(len(END), -1, -1) if text.endswith(END[:length]))
