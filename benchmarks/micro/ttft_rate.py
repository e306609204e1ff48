"""How long people wait for the first token as more of them come: TTFT against request rate, over HTTP, by engine.

An open loop: requests arrive as a Poisson process, whether or not the earlier ones are answered. Answers differ in
length. `E` is compared with `static`, which is stage E with one rule changed: it admits requests only when all of the
last batch have ended, as stage D does. On a GPU it is compared with `F`. Rates are shares of what `E` reaches when all
requests come at once, which is measured first, so that they mean the same on every machine. The engines take turns, at
every rate, on the same requests.
"""

from __future__ import annotations

import asyncio
import random
import statistics

from benchmarks.local_server import local_server
from benchmarks.micro import caption
from benchmarks.pictures.picture import BLUE, ORANGE, RED, finish, new_panel
from benchmarks.serve import latencies, make_prompts, offer, percentile, schedule
from benchmarks.text import markdown, number

README, MARKERS = "beyond/serving", ("ttft-rate",)
ENGINES = {
    "E": ("--stage", "e"),
    "static": ("--engine", "benchmarks.micro.batching:StaticStageE"),
    "F": ("--stage", "f"),
}
NAMES = {"E": "E, continuous", "static": "E, static admission", "F": "F"}


def measure(
    model: str = "tutor",
    device: str = "cpu",
    other: str = "static",
    shares: tuple[float, ...] = (0.25, 0.5, 0.75),
    slots: int = 8,
    requests: int = 48,
    input_len: int = 32,
    longest: int = 64,
    repeats: int = 3,
    threads: int = 1,
) -> dict:
    """TTFT and TPOT of every request, by engine and rate.

    Args:
        other: the engine that E is compared with, `static` or `F`.
        shares: of what E reaches: the rates.
        slots: batch slots of every engine.
        longest: answers have 1 to this many tokens.
    """
    words = ["--model", model, "--device", device, "--max-num-seqs", str(slots), "--no-prefix-caching", "--no-page"]
    words += ["--max-queue", str(requests), "--gpu-memory-utilization", "0.25"]
    rows = []
    with (
        local_server(*ENGINES["E"], *words, threads=threads) as server,
        local_server(*ENGINES[other], *words, threads=threads) as other_server,
    ):
        urls = {"E": server.url, other: other_server.url}
        for url in urls.values():
            load(url, requests, input_len, longest, float("inf"), -1)  # a warm-up
        capacity = load(urls["E"], requests, input_len, longest, float("inf"), 0)["requests_per_s"]
        for repeat in range(repeats):
            for share in shares:
                for name, url in urls.items():
                    found = load(url, requests, input_len, longest, share * capacity, repeat)
                    rows.append({"engine": name, "share": share, "rate": share * capacity, "repeat": repeat, **found})
    return {"model": model, "slots": slots, "requests": requests, "input_len": input_len, "longest": longest,
            "capacity": capacity, "rows": rows}  # fmt: skip


def load(url: str, count: int, input_len: int, longest: int, rate: float, seed: int) -> dict:
    """Offer `count` requests with answers of 1 to `longest` tokens; returns the times of each, in ms.

    Raises:
        RuntimeError: a request failed.
    """
    chance = random.Random(f"lengths {seed}")
    fixed = {"temperature": 0, "ignore_eos": True}
    prompts = make_prompts(count, input_len, 0, seed)
    bodies = [fixed | {"prompt": prompt, "max_tokens": chance.randint(1, longest)} for prompt in prompts]
    answers, seconds = asyncio.run(offer(url, bodies, schedule(count, rate, 1.0, seed)))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} requests failed: {failed[0]}")
    each = [latencies(answer) for answer in answers]
    return {
        "requests_per_s": count / seconds,
        "ttft_ms": [ms for one in each for ms in one["ttft"]],
        "tpot_ms": [ms for one in each for ms in one["tpot"]],
    }


def times(result: dict, engine: str, figure: str) -> dict[float, list[float]]:
    """The times of all requests of all repeats, by rate."""
    found: dict[float, list[float]] = {}
    for row in result["rows"]:
        if row["engine"] == engine:
            found.setdefault(row["rate"], []).extend(row[figure])
    return found


def names_of(result: dict) -> list[str]:
    return list(dict.fromkeys(row["engine"] for row in result["rows"]))


def table(results: list[dict]) -> dict[str, list[str]]:
    lines = []
    for result in results:
        names = names_of(result)
        body = []
        for rate in times(result, names[0], "ttft_ms"):
            cells = [f"{number(rate)}, {rate / result['capacity']:.0%}"]
            for name in names:
                ttft, tpot = (times(result, name, figure)[rate] for figure in ("ttft_ms", "tpot_ms"))
                shown = (statistics.median(ttft), percentile(ttft, 99), statistics.median(tpot))
                cells.append(" / ".join(map(number, shown)))
            body.append(cells)
        heads = ["requests/s, share of the most that E serves"]
        heads += [f"{NAMES[name]}: TTFT p50 / p99, TPOT p50, ms" for name in names]
        repeats = len({row["repeat"] for row in result["rows"]})
        work = (
            f"{result['model']}, {result['slots']} batch slots; {result['input_len']} in, 1–{result['longest']} out; "
            f"{repeats} × {result['requests']} requests a cell"
        )
        lines += [*markdown(heads, body), "", caption(result, work), ""]
    return {"ttft-rate": lines}


def draw(results: list[dict]) -> dict[str, bytes]:
    """A figure for each engine that E is compared with, on the newest results."""
    figures = {"static": "figures/ttft_rate.png", "F": "figures/ttft_rate_f.png"}
    return {
        file: draw_one(of_other[0])
        for other, file in figures.items()
        if (of_other := [result for result in results if other in names_of(result)])
    }


def draw_one(result: dict) -> bytes:
    """Lines of TTFT p99, and of its median, over the rate."""
    colours = {"E": BLUE, "static": ORANGE, "F": RED}
    words = f"{title(result)}\n({result['environment']['device']['name']})"
    figure, axes = new_panel(8, 3.8, "requests per second, arriving at random", "time to first token, ms", words)
    for name in names_of(result):
        found = times(result, name, "ttft_ms")
        for share, line in ((99, "o-"), (50, "o:")):
            values = [percentile(each, share) for each in found.values()]
            label = f"{NAMES[name]}: {'p99' if share == 99 else 'median'}"
            axes.plot(list(found), values, line, color=colours[name], markersize=4, label=label)
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.legend(frameon=False)
    return finish(figure, "time to first token against request rate, by engine").png


def title(result: dict) -> str:
    """What is to be seen: the ratio of the two engines' p99 over the rates."""
    [other] = set(names_of(result)) - {"E"}
    of_e, of_other = (times(result, name, "ttft_ms") for name in ("E", other))
    ratios = [percentile(of_other[rate], 99) / percentile(of_e[rate], 99) for rate in of_e]
    if other == "F":
        return f"TTFT's p99 is {1 / max(ratios):.1f} to {1 / min(ratios):.1f} × shorter with stage F than with E"
    return f"With static admission TTFT's p99 is {min(ratios):.1f} to {max(ratios):.1f} × as long"
