"""An open-loop load on a server: requests arrive at given times, whether or not earlier ones have been answered.

    make serve STAGE=e &
    python -m benchmarks.serve --request-rate 4 --num-prompts 100 --goodput ttft:200 tpot:50

A *closed* loop (a client that sends its next request after an answer) slows down with the server and so hides its
queue. People do not wait for one another: their requests arrive at random times, as a Poisson process. The figures have
the names and definitions of `vllm bench serve`, so that they can be compared. The client competes with the server for
the machine, so it uses asyncio's streams and parses only what it needs; any server with the OpenAI API will do.
Requests are greedy. If the model recommends a penalty, start the server with `--generation-config vllm`, or requests
will have the penalty too.

    TTFT   time to first token: from sending the request to its first token
    ITL    inter-token latency: between two tokens of a request, all gaps of all requests
    TPOT   time per output token: (E2EL - TTFT) / (tokens - 1), one figure per request
    E2EL   end-to-end latency: from sending the request to its last token
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from stage_a_naive.entrypoints.interrupts import run_command

LATENCIES = ("ttft", "tpot", "itl", "e2el")
FIRST_ID, LAST_ID = 10, 1000  # token ids that every model has


@dataclass
class Answer:
    """The outcome of one request. Times are seconds on the monotonic clock."""

    due: float  # when it was to be sent
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of the events that hold a token
    num_tokens: int = 0  # that the server says it generated
    error: str = ""  # why there is no answer: a status or an error


async def stream_completion(
    url: str, body: dict[str, object], answer: Answer, api_key: str | None = None, connect_early: bool = False
) -> None:
    """Send a streamed request to the server at `url` (without a path) when `answer` is due; record times in `answer`.

    Args:
        connect_early: connect at once, like a client that reuses its connections, instead of when it is due.

    Raises:
        OSError, EOFError: the connection failed or broke off.
    """
    parts = urlsplit(url)
    text = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = ["POST /v1/completions HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    head += [f"Content-Length: {len(text)}", "Connection: close"] + [f"Authorization: Bearer {api_key}"] * bool(api_key)
    request = "\r\n".join([*head, "", ""]).encode() + text
    if not connect_early:
        await asyncio.sleep(answer.due - time.perf_counter())
    answer.sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 20)
    try:
        if connect_early:
            await asyncio.sleep(answer.due - time.perf_counter())
            answer.sent = time.perf_counter()
        writer.write(request)
        status = (await reader.readline()).split()
        while (await reader.readline()).strip():
            pass  # the headers
        if status[1:2] != [b"200"]:
            answer.error = f"status {status[1].decode() if status[1:] else 'missing'}"
            return
        pending = b""
        while size := int(await reader.readuntil(b"\n"), 16):  # of a chunk, which may end within an event
            pending = (pending + (await reader.readexactly(size + 2))[:-2]).replace(b"\r\n", b"\n")
            *events, pending = pending.split(b"\n\n")
            for event in events:
                _note(event, answer)
        if not answer.arrivals:
            answer.error = answer.error or "no token came"
    finally:
        writer.close()


def _note(event: bytes, answer: Answer) -> None:
    data = event.removeprefix(b"data:").lstrip()
    if not data.startswith(b"{"):  # a comment, or the word at the end
        return
    now = time.perf_counter()
    message = json.loads(data)
    if error := message.get("error"):
        answer.error = error["message"] if isinstance(error, dict) else str(error)
    elif message.get("choices"):
        answer.arrivals.append(now)
    if message.get("usage"):
        answer.num_tokens = message["usage"]["completion_tokens"]


async def offer(
    url: str, bodies: Sequence[dict], times: Sequence[float], api_key: str | None = None, connect_early: bool = False
) -> tuple[list[Answer], float]:
    """Send every request at its time; returns each outcome, and the total time in seconds."""

    async def send(body: dict[str, object], answer: Answer) -> None:
        try:
            await stream_completion(url, body, answer, api_key, connect_early)
        except EOFError:
            answer.error = "the connection broke off"
        except (OSError, ValueError) as error:
            answer.error = str(error) or type(error).__name__

    start = time.perf_counter()
    answers = [Answer(start + at) for at in times]
    await asyncio.gather(*map(send, bodies, answers))
    return answers, time.perf_counter() - start


def schedule(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when each request is sent, in seconds from the beginning.

    Args:
        rate: requests per second; infinity sends all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less means bursts, more is
            steadier. The mean gap is always 1 / rate.
    """
    if math.isinf(rate):
        return [0.0] * count
    chance = random.Random(seed)
    gaps = (chance.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


def make_prompts(count: int, length: int, prefix: int, seed: int) -> list[list[int]]:
    """Make prompts of random token ids; the first `prefix` ids are the same in all."""
    chance = random.Random(f"prompts {seed}")
    shared = [chance.randrange(FIRST_ID, LAST_ID) for _ in range(prefix)]
    return [shared + [chance.randrange(FIRST_ID, LAST_ID) for _ in range(length - prefix)] for _ in range(count)]


def latencies(answer: Answer) -> dict[str, list[float]]:
    """Return the latencies of one answer by name, in milliseconds. TPOT needs more than one token."""
    first, last = answer.arrivals[0], answer.arrivals[-1]
    return {
        "ttft": [1e3 * (first - answer.sent)],
        "tpot": [1e3 * (last - first) / (answer.num_tokens - 1)] if answer.num_tokens > 1 else [],
        "itl": [1e3 * (b - a) for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)],
        "e2el": [1e3 * (last - answer.sent)],
    }


def summarize(
    answers: Sequence[Answer], seconds: float, prompt_tokens: int, goals: dict[str, float]
) -> dict[str, object]:
    """Summarise a load.

    Args:
        prompt_tokens: of each request.
        goals: upper limits of TTFT, TPOT and E2EL in milliseconds for a request to count as good.
    """
    done = [answer for answer in answers if not answer.error and answer.arrivals]
    each = [latencies(answer) for answer in done]
    output_tokens = sum(answer.num_tokens for answer in done)
    found: dict[str, object] = {
        "completed": len(done),
        "failed": len(answers) - len(done),
        "duration_s": seconds,
        "output_tokens": output_tokens,
        "request_throughput": len(done) / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (output_tokens + prompt_tokens * len(done)) / seconds,
        "late_p99_ms": percentile([1e3 * (answer.sent - answer.due) for answer in answers], 99),
    }
    if goals:
        good = sum(all(ms <= most for name, most in goals.items() for ms in one[name]) for one in each)
        found["request_goodput"] = good / seconds
    for name in LATENCIES:
        values = [ms for one in each for ms in one[name]]
        found[f"mean_{name}_ms"] = statistics.fmean(values) if values else None
        found |= {f"median_{name}_ms": percentile(values, 50), f"p99_{name}_ms": percentile(values, 99)}
    return found


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return a percentile, linear between the two nearest values; None without values."""
    return float(np.percentile(values, share)) if len(values) else None


def read_goal(word: str) -> tuple[str, float]:
    """Parse `ttft:200` into a name and milliseconds; raises `ValueError` for anything else."""
    name, _, most = word.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise ValueError(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, got {word!r}")
    return name, float(most)


def table(found: dict[str, object]) -> str:
    """Format the figures as a table."""
    rows = [f"{name.replace('_', ' '):28} {value:12,.2f}" for name, value in found.items() if not name.endswith("_ms")]
    rows += ["", f"{'ms':28} {'mean':>12} {'median':>12} {'p99':>12}"]
    for name in LATENCIES:
        values = [found[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99")]
        rows.append(f"{name.upper():28} " + " ".join("           –" if v is None else f"{v:12,.2f}" for v in values))
    if found["late_p99_ms"] > 10:
        late = found["late_p99_ms"]
        rows += ["", f"This client sent requests up to {late:.0f} ms late (p99): it needs a separate CPU."]
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Offer a load and print the figures; returns 1 if a request failed, 2 if the arguments are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", help="that it asks for")
    parser.add_argument("--num-prompts", type=int, default=100, help="requests (default: %(default)s)")
    parser.add_argument("--request-rate", type=float, default=math.inf, help="per second (default: all at once)")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--prefix-len", type=int, default=0, help="of these, shared by all (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    parser.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="such as ttft:200 tpot:50")
    parser.add_argument("--output", type=Path, help="write the figures, and every request's times, to this JSON file")
    args = parser.parse_args(argv)
    try:
        goals = dict(map(read_goal, args.goodput))
        if not (args.num_prompts > 0 and args.request_rate > 0 and args.burstiness > 0 and args.output_len > 0):
            raise ValueError("--num-prompts, --request-rate, --burstiness and --output-len must be above 0")
        if not 0 <= args.prefix_len < args.input_len:
            raise ValueError("--prefix-len must be less than --input-len")
        if not args.url.startswith("http://"):
            raise ValueError(f"--url must begin with http://, got {args.url}")
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        with urlopen(Request(f"{args.url.rstrip('/')}/v1/models", headers=headers), timeout=10) as response:
            model = json.load(response)["data"][0]["id"]
    except (json.JSONDecodeError, LookupError, TypeError):
        print(f"error: {args.url} names no model in /v1/models: is it a server of the OpenAI API?", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        hint = "; --url takes a server's address without a path" if isinstance(error, OSError) else ""
        print(f"error: {getattr(error, 'reason', error)}{hint}", file=sys.stderr)
        return 2
    fixed = {"model": model, "max_tokens": args.output_len, "temperature": 0, "ignore_eos": True}
    prompts = make_prompts(args.num_prompts, args.input_len, args.prefix_len, args.seed)
    times = schedule(args.num_prompts, args.request_rate, args.burstiness, args.seed)
    answers, seconds = asyncio.run(offer(args.url, [fixed | {"prompt": p} for p in prompts], times, args.api_key))
    found = summarize(answers, seconds, args.input_len, goals)
    print(table(found))
    for reason in sorted({answer.error for answer in answers if answer.error}):
        print(f"failed: {reason}", file=sys.stderr)
    if args.output:
        from benchmarks.results import environment, write  # here: a load needs no PyTorch

        options = {name: value for name, value in vars(args).items() if name not in ("api_key", "output")}
        payload = {"kind": "serve", "environment": environment(), "options": options | {"model": model}}
        write(payload | {"figures": found, "rows": list(map(asdict, answers))}, args.output)
    return int(found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(run_command(main))
