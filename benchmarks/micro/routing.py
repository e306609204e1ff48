"""Routing: the experts that a trained model with experts chooses, over all answers of the FAQ and in one of them.

    python -m benchmarks.micro routing      # counted; the model is `models/tutor_experts`

The engine reads every question with its answer in one step, and the choices of the answer's tokens are counted, by
layer, expert and language. Then it answers several questions together, and the experts that a layer's step touches are
counted, as `experts` counts them for a router without preferences.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.patches import Patch

from benchmarks.micro import with_engine
from benchmarks.pictures.picture import BLUE, ORANGE, SKY, Picture, new_figure, plain
from beyond import LLM, SamplingParams
from beyond.experts.floor import expected_touched
from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode

MODEL = TUTOR_PATH.parent / "tutor_experts"
OPTIONS = {"device": "cpu", "dtype": "float32", "enable_prefix_caching": False}
QUESTION, SHOWN = "What is a KV cache?", 30  # the answer in the picture, and how many of its tokens
REQUESTS, STEPS = (1, 2, 4, 8, 16, 32), 16  # that are answered together; the steps that are counted
FIGURES = "beyond/experts/figures"

Choices = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]  # by layer, of each step: weights and experts of its rows


def measure(model: Path = MODEL, requests: tuple[int, ...] = REQUESTS) -> dict:
    """Count the choices of one answer (`answer`), of all answers (`rows`), and of steps of several (`steps`)."""
    return with_engine(lambda llm: count(llm, requests), LLM, str(model), **OPTIONS)


def count(llm: LLM, requests: tuple[int, ...]) -> dict:
    experts = llm.runtime.model.layers[0].mlp.experts
    choices: dict[tuple[int, int, str], int] = {}
    answer: dict[str, Any] = {}
    for entry in read_faq():
        prompt, text = encode(llm.tokenizer, entry["question"]), llm.tokenizer.encode(entry["answer"])
        with choices_of(llm) as found:
            llm.generate([prompt + text], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        for layer, [(_, chosen)] in found.items():
            for expert in chosen[len(prompt) :].flatten().tolist():
                key = layer, expert, entry["lang"]
                choices[key] = choices.get(key, 0) + 1
        if entry["question"] == QUESTION:
            tokens = [llm.tokenizer.decode(token) for token in text]
            own = [chosen[len(prompt) :].tolist() for [(_, chosen)] in found.values()]
            answer = {"tokens": tokens, "experts": own}  # [layers][tokens][per token], the largest weight first
    layers, languages = range(len(llm.runtime.model.layers)), sorted({lang for _, _, lang in choices})
    rows = [
        {"layer": layer, "expert": expert, "lang": lang, "choices": choices.get((layer, expert, lang), 0)}
        for layer in layers
        for expert in range(experts.count)
        for lang in languages
    ]
    steps = [
        {
            "requests": n,
            "touched": touched(llm, n, max(requests)),
            "uniform": expected_touched(experts.count, experts.per_token, n),
        }
        for n in requests
    ]
    return {"experts": experts.count, "per_token": experts.per_token, "answer": answer, "rows": rows, "steps": steps}


def touched(llm: LLM, requests: int, questions: int) -> float:
    """Return the different experts per layer in a decode step of this many requests, on average."""
    entries = random.Random(0).sample(read_faq(), questions)
    prompts = [encode(llm.tokenizer, entry["question"]) for entry in entries]
    params = SamplingParams(temperature=0.0, max_tokens=1 + STEPS, ignore_eos=True)
    with choices_of(llm) as found:
        for first in range(0, questions, requests):
            llm.generate(prompts[first : first + requests], params, use_tqdm=False)
    counts = [len(chosen.unique()) for steps in found.values() for _, chosen in steps if len(chosen) == requests]
    return sum(counts) / len(counts)


@contextmanager
def choices_of(llm: LLM) -> Iterator[Choices]:
    """Collect what every layer's router chooses in every step."""
    layers = [layer.mlp for layer in llm.runtime.model.layers]
    before, found = [mlp.compute for mlp in layers], {}

    def note(layer: int) -> Any:
        def compute(
            mlp: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, residual: torch.Tensor
        ) -> Any:
            found.setdefault(layer, []).append((weights, chosen))
            return before[layer](mlp, x, weights, chosen, residual)

        return compute

    for i, mlp in enumerate(layers):
        mlp.compute = note(i)
    try:
        yield found
    finally:
        for mlp, compute in zip(layers, before, strict=True):
            mlp.compute = compute


def shares(rows: list[dict], layer: int, languages: tuple[str, ...] = ("en", "zh")) -> list[float]:
    """Return each expert's share of a layer's choices in these languages, in percent."""
    counts: dict[int, int] = {}
    for row in rows:
        if row["layer"] == layer and row["lang"] in languages:
            counts[row["expert"]] = counts.get(row["expert"], 0) + row["choices"]
    return [100 * choices / sum(counts.values()) for choices in counts.values()]


def draw(results: list[dict]) -> dict[str, Picture]:
    result = results[0]
    return {f"{FIGURES}/routing.svg": draw_answer(result), f"{FIGURES}/shares.svg": draw_shares(result)}


def draw_answer(result: dict) -> Picture:
    """Draw the experts of the first tokens of an answer: a row per expert, a column per token, a panel per layer."""
    tokens, count = result["answer"]["tokens"][:SHOWN], result["experts"]
    figure = new_figure(8.4, 5.2)
    panels = figure.subplots(len(result["answer"]["experts"]), 1, sharex=True)
    for layer, (axes, chosen) in enumerate(zip(panels, result["answer"]["experts"], strict=True)):
        for column, experts in enumerate(chosen[: len(tokens)]):
            for expert, colour in zip(experts, (BLUE, SKY), strict=True):
                axes.broken_barh([(column - 0.42, 0.84)], (expert - 0.42, 0.84), color=colour, linewidth=0)
        axes.set(ylim=(count - 0.4, -0.6), xlim=(-0.6, len(tokens) - 0.4), yticks=range(count))
        axes.set_ylabel(f"expert of layer {layer + 1}")
        plain(axes, "x")
    words = [f"·{token[1:]}" if token.startswith(" ") else token.replace("\n", "↵") for token in tokens]
    panels[-1].set_xticks(range(len(tokens)), words, rotation=90)
    handles = [Patch(color=BLUE, label="larger weight"), Patch(color=SKY, label="smaller weight")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        f"Each token of an answer goes to {result['per_token']} of {count} experts in every layer", fontsize=12
    )
    return Picture(figure, "the experts that take the first tokens of one answer, in every layer")


def draw_shares(result: dict) -> Picture:
    """Draw each expert's share of the choices of all answers, by layer and language, next to a uniform share."""
    rows, count = result["rows"], result["experts"]
    layers = sorted({row["layer"] for row in rows})
    uniform = 100 / count
    figure = new_figure(8.4, 3.6)
    for layer, axes in zip(layers, figure.subplots(1, len(layers), sharey=True), strict=True):
        for lang, colour, left in (("en", BLUE, -0.4), ("zh", ORANGE, 0.0)):
            places = [expert + left for expert in range(count)]
            label = {"en": "English answers", "zh": "Chinese answers"}[lang]
            axes.bar(places, shares(rows, layer, (lang,)), 0.4, align="edge", color=colour, label=label)
        axes.axhline(uniform, color="black", linestyle="--", label=f"uniform: {uniform:.1f} %")
        axes.set(xticks=range(count), xlabel=f"expert of layer {layer + 1}")
        plain(axes)
    figure.axes[0].set_ylabel("% of the layer's choices")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    every = [share for layer in layers for share in shares(rows, layer)]
    top = max(share for layer in layers for lang in ("en", "zh") for share in shares(rows, layer, (lang,)))
    figure.suptitle(
        f"An expert takes {min(every):.0f} to {max(every):.0f} % of a layer's choices, "
        f"but up to {top:.0f} % of those in one language",
        fontsize=12,
    )
    return Picture(figure, "each expert's share of the tokens of all answers, by layer and language")
