"""What the drafts of a small model cost and gain at the shape of a larger one, beside looked-up drafts."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.micro import caption, timed, with_engine
from benchmarks.micro._scripted import PROMPT, RATE, ScriptedLLM, ScriptedModelLLM, run
from benchmarks.text import markdown, medians, number
from stage_a_naive.sampling import SamplingParams

PAIR = ("random:qwen2.5-7b", "random:qwen2.5-0.5b")  # a large and a small model of one tokenizer
DRAFTED = 4  # tokens
HALF = 0.5  # of them are right, beside `RATE`


def measure_pair(model: str, draft_model: str, tokens: int, repeats: int) -> dict:
    """One request of the large model: without drafts, with looked-up ones, and with those of the small model."""
    limits = {"num_speculative_tokens": DRAFTED, "max_model_len": 2048, "max_num_seqs": 1,
              "max_num_batched_tokens": 512, "enable_prefix_caching": False}  # fmt: skip
    work = partial(measure_rates, tokens, repeats)
    looked_up = with_engine(work, ScriptedLLM, model, **limits)
    drafted = with_engine(work, ScriptedModelLLM, model, draft_model=draft_model, **limits)
    return {"model": model, "draft_model": draft_model, "drafts": {"ngram": looked_up, "model": drafted}}


def measure_rates(tokens: int, repeats: int, llm: ScriptedLLM | ScriptedModelLLM) -> dict:
    """Seconds per token without drafts and by acceptance, in turns; of a draft; and of its verification."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    found: dict[float | None, list[tuple[float, float]]] = {None: [], RATE: [], HALF: []}
    for _ in range(repeats + 1):
        for rate, samples in found.items():
            llm.script(rate)
            samples.append(run(llm, 1, params))
    rows = []
    for rate, samples in found.items():
        seconds, per_step = zip(*samples[1:], strict=True)  # the first is the warm-up
        row = timed(list(seconds), drafts=llm.options.speculation, rate=rate)
        rows.append(row | {"tokens_per_step": statistics.median(per_step)})
    if isinstance(llm, ScriptedModelLLM):
        return {"rows": rows} | {part: statistics.median(seconds) for part, seconds in llm.seconds.items()}
    return {"rows": rows, "verification": statistics.median(rows[1]["samples"]) * rows[1]["tokens_per_step"]}


def pair_table(result: dict, model: str, draft_model: str, drafts: dict[str, dict]) -> list[str]:
    """What looked-up drafts and a small model's cost and gain at one request of a larger model."""
    body, names = [], {"ngram": "look-up", "model": draft_model.removeprefix("random:")}
    for kind, found in drafts.items():
        seconds, rows = medians(found["rows"], "rate"), found["rows"]
        even = seconds[RATE,] * rows[1]["tokens_per_step"] / seconds[None,] - 1
        drafting = number(1e3 * found["drafting"]) if "drafting" in found else "in the verification"
        per_token = " / ".join(number(1e3 * seconds[rate,]) for rate in (None, RATE, HALF))
        body.append([names[kind], drafting, number(1e3 * found["verification"]), per_token, f"{even:.1f}"])
    rates = f"without / {100 * RATE:.0f} % right / {100 * HALF:.0f} %"
    heads = ["drafts from", f"ms to draft {DRAFTED}", "ms to verify", f"ms per token {rates}", "right to break even"]
    note = f"{model.removeprefix('random:')}, one request, a prompt of {PROMPT}, {result['tokens']} tokens"
    return [*markdown(heads, body), "", caption(result, f"{note}; medians of {result['repeats']}")]
