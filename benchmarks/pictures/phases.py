"""Prefill and decode, timed over the length of the prompt; and what a step costs with and without the KV cache."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.ticker import LogLocator

from benchmarks.pictures.picture import BLUE, GREEN, ORANGE, RED, Picture, finish, new_panel, new_panels
from stage_a_naive import LLM, SamplingParams
from stage_a_naive.outputs import synchronized_time

STEPS = 8  # decode steps per sample


@dataclass(frozen=True)
class PhaseTimes:
    """Medians in seconds, one for each length of the prompt."""

    lengths: list[int]
    prefill: list[float]  # the whole prompt
    decode: list[float]  # one token after it


def measure_phases(llm: LLM, lengths: Sequence[int], repeats: int = 3) -> PhaseTimes:
    """Time prefill and decode for random prompts of these lengths. The engine's own metrics say how long each took."""
    draw = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=1 + STEPS, ignore_eos=True)

    def sample(length: int) -> tuple[float, float]:
        prompt = [draw.randrange(llm.vocab_size) for _ in range(length)]
        metrics = llm.generate([prompt], params, use_tqdm=False)[0]["metrics"]
        return metrics["prefill_time"], metrics["tpot"]

    sample(lengths[0])  # the first run of anything is slow
    samples = [[sample(length) for _ in range(repeats)] for length in lengths]
    prefill, decode = ([statistics.median(s[i] for s in found) for found in samples] for i in range(2))
    return PhaseTimes(list(lengths), prefill, decode)


def draw_phases(times: PhaseTimes) -> Picture:
    """Left: the time of a prefill and of one decode step. Right: the same time for each token that it processed."""
    figure, (whole, per_token) = new_panels(
        10, 3.8, {"ylabel": "ms", "title": "time of a forward pass"},
        {"ylabel": "ms per token", "title": "time for each token in it"}, grid="both",
    )  # fmt: skip
    for axes in (whole, per_token):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.minorticks_off()
        axes.set_xticks(times.lengths, [str(n) for n in times.lengths])
        axes.set_xlabel("tokens in the prompt")
    whole.plot(times.lengths, [1e3 * t for t in times.prefill], "o-", color=ORANGE, label="prefill: all prompt tokens")
    whole.plot(times.lengths, [1e3 * t for t in times.decode], "s-", color=BLUE, label="decode: one token")
    whole.legend(frameon=False)
    each = [1e3 * t / n for t, n in zip(times.prefill, times.lengths, strict=True)]
    per_token.plot(times.lengths, each, "o-", color=ORANGE, label="prefill")
    per_token.plot(times.lengths, [1e3 * t for t in times.decode], "s-", color=BLUE, label="decode")
    return finish(figure, "prefill grows with the prompt, a decode step hardly; for each token, prefill is far cheaper")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of every step of one generation, done in two ways."""

    prompt_tokens: int
    cached: list[float]
    recomputed: list[float]


@torch.inference_mode()
def measure_recompute(llm: LLM, prompt_token_ids: list[int], num_tokens: int, repeats: int = 2) -> StepTimes:
    """Generate greedily with the KV cache and without it, the best of some repeats; raises if the tokens differ."""
    cached, recomputed, answers = [], [], []
    for _ in range(repeats):
        for use_cache, found in ((True, cached), (False, recomputed)):
            ids, times = _generate(llm, prompt_token_ids, num_tokens, use_cache)
            answers.append(ids)
            found.append(times)
    if any(ids != answers[0] for ids in answers):
        raise RuntimeError("the tokens with and without the cache differ: the cache must not change anything")
    best = [[min(step) for step in zip(*found, strict=True)] for found in (cached, recomputed)]
    return StepTimes(len(prompt_token_ids), *best)


def _generate(llm: LLM, prompt: list[int], num_tokens: int, use_cache: bool) -> tuple[list[int], list[float]]:
    ids, times, cache = list(prompt), [], None
    for _ in range(num_tokens):
        start = synchronized_time(llm.device)
        run = ids if cache is None else ids[-1:]
        input_ids = torch.tensor([run], device=llm.device)
        out = llm.model(input_ids=input_ids, past_key_values=cache, use_cache=use_cache, logits_to_keep=1)
        cache = out.past_key_values if use_cache else None
        ids.append(int(out.logits[0, -1].argmax()))
        times.append(synchronized_time(llm.device) - start)
    return ids, times


def draw_recompute(times: StepTimes) -> Picture:
    """The time of every step; the area under a line is the time of the whole answer."""
    factor = sum(times.recomputed) / sum(times.cached)
    title = f"{len(times.cached)} tokens: without a cache {factor:.1f} × the time"
    x_label = f"generated token (after a prompt of {times.prompt_tokens})"
    figure, axes = new_panel(8, 3.6, x_label, "ms per step", title)
    for name, steps, colour in (("without a cache", times.recomputed, RED), ("with the KV cache", times.cached, GREEN)):
        label = f"{name}: {sum(steps):.2f} s in all"
        axes.plot(range(1, len(steps) + 1), [1e3 * t for t in steps], color=colour, linewidth=1.5, label=label)
        axes.fill_between(range(1, len(steps) + 1), [1e3 * t for t in steps], color=colour, alpha=0.15)
    axes.set_ylim(0, 1.35e3 * max(times.recomputed))
    axes.legend(frameon=False, loc="upper left")
    return finish(figure, "without a cache every step takes longer than the one before; with it all take the same time")
