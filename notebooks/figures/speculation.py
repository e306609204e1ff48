"""Which tokens of an answer were guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from benchmarks.pictures.picture import GREEN, GREY, Picture
from beyond.speculation import LLM
from figures.canvas import new_canvas
from stage_a_naive.chat import render_chat
from stage_a_naive.sampling import SamplingParams

WIDTH = 96  # characters in a line


class Step(NamedTuple):
    """The tokens that a step gave, as text: last the one that it sampled, before it the guesses that were right."""

    pieces: list[str]
    num_drafted: int
    num_right: int

    @property
    def first_guess(self) -> int:
        """The index of the first guess that was right. Before it may be a token that was still in flight.

        The step samples no token behind a guess that ends the answer.
        """
        return max(0, len(self.pieces) - 1 - self.num_right)


def record_steps(llm: LLM, messages: list[dict[str, str]], max_tokens: int = 120) -> list[Step]:
    """Answer a conversation greedily, step by step."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    request_id = llm.add_request(render_chat(llm.tokenizer, messages), params)
    sequence = llm.engine.scheduler.find(request_id)
    steps, known = [], len(sequence)
    while not llm.is_finished():
        before = replace(llm.engine.counters)
        llm.step()
        ids, known, now = sequence.token_ids[known:], len(sequence.token_ids), llm.engine.counters
        if ids:
            drafted = now.num_draft_tokens - before.num_draft_tokens
            right = now.num_accepted_tokens - before.num_accepted_tokens
            steps.append(Step([llm.tokenizer.decode([token_id]) for token_id in ids], drafted, right))
    return steps


def draw_tokens(steps: list[Step]) -> Picture:
    """The answer as text: what was guessed right has a green ground, what its step sampled a grey one."""
    placed: list[tuple[int, int, str, str]] = []  # line, column, text, colour
    line = column = 0
    for step in steps:
        for i, piece in enumerate(step.pieces):
            text = piece.replace("\n", "↵")
            if column + len(text) > WIDTH:
                line, column = line + 1, 0
            placed.append((line, column, text, GREEN if 0 <= i - step.first_guess < step.num_right else GREY))
            line, column = (line + 1, 0) if "\n" in piece else (line, column + len(text))
    figure, axes = new_canvas(10, 0.28 * (line + 1) + 0.5, xlim=(0, WIDTH), ylim=(line + 0.6, -0.6))
    for line_of, column_of, text, colour in placed:
        axes.barh(line_of, len(text) - 0.12, left=column_of, height=0.8, color=colour, alpha=0.35)
        axes.text(column_of, line_of, text, family="monospace", fontsize=9.2, va="center")
    right, tokens = sum(step.num_right for step in steps), sum(len(step.pieces) for step in steps)
    axes.set_title(f"{right} of {tokens} tokens were guessed (green): {len(steps)} steps", fontsize=11, loc="left")
    return Picture(figure, "an answer, with the tokens that were guessed right in colour")
