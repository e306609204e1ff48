"""The cost of serving over HTTP: the same answers from `generate`, from `stream`, and streamed from two servers.

All four use the same kind of engine with as many batch slots as answers. They take turns, with new prompts in every
repeat. `generate` makes the text once, at the end; `stream` makes it token by token, as a server must; a server
also sends one event per token. The first server runs the engine in a thread (`one_process.py`), the second in another
process. Several processes read the streams, so that reading does not limit what is measured; they connect before the
clock starts, as clients that reuse their connections do.

There are 64 requests at once; `streams=1` measures a single one. With `rounds=8` there are 8 times as many requests,
and a stream sends the next one as soon as the last is answered. The answers differ in length, so new requests arrive
one by one, as on a real server.

On a CPU the seconds are the CPU time of the engine's and the server's processes, so that the readers and other programs
hardly count.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, closing
from itertools import chain
from multiprocessing import get_context
from typing import NamedTuple

from benchmarks.local_server import LocalServer, local_server
from benchmarks.micro import one_thread
from benchmarks.pictures.picture import BLUE, GREY, ORANGE
from benchmarks.serve import Answer, make_prompts, offer
from beyond.serving.__main__ import STAGES
from beyond.serving.engine_process import load_class
from stage_a_naive.contract.params import SamplingParams
from stage_e_batching import LLM

SERVERS = {"HTTP, one process": "benchmarks.one_process", "HTTP": "beyond.serving"}
WAYS = {  # name and colour in the figure
    "generate": ("generate: text at the end", GREY),
    "stream": ("stream: text per token", BLUE),
    "HTTP, one process": ("HTTP, one process", GREY),
    "HTTP": ("HTTP, two processes", ORANGE),
}
REPEATS = 5
SHARE = 0.25  # of the GPU's memory for each of three engines
CONNECT_SECONDS = 0.3  # for all connections


class Seconds(NamedTuple):
    """The seconds of a way of answering, and of its readers, if it has any."""

    on_clock: float  # to the end of all answers
    of_cpu: float  # for the engine, and the server
    to_first_tokens: float  # on the clock, until every answer had begun
    reading: float = 0.0  # CPU time of the reader that needed most


@one_thread()
def measure(
    model: str = "tutor",
    device: str = "cpu",
    stage: str = "e",
    input_len: int = 32,
    output_len: int = 64,
    readers: int = 4,
    rounds: int = 1,
    streams: int = 64,
) -> dict:
    """Measure the output tokens per second of each way, prefill included; the ways take turns.

    Args:
        output_len: tokens of an answer. With several rounds they have from half of it to all of it.
        readers: processes that read.
        rounds: requests of each stream, one after another.
        streams: answers at a time, and batch slots.
    """
    options = {"max_num_seqs": streams, "enable_prefix_caching": False, "gpu_memory_utilization": SHARE}
    words = ["--stage", stage, "--model", model, "--device", device, "--max-num-seqs", str(streams), "--no-page"]
    words += ["--no-prefix-caching", "--gpu-memory-utilization", str(SHARE)]
    chance, shortest = random.Random(0), output_len if rounds == 1 else output_len // 2
    lengths = [chance.randint(shortest, output_len) for _ in range(streams * rounds)]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    found: dict[str, list[Seconds]] = {way: [] for way in WAYS}
    with (
        ExitStack() as stack,
        closing(load_class(STAGES[stage])(model, device=device, **options)) as llm,
        ProcessPoolExecutor(readers, get_context("spawn")) as pool,
    ):
        servers = {way: stack.enter_context(local_server(*words, module=module)) for way, module in SERVERS.items()}
        for repeat in range(REPEATS + 1):  # the first is a warm-up
            prompts = make_prompts(streams * rounds, input_len, 0, repeat)
            for way, own in found.items():
                if way in servers:
                    own.append(over_http(pool, readers, servers[way], prompts, lengths, rounds))
                else:
                    own.append(offline(llm, way, prompts, params))
    rows = []
    for way, (_, *own) in found.items():
        seconds = [took.of_cpu if llm.device.type == "cpu" else took.on_clock for took in own]
        first_ms = [1e3 * took.to_first_tokens for took in own if rounds == 1]  # else the last begin near the end
        rows.append({"way": way, "tokens_per_s": [sum(lengths) / s for s in seconds], "first_tokens_ms": first_ms})
        rows[-1]["reading"] = [took.reading / took.on_clock for took in own]
    what = {"stage": stage, "streams": streams, "input_len": input_len, "output_len": output_len, "rounds": rounds}
    return {"model": model, **what, "rows": rows}


def offline(llm: LLM, way: str, prompts: list[list[int]], params: list[SamplingParams]) -> Seconds:
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
    pool: Executor, readers: int, server: LocalServer, prompts: list[list[int]], lengths: list[int], rounds: int = 1
) -> Seconds:
    """Time all answers of a server, from the first request on.

    Args:
        pool: of processes that read, each an equal share of the answers.
        lengths: of the answers, in tokens.
        rounds: requests for each of the streams that are read at a time.

    Raises:
        RuntimeError: an answer is missing or too short.
    """
    fixed = {"temperature": 0, "ignore_eos": True}
    asked = zip(prompts, lengths, strict=True)
    bodies = [fixed | {"prompt": prompt, "max_tokens": length} for prompt, length in asked]
    list(pool.map(time.sleep, [0.1] * readers))  # so that all of them are there
    cpu_start, begin = server.cpu_seconds(), time.perf_counter() + CONNECT_SECONDS  # all processes have one clock
    shares = [bodies[i::readers] for i in range(readers)]
    given = [server.url] * readers, shares, [rounds] * readers, [begin] * readers
    found, ends, reading = zip(*pool.map(read_answers, *given), strict=True)
    answers = list(chain.from_iterable(found))
    wrong = [answer.error for answer in answers if answer.error]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(answers)} answers failed: {wrong[0]}")
    begun = max(answer.arrivals[0] for answer in answers) - begin
    return Seconds(max(ends) - begin, server.cpu_seconds() - cpu_start, begun, max(reading))


def read_answers(url: str, bodies: list[dict], rounds: int, begin: float) -> tuple[list[Answer], float, float]:
    """Send requests from `begin` on and read the answers; returns them, the time of the last end, and the CPU time."""
    cpu_start, waiting = time.process_time(), iter(bodies)

    async def read_all() -> list[list[Answer]]:
        return await asyncio.gather(*(read_stream(url, waiting, begin) for _ in range(len(bodies) // rounds)))

    found = asyncio.run(read_all())
    return list(chain.from_iterable(found)), time.perf_counter(), time.process_time() - cpu_start


async def read_stream(url: str, waiting: Iterator[dict], begin: float) -> list[Answer]:
    """Send the requests that other streams have left, one after another."""
    found: list[Answer] = []
    for body in waiting:
        [answer], _ = await offer(url, [body], [begin - time.perf_counter()], connect_early=True)
        if answer.num_tokens != body["max_tokens"]:
            answer.error = answer.error or "too short"
        found.append(answer)
    return found


def shares_of(result: dict) -> dict[str, list[float]]:
    """Return each way's share of `generate`'s rate, in every repeat."""
    rates = {row["way"]: row["tokens_per_s"] for row in result["rows"]}
    return {way: [a / b for a, b in zip(own, rates["generate"], strict=True)] for way, own in rates.items()}


def share(way: str, shares: list[float]) -> str:
    return "1" if way == "generate" else f"{statistics.median(shares):.2f} ({min(shares):.2f}–{max(shares):.2f})"


def work(result: dict) -> str:
    out, rounds = result["output_len"], result.get("rounds", 1)
    load = f"request{'s at once' if result['streams'] > 1 else ''}, {result['input_len']} in, {out} out"
    if rounds > 1:
        load = f"streams of {rounds} requests each, {result['input_len']} in, {out // 2}–{out} out"
    text = f"{result['model']}, stage {result['stage'].upper()}; {result['streams']} {load}; "
    text += f"medians of {len(result['rows'][0]['tokens_per_s'])}, ratios within a repeat"
    if busy := [share for row in result["rows"] for share in row.get("reading", ())]:
        text += f"; no reader computed for more than {max(busy):.0%} of the time"
    return text
