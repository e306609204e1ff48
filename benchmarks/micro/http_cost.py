"""What serving over HTTP costs: the same 64 answers from `generate`, from `stream`, and from two servers, streamed.

All four run on the same kind of engine with as many batch slots as answers, on prompts that differ in every repeat,
and take turns. `generate` makes the text once, at the end; `stream` makes it token by token, as a server must; a server
also sends one event per token. The first server has the engine in a thread of its own process (`one_process.py`), the
second is the server as it is, with the engine in another process. Several processes read the streams, so that reading
does not limit what is measured.

On a GPU the seconds are those of the clock. On a CPU they are those that the processes of the engine and the server
computed for, and the readers not, so that other programs on the machine count for little.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, closing
from itertools import chain
from multiprocessing import get_context

import torch

from benchmarks.local_server import LocalServer, local_server
from benchmarks.micro import caption
from benchmarks.pictures.picture import BLUE, GREY, ORANGE, draw_bars, finish, new_panel
from benchmarks.serve import Answer, make_prompts, offer
from benchmarks.text import markdown, number
from beyond.serving.__main__ import STAGES
from beyond.serving.engine_process import load_class
from stage_a_naive.params import SamplingParams
from stage_e_batching import LLM

README, MARKERS = "beyond/serving", ("http-cost",)
SERVERS = {"HTTP, one process": "benchmarks.one_process", "HTTP": "beyond.serving"}
WAYS = ("generate", "stream", *SERVERS)


NAMES = {"generate": "generate: text at the end", "stream": "stream: text per token", "HTTP": "HTTP, two processes"}
COLOURS = {"generate": GREY, "stream": BLUE, "HTTP, one process": GREY, "HTTP": ORANGE}


def measure(
    model: str = "tutor",
    device: str = "cpu",
    stage: str = "e",
    streams: int = 64,
    input_len: int = 32,
    output_len: int = 64,
    repeats: int = 5,
    threads: int = 1,
    readers: int = 4,
) -> dict:
    """Output tokens per second of each way, prefill included; the ways take turns.

    Args:
        streams: requests at the same time, and batch slots.
        readers: processes that read the streams.
    """
    torch.set_num_threads(threads)
    share = 0.25  # of the GPU's memory: there are three engines
    options = {"max_num_seqs": streams, "enable_prefix_caching": False, "gpu_memory_utilization": share}
    words = ["--stage", stage, "--model", model, "--device", device, "--max-num-seqs", str(streams), "--no-page"]
    words += ["--no-prefix-caching", "--gpu-memory-utilization", str(share)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with (
        ExitStack() as stack,
        closing(load_class(STAGES[stage])(model, device=device, **options)) as llm,
        ProcessPoolExecutor(readers, get_context("spawn")) as pool,
    ):
        servers = {
            way: stack.enter_context(local_server(*words, threads=threads, module=module))
            for way, module in SERVERS.items()
        }
        for repeat in range(repeats + 1):  # the first is a warm-up
            prompts = make_prompts(streams, input_len, 0, repeat)
            for way in WAYS:
                if way in servers:
                    on_clock, of_cpu = over_http(pool, readers, servers[way], prompts, output_len)
                else:
                    on_clock, of_cpu = offline(llm, way, prompts, params)
                seconds = of_cpu if llm.device.type == "cpu" else on_clock
                if repeat:
                    found[way].append(streams * output_len / seconds)
    rows = [{"way": way, "tokens_per_s": rates} for way, rates in found.items()]
    return {"model": model, "stage": stage, "streams": streams, "input_len": input_len, "output_len": output_len,
            "rows": rows}  # fmt: skip


def offline(llm: LLM, way: str, prompts: list[list[int]], params: SamplingParams) -> tuple[float, float]:
    """Seconds of one call of `generate`, or of reading all of `stream`: on the clock, and of CPU time."""
    start, cpu_start = time.perf_counter(), time.process_time()
    if way == "generate":
        llm.generate(prompts, params, use_tqdm=False)
    else:
        for _ in llm.stream(prompts, params):
            pass
    return time.perf_counter() - start, time.process_time() - cpu_start


def over_http(
    pool: Executor, readers: int, server: LocalServer, prompts: list[list[int]], output_len: int
) -> tuple[float, float]:
    """Seconds from the first request to the end of all answers: on the clock, and of the server's CPU time.

    Args:
        pool: of processes that read, each an equal share of the answers.

    Raises:
        RuntimeError: an answer is missing or too short.
    """
    fixed = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    bodies = [fixed | {"prompt": prompt} for prompt in prompts]
    list(pool.map(time.sleep, [0.1] * readers))  # so that all of them are there
    cpu_start, begin = server.cpu_seconds(), time.perf_counter() + 0.1  # the clock is the same in all processes
    shares = [bodies[i::readers] for i in range(readers)]
    each = pool.map(read_answers, [server.url] * readers, shares, [begin] * readers)
    found, ends = zip(*each, strict=True)
    answers = list(chain.from_iterable(found))
    wrong = [answer for answer in answers if answer.error or answer.num_tokens != output_len]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(answers)} answers failed: {wrong[0].error or 'too short'}")
    return max(ends) - begin, server.cpu_seconds() - cpu_start


def read_answers(url: str, bodies: list[dict[str, object]], begin: float) -> tuple[list[Answer], float]:
    """Ask for all answers at `begin`, and read them; returns them, and when the last one had ended."""
    answers, _ = asyncio.run(offer(url, bodies, [begin - time.perf_counter()] * len(bodies)))
    return answers, time.perf_counter()


def table(results: list[dict]) -> dict[str, list[str]]:
    lines = []
    for result in results:
        rates = {row["way"]: row["tokens_per_s"] for row in result["rows"]}
        body = []
        for way, found in rates.items():
            ratios = [a / b for a, b in zip(found, rates["generate"], strict=True)]
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            body.append([way, number(statistics.median(found)), shown if way != "generate" else "1"])
        unit = "output tokens/s" + " of CPU time" * (result["environment"]["device"]["type"] == "cpu")
        heads = ["the same answers from", unit, "share of `generate`'s rate (range)"]
        work = (
            f"{result['model']}, stage {result['stage'].upper()}; {result['streams']} requests at once, "
            f"{result['input_len']} in, {result['output_len']} out; medians of {len(rates['generate'])}, "
            "ratios within a repeat"
        )
        lines += [*markdown(heads, body), "", caption(result, work), ""]
    return {"http-cost": lines}


def draw(results: list[dict]) -> dict[str, bytes]:
    """A bar per way, on the newest results of a GPU, if there are any."""
    result = next((one for one in results if one["environment"]["device"]["type"] == "cuda"), results[0])
    rates = {row["way"]: statistics.median(row["tokens_per_s"]) for row in result["rows"]}
    over_http, of_generate = (result["rows"][i]["tokens_per_s"] for i in (-1, 0))
    ratio = statistics.median(a / b for a, b in zip(over_http, of_generate, strict=True))
    device = result["environment"]["device"]
    unit = "output tokens per second" + " of the engine's CPU time" * (device["type"] == "cpu")
    title = f"Over HTTP the engine reaches {ratio:.0%} of its offline throughput\n({device['name']})"
    figure, axes = new_panel(8, 2.6, f"{unit}, {result['streams']} requests at once", title=title, grid="x")
    names = [NAMES.get(way, way) for way in rates]
    bars = [(None, list(rates.values()), [COLOURS[way] for way in rates])]
    draw_bars(axes, names, bars, list(map(number, rates.values())), room=1.12)
    return {"figures/http_cost.png": finish(figure, "output tokens per second, offline and over HTTP").png}
