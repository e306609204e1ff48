"""Prefill against decode: the time of each, and the time per token in it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from benchmarks.pictures.picture import BLUE, ORANGE, Picture, draw_lines, new_panels
from stage_a_naive import LLM, SamplingParams

STEPS = 8  # decode steps per sample


def draw_phases(llm: LLM, lengths: Sequence[int]) -> Picture:
    """Left: the time of a prefill and of one decode step. Right: the same time for each token that it processed.

    The prompts of these lengths are random; the engine's own metrics say how long each phase took.
    """
    draw = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=1 + STEPS, ignore_eos=True)

    def sample(length: int) -> tuple[float, float]:
        prompt = [draw.randrange(llm.vocab_size) for _ in range(length)]
        metrics = llm.generate([prompt], params, use_tqdm=False)[0]["metrics"]
        return metrics["prefill_time"], metrics["tpot"]

    sample(lengths[0])  # the first run of anything is slow
    samples = {length: [sample(length) for _ in range(3)] for length in lengths}
    prefill, decode = (
        {n: 1e3 * statistics.median(times[i] for times in found) for n, found in samples.items()} for i in (0, 1)
    )
    figure, (whole, per_token) = new_panels(
        10,
        3.8,
        {"ylabel": "ms", "title": "time of a forward pass"},
        {"ylabel": "ms per token", "title": "time for each token in it"},
        grid="both",
    )
    each = {n: ms / n for n, ms in prefill.items()}
    words = ("prefill: all prompt tokens", "decode: one token")
    for axes, prefills, labels in ((whole, prefill, words), (per_token, each, ("prefill", "decode"))):
        draw_lines(axes, [(labels[0], prefills, ORANGE, "o-"), (labels[1], decode, BLUE, "s-")])
        axes.set_xlabel("tokens in the prompt")
    whole.legend(frameon=False)
    return Picture(
        figure, "prefill grows with the prompt, a decode step hardly; for each token, prefill is far cheaper"
    )
