"""What serving over HTTP costs: the same 64 answers from `generate`, from `stream`, and from two servers, streamed.

All four run on the same kind of engine with as many batch slots as answers, on prompts that differ in every repeat,
and take turns. `generate` makes the text once, at the end; `stream` makes it token by token, as a server must; a server
also sends one event per token. The first server has the engine in a thread of its own process (`one_process.py`), the
second in another process. Several processes read the streams, so that reading does not limit what is measured; they
connect before the clock starts, as clients that ask again and again do.

On a CPU the seconds are those that the processes of the engine and the server computed for, so that the readers and
other programs on the machine count for little.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, closing
from itertools import chain
from multiprocessing import get_context
from typing import NamedTuple

from benchmarks.local_server import LocalServer, local_server
from benchmarks.micro import caption, device_name, one_thread
from benchmarks.pictures.picture import BLUE, GREY, ORANGE, Picture, draw_bars, finish, new_panel
from benchmarks.serve import Answer, make_prompts, offer
from benchmarks.text import markdown, number
from beyond.serving.__main__ import STAGES
from beyond.serving.engine_process import load_class
from stage_a_naive.params import SamplingParams
from stage_e_batching import LLM

SERVERS = {"HTTP, one process": "benchmarks.one_process", "HTTP": "beyond.serving"}
WAYS = {  # name and colour in the figure
    "generate": ("generate: text at the end", GREY), "stream": ("stream: text per token", BLUE),
    "HTTP, one process": ("HTTP, one process", GREY), "HTTP": ("HTTP, two processes", ORANGE),
}  # fmt: skip
STREAMS, REPEATS = 64, 5
SHARE = 0.25  # of the GPU's memory for each of three engines
CONNECT_SECONDS = 0.3  # for all connections


class Seconds(NamedTuple):
    """What a way of answering took, and its readers, if it has any."""

    on_clock: float  # to the end of all answers
    of_cpu: float  # for the engine, and the server
    to_first_tokens: float  # on the clock, until every answer had begun
    reading: float = 0.0  # CPU time of the reader that needed most


@one_thread()
def measure(
    model: str = "tutor", device: str = "cpu", stage: str = "e", input_len: int = 32, output_len: int = 64,
    readers: int = 4,
) -> dict:  # fmt: skip
    """Output tokens per second of each way, prefill included; the ways take turns. `readers` processes read."""
    options = {"max_num_seqs": STREAMS, "enable_prefix_caching": False, "gpu_memory_utilization": SHARE}
    words = ["--stage", stage, "--model", model, "--device", device, "--max-num-seqs", str(STREAMS), "--no-page"]
    words += ["--no-prefix-caching", "--gpu-memory-utilization", str(SHARE)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    rows = {way: {"way": way, "tokens_per_s": [], "first_tokens_ms": [], "reading": []} for way in WAYS}
    with (
        ExitStack() as stack,
        closing(load_class(STAGES[stage])(model, device=device, **options)) as llm,
        ProcessPoolExecutor(readers, get_context("spawn")) as pool,
    ):
        servers = {way: stack.enter_context(local_server(*words, module=module)) for way, module in SERVERS.items()}
        for repeat in range(REPEATS + 1):  # the first is a warm-up
            prompts = make_prompts(STREAMS, input_len, 0, repeat)
            for way, row in rows.items():
                if way in servers:
                    took = over_http(pool, readers, servers[way], prompts, output_len)
                else:
                    took = offline(llm, way, prompts, params)
                if repeat:
                    seconds = took.of_cpu if llm.device.type == "cpu" else took.on_clock
                    row["tokens_per_s"].append(STREAMS * output_len / seconds)
                    row["first_tokens_ms"].append(1e3 * took.to_first_tokens)
                    row["reading"].append(took.reading / took.on_clock)
    return {"model": model, "stage": stage, "streams": STREAMS, "input_len": input_len, "output_len": output_len,
            "rows": list(rows.values())}  # fmt: skip


def offline(llm: LLM, way: str, prompts: list[list[int]], params: SamplingParams) -> Seconds:
    """Time one call of `generate`, or reading all of `stream`."""
    start, cpu_start = time.perf_counter(), time.process_time()
    if way == "generate":
        outputs = llm.generate(prompts, params, use_tqdm=False)
        begun = max(output["metrics"]["ttft"] for output in outputs)
    else:
        seen: dict[int, float] = {}
        for index, _ in llm.stream(prompts, params):
            if index not in seen:
                seen[index] = time.perf_counter() - start
        begun = max(seen.values())
    return Seconds(time.perf_counter() - start, time.process_time() - cpu_start, begun)


def over_http(
    pool: Executor, readers: int, server: LocalServer, prompts: list[list[int]], output_len: int
) -> Seconds:
    """Time all answers from a server, from when the requests are sent.

    Args:
        pool: of processes that read, each an equal share of the answers.

    Raises:
        RuntimeError: an answer is missing or too short.
    """
    fixed = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    bodies = [fixed | {"prompt": prompt} for prompt in prompts]
    list(pool.map(time.sleep, [0.1] * readers))  # so that all of them are there
    cpu_start, begin = server.cpu_seconds(), time.perf_counter() + CONNECT_SECONDS  # all processes have one clock
    shares = [bodies[i::readers] for i in range(readers)]
    found, ends, reading = zip(*pool.map(read_answers, [server.url] * readers, shares, [begin] * readers), strict=True)
    answers = list(chain.from_iterable(found))
    wrong = [answer for answer in answers if answer.error or answer.num_tokens != output_len]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(answers)} answers failed: {wrong[0].error or 'too short'}")
    begun = max(answer.arrivals[0] for answer in answers) - begin
    return Seconds(max(ends) - begin, server.cpu_seconds() - cpu_start, begun, max(reading))


def read_answers(url: str, bodies: list[dict[str, object]], begin: float) -> tuple[list[Answer], float, float]:
    """Ask for all answers at `begin`, and read them; returns them, when the last one had ended, and the CPU time."""
    cpu_start, times = time.process_time(), [begin - time.perf_counter()] * len(bodies)
    answers, _ = asyncio.run(offer(url, bodies, times, connect_early=True))
    return answers, time.perf_counter(), time.process_time() - cpu_start


def shares_of(result: dict) -> dict[str, list[float]]:
    """Of each way, what it has of `generate`'s rate in every repeat."""
    rates = {row["way"]: row["tokens_per_s"] for row in result["rows"]}
    return {way: [a / b for a, b in zip(own, rates["generate"], strict=True)] for way, own in rates.items()}


def unit(result: dict, seconds: str, of_cpu: str) -> str:
    return seconds + of_cpu * (result["environment"]["device"]["type"] == "cpu")


def table(results: list[dict]) -> dict[str, list[str]]:
    lines = []
    for result in results:
        body = []
        for row, ratios in zip(result["rows"], shares_of(result).values(), strict=True):
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            rate = number(statistics.median(row["tokens_per_s"]))
            begun = number(statistics.median(row["first_tokens_ms"])) if "first_tokens_ms" in row else "–"
            body.append([row["way"], rate, shown if row["way"] != "generate" else "1", begun])
        rate = unit(result, "output tokens/s", " of CPU time")
        heads = ["the same answers from", rate, "share of `generate`'s rate (range)", "all first tokens after, ms"]
        work = (
            f"{result['model']}, stage {result['stage'].upper()}; {result['streams']} requests at once, "
            f"{result['input_len']} in, {result['output_len']} out; medians of {len(ratios)}, ratios within a repeat"
        )
        if busy := [share for row in result["rows"] for share in row.get("reading", ())]:
            work += f"; no reader computed for more than {max(busy):.0%} of the time"
        lines += [*markdown(heads, body), "", caption(result, work), ""]
    return {"http-cost": lines}


def draw(results: list[dict]) -> dict[str, Picture]:
    """A bar per way, on the newest results of a GPU, if there are any."""
    result = next((one for one in results if one["environment"]["device"]["type"] == "cuda"), results[0])
    rates = {row["way"]: statistics.median(row["tokens_per_s"]) for row in result["rows"]}
    axis = unit(result, "output tokens per second", " of the engine's CPU time")
    title = (
        f"Over HTTP the engine reaches {statistics.median(shares_of(result)['HTTP']):.0%} of its offline throughput\n"
        f"({device_name(result)})"
    )
    figure, axes = new_panel(8, 2.6, f"{axis}, {result['streams']} requests at once", title=title, grid="x")
    names, colours = zip(*(WAYS[way] for way in rates), strict=True)
    draw_bars(axes, names, [(None, list(rates.values()), colours)], list(map(number, rates.values())), room=1.12)
    return {"beyond/serving/figures/http_cost.png": finish(figure, "output tokens per second, offline and over HTTP")}
