"""Speculative decoding: the cost of a verification compared with a decode step, and the gain that pays for it.

The acceptance is scripted (`_scripted.py`), except for the tutor's text, where it is the real one.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

import torch

from benchmarks.floor import ModelCost
from benchmarks.micro import take_turns, with_engine
from benchmarks.micro._scripted import PROMPT, RATE, ScriptedLLM, ScriptedModelLLM, time_ways
from benchmarks.render import Record
from benchmarks.text import medians, number
from beyond.speculation import LLM
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.checkpoints.tutor import read_faq
from stage_a_naive.sampling import SamplingParams

PAIR = ("random:qwen2.5-7b", "random:qwen2.5-0.5b")  # a large and a small model of one tokenizer
DRAFTED, HALF = 4, 0.5  # tokens of the small model, and their right share, besides `RATE`
DRAFTS, BATCHES = (4, 8, 12), (1, 2, 4, 8, 16, 32, 64)  # drafted tokens, running requests
QUESTIONS, TOKENS, REPEATS = 16, 160, 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
NAMES = {"ngram": "look-up", "model": "a one-layer tutor"}
COUNTS = ("num_steps", "num_generated_tokens", "num_draft_tokens", "num_accepted_tokens")


def measure(model: str = "random:qwen2.5-0.5b") -> dict:
    """Measure every draft length in a separate engine: stage F's steps and steps with drafts, by batch size."""
    rows, sizes = [], {"max_model_len": 4096, "max_num_batched_tokens": 4096, "max_num_seqs": max(BATCHES)}
    for draft in DRAFTS:
        options = sizes | {"num_speculative_tokens": draft, "enable_prefix_caching": False}
        rows += with_engine(partial(measure_draft, draft), ScriptedLLM, model, **options)
    found = {"model": model, "rate": RATE, "tokens": TOKENS, "repeats": REPEATS, "rows": rows}
    found |= {"text": measure_text(), "tutor": measure_tutor()}
    return found | ({"pair": measure_pair()} if torch.cuda.is_available() else {})


def measure_draft(draft: int, llm: ScriptedLLM) -> list[dict]:
    """Time steps without drafts, with accepted drafts, with wrong drafts, and with a search that finds none.

    "looking" samples at temperature 1 from nearly equal scores, so that no n-gram occurs twice.
    """
    greedy, noisy = (SamplingParams(temperature=t, seed=0, max_tokens=TOKENS, ignore_eos=True) for t in (0.0, 1.0))
    ngram, plain = llm.engine.drafts.drafter, partial(llm.script, None)

    def look() -> None:
        llm.script(0.0)
        llm.engine.drafts.drafter = ngram

    ways = {
        "plain": (plain, greedy),
        "accepted": (partial(llm.script, RATE), greedy),
        "wrong": (partial(llm.script, 0.0), greedy),
        "plain, noisy": (plain, noisy),
        "looking": (look, noisy),
    }
    rows = []
    for batch in BATCHES:
        rows += time_ways(llm, batch, REPEATS, ways, draft=draft, batch=batch, prompt=PROMPT)
    return rows


def measure_pair() -> dict:
    """Time one request of the large model: without drafts, with look-up, and with the small model's drafts."""
    limits = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 1}
    limits |= {"num_speculative_tokens": DRAFTED, "enable_prefix_caching": False}
    greedy, (model, draft_model) = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True), PAIR

    def work(llm: ScriptedLLM | ScriptedModelLLM) -> dict:
        ways = {rate: (partial(llm.script, rate), greedy) for rate in (None, RATE, HALF)}
        return {"rows": time_ways(llm, 1, REPEATS, ways, drafts=llm.options.speculation)}

    looked_up = with_engine(work, ScriptedLLM, model, **limits)
    drafted = with_engine(work, ScriptedModelLLM, model, draft_model=draft_model, **limits)
    return {"model": model, "draft_model": draft_model, "drafts": {"ngram": looked_up, "model": drafted}}


def measure_text() -> list[dict]:
    """Count the steps that look-up and the tutor's draft model save on the tutor's text.

    Each question is asked once, and then again after its answer, which is then part of the prompt.
    """
    once = [[{"role": "user", "content": entry["question"]}] for entry in read_faq()[:QUESTIONS]]
    outputs = with_engine(lambda llm: llm.chat(once, GREEDY), LLM, "tutor", speculation="off", max_num_seqs=8)
    again = [[*q, {"role": "assistant", "content": a["text"]}, *q] for q, a in zip(once, outputs, strict=True)]

    def ask(llm: LLM) -> list[dict]:
        llm.chat(once[0], GREEDY)
        rows = []
        for name, conversations in (("once", once), ("again", again)):
            before = replace(llm.engine.counters)
            for messages in conversations:
                llm.chat(messages, GREEDY)
            counted = {key: getattr(llm.engine.counters, key) - getattr(before, key) for key in COUNTS}
            rows.append({"speculation": llm.options.speculation, "asked": name, "requests": QUESTIONS, **counted})
        return rows

    return [row for drafts in NAMES for row in with_engine(ask, LLM, "tutor", speculation=drafts, max_num_seqs=8)]


def measure_tutor() -> dict[str, list[float]]:
    """Time the tutor's answers without and with look-up in turns, one question at a time: seconds per token.

    The answers hardly repeat themselves, and a step is short on a GPU, so the host's work for drafts becomes visible.
    """
    questions = [[{"role": "user", "content": entry["question"]}] for entry in read_faq()[:QUESTIONS]]

    def ask(llm: LLM) -> float:
        return statistics.median(llm.chat(question, GREEDY)[0]["metrics"]["tpot"] for question in questions)

    tutor = partial(LLM, "tutor", max_num_seqs=8, num_kvcache_blocks=64)  # two of them at the same time

    def both(off: LLM, ngram: LLM) -> dict[str, list[float]]:
        return take_turns(lambda kind: ask(off if kind == "off" else ngram), ("off", "ngram"), REPEATS)

    return with_engine(
        lambda off: with_engine(partial(both, off), tutor, speculation="ngram"), tutor, speculation="off"
    )


def medians_of(result: dict) -> dict[tuple[str, int, int], float]:
    """Map (way, drafted tokens, requests) to the median seconds per token."""
    return medians(result["rows"], "way", "draft", "batch")


def break_even(result: dict, draft: int) -> dict[int, float]:
    """Map requests to the number of right guesses per draft from which a verification pays."""
    found, rows = medians_of(result), [r for r in result["rows"] if (r["way"], r["draft"]) == ("accepted", draft)]
    ratios = {r["batch"]: found["accepted", draft, r["batch"]] / found["plain", draft, r["batch"]] for r in rows}
    return {r["batch"]: ratios[r["batch"]] * r["tokens_per_step"] - 1 for r in rows}


def most_extra(result: dict, way: str, before: str) -> float:
    """Return by how many percent one way is slower than another, at most, over all requests and drafts."""
    found = medians_of(result)
    return max(100 * (seconds / found[before, *key] - 1) for (name, *key), seconds in found.items() if name == way)


def cost(result: dict) -> str:
    """Return the cost of drafts that gain nothing."""
    off, looking = (1e3 * statistics.median(result["tutor"][kind]) for kind in ("off", "ngram"))
    return (
        f"On text that repeats nothing, looking costs at most {most_extra(result, 'looking', 'plain, noisy'):.1f} % of "
        f"the time per token; with drafts that are always wrong, at most {most_extra(result, 'wrong', 'plain'):.1f} %. "
        f"The tutor, asked once, takes {number(looking)} ms per token with look-up and {number(off)} without "
        f"({100 * (looking / off - 1):+.1f} %)."
    )


def floors(result: dict) -> list[Record]:
    """Return, by rows, the time to read the weights and the time to multiply them, at this device's ceilings."""
    if "ceilings" not in result:
        return []
    cost, ceilings = ModelCost(preset_config(result["model"].removeprefix("random:")), 2), result["ceilings"]
    read = 1e3 * cost.weight_bytes / ceilings["copy_bytes_per_s"]
    multiply = 2e3 * sum(cost.matmul_parameters) / ceilings["matmul_operations_per_s"]
    return [{"rows": rows, "read": read, "multiply": multiply} for rows in (1, 5, 9, 64, 256, 512)]


def pairs(result: dict) -> list[Record]:
    """Return cost and gain of looked-up drafts and of a small model's, for one request of a larger model."""
    rows, pair = [], result.get("pair", {"drafts": {}})
    for kind, found in pair["drafts"].items():
        plain, *others = (statistics.median(row["samples"]) for row in found["rows"])
        name = "look-up" if kind == "ngram" else pair["draft_model"].removeprefix("random:")
        step = others[0] * found["rows"][1]["tokens_per_step"]
        rows.append({"by": name, "plain": plain, "others": others, "step": step})
    return rows


def by_load(result: dict) -> list[Record]:
    """Return ms per token, × stage F's speed and the right guesses needed, by drafted tokens and requests."""
    found, lengths = medians_of(result), sorted({row["draft"] for row in result["rows"]})
    rows = []
    for k in lengths:
        for n, need in break_even(result, k).items():
            plain, accepted = found["plain", k, n], found["accepted", k, n]
            times_ms = {"plain": 1e3 * found["plain", lengths[0], n], "ms": 1e3 * accepted}
            rows.append({"draft": k, "batch": n, **times_ms, "gain": plain / accepted, "need": need})
    return rows


def headline(result: dict) -> str:
    """State the finding: the gain for one request and for the most requests."""
    found = by_load(result)
    few, many = (
        max(row["gain"] for row in found if row["batch"] == n) for n in (found[0]["batch"], found[-1]["batch"])
    )
    most, device = found[-1]["batch"], result["environment"]["device"]["name"]
    right = f"{100 * result['rate']:.0f} % of scripted guesses right"
    return f"{right}: one request {few:.1f} × as fast, {most} requests {many:.1f} × ({device})"
