"""What the KV cache saves: every step of one answer, generated without a cache and with it.

Both generate the same tokens, which is checked. A step without the cache runs the model over the whole text so far; the
sum of its steps grows with the square of the length. A step's time is the least of several runs.
"""

from __future__ import annotations

from benchmarks.micro import caption
from benchmarks.pictures.phases import draw_recompute, measure_recompute
from benchmarks.text import markdown, number
from stage_a_naive import LLM

README, MARKERS = "stage_a_naive", ("no-cache",)


def measure(model: str = "tutor", prompt_tokens: int = 64, tokens: int = 256, repeats: int = 5) -> dict:
    """Seconds of every step, cached and recomputed."""
    llm = LLM(model)
    prompt = [(7 * j) % llm.vocab_size for j in range(prompt_tokens)]
    return {"model": model, "repeats": repeats, "rows": [measure_recompute(llm, prompt, tokens, repeats)]}


def table(results: list[dict]) -> dict[str, list[str]]:
    """The picture, and the time of the first step, of the last and of all, for each way."""
    result = results[0]
    [row] = result["rows"]
    body = []
    for name, key in (("without a cache", "recomputed"), ("with the KV cache", "cached")):
        steps = row[key]
        body.append([name, *(number(1e3 * t) for t in (steps[1], steps[-1])), number(sum(steps))])
    heads = ["", "2nd token, ms", f"token {len(row['cached'])}, ms", "all of them, s"]
    prompt, repeats = row["prompt_tokens"], result["repeats"]
    note = f"{result['model']}, after a prompt of {prompt} tokens; a step is the fastest of {repeats} runs"
    lines = ["![Time of every step without a cache and with the KV cache](no_cache.png)", ""]
    return {"no-cache": [*lines, *markdown(heads, body), "", caption(result, note)]}


def draw(results: list[dict]) -> dict[str, bytes]:
    return {"no_cache.png": draw_recompute(*results[0]["rows"]).png}
