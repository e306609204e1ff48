"""How much of the vocabulary an answer may go on with, token by token, and which tokens a mask took away."""

from __future__ import annotations

from collections import deque
from functools import reduce
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.pictures.picture import BLUE, ORANGE, Picture, new_figure
from beyond.structured import loop
from stage_a_naive.loop import encode


class Choice(NamedTuple):
    """A token of an answer: its text, the one that the model liked best, and how many could come."""

    text: str
    wanted: str
    num_allowed: int


def record_choices(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...], question: str, pattern: str
) -> list[Choice]:
    """Answer a question in a form, greedily, and note what each mask left."""
    prompt, eos_id = encode(tokenizer, question), tokenizer.eos_token_id
    ids = loop.generate(model, prompt, eos_id, texts, pattern, constrained=True)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    state, choices = loop.parse(deque(pattern)), []
    for token_id, best in zip(ids, wanted, strict=True):
        allowed = int(loop.mask(state, texts, eos_id).sum())
        choices.append(Choice(tokenizer.decode([token_id]), tokenizer.decode([best]), allowed))
        state = reduce(loop.after, texts[token_id], state)
    return choices


def draw_choices(choices: list[Choice]) -> Picture:
    """A bar per token of the answer: how many tokens could come. Orange is where the model liked another one best."""
    pushed = [choice.text != choice.wanted for choice in choices]
    figure = new_figure(10, 3.2)
    axes = figure.subplots()
    heights = [choice.num_allowed for choice in choices]
    axes.bar(range(len(choices)), heights, color=[ORANGE if other else BLUE for other in pushed])
    for i, choice in enumerate(choices):
        axes.text(i, choice.num_allowed, f" {choice.num_allowed}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(choices)), [choice.text.replace(" ", "·") for choice in choices], family="monospace")
    axes.tick_params(axis="x", rotation=45, labelsize=9)
    axes.set(ylabel="tokens that may come", ylim=(0, max(heights) * 1.15))
    title = f"The mask changed {sum(pushed)} of {len(choices)} tokens (orange): the others the model liked best anyway"
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return Picture(figure, "tokens that may come at each token of an answer, and where the mask changed the choice")
