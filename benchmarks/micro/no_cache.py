"""What the KV cache saves: the time of every step of one answer, without a cache and with it.

Both generate the same tokens, which is checked. A step without the cache runs the model over the whole text so far, so
the sum of the steps grows with the square of the length. A step's time is the smallest of several runs.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.micro import one_thread, take_turns
from benchmarks.pictures.picture import GREEN, RED, Picture, new_panel
from stage_a_naive import LLM
from stage_a_naive.contract.outputs import synchronized_time


@one_thread()
def measure(model: str = "tutor", prompt_tokens: int = 64, tokens: int = 256, repeats: int = 5) -> dict:
    """Measure the seconds of every step, cached and recomputed."""
    llm = LLM(model)
    prompt = [(7 * j) % llm.vocab_size for j in range(prompt_tokens)]
    return {"model": model, "repeats": repeats, "rows": [measure_recompute(llm, prompt, tokens, repeats)]}


@torch.inference_mode()
def measure_recompute(llm: LLM, prompt_token_ids: list[int], num_tokens: int, repeats: int = 2) -> dict:
    """Generate greedily with the KV cache and without it, in turns; raises if the tokens differ.

    Returns:
        `prompt_tokens`, and seconds of every step, `cached` and `recomputed`: the best of the repeats.
    """
    work = partial(_generate, llm, prompt_token_ids, num_tokens)
    runs = take_turns(work, ("cached", "recomputed"), repeats, warm_ups=0)
    if len({tuple(ids) for found in runs.values() for ids, _ in found}) > 1:
        raise RuntimeError("the tokens with and without the cache differ: the cache must not change anything")
    times = {way: zip(*(seconds for _, seconds in found), strict=True) for way, found in runs.items()}
    return {"prompt_tokens": len(prompt_token_ids), **{way: list(map(min, steps)) for way, steps in times.items()}}


def _generate(llm: LLM, prompt: list[int], num_tokens: int, way: str) -> tuple[list[int], list[float]]:
    ids, times, cache, use_cache = list(prompt), [], None, way == "cached"
    for _ in range(num_tokens):
        start = synchronized_time(llm.device)
        run = ids if cache is None else ids[-1:]
        input_ids = torch.tensor([run], device=llm.device)
        out = llm.model(input_ids=input_ids, past_key_values=cache, use_cache=use_cache, logits_to_keep=1)
        cache = out.past_key_values if use_cache else None
        ids.append(int(out.logits[0, -1].argmax()))
        times.append(synchronized_time(llm.device) - start)
    return ids, times


def draw(results: list[dict]) -> dict[str, Picture]:
    return {"stage_a_naive/no_cache.svg": draw_recompute(*results[0]["rows"])}


def draw_recompute(times: dict) -> Picture:
    """Draw the time of every step; the area under a line is the time of the whole answer."""
    cached, recomputed = times["cached"], times["recomputed"]
    title = f"{len(cached)} tokens: without a cache {sum(recomputed) / sum(cached):.1f} × the time"
    x_label = f"generated token (after a prompt of {times['prompt_tokens']})"
    figure, axes = new_panel(8, 3.6, x_label, "ms per step", title)
    for name, steps, colour in (("without a cache", recomputed, RED), ("with the KV cache", cached, GREEN)):
        numbers, times_ms = range(1, len(steps) + 1), [1e3 * seconds for seconds in steps]
        axes.plot(numbers, times_ms, color=colour, linewidth=1.5, label=f"{name}: {sum(steps):.2f} s in all")
        axes.fill_between(numbers, times_ms, color=colour, alpha=0.15)
    axes.set_ylim(0, 1.35e3 * max(recomputed))
    axes.legend(frameon=False, loc="upper left")
    return Picture(
        figure, "without a cache every step takes longer than the one before; with it all take the same time"
    )
