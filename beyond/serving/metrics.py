"""What an operator watches, under vLLM's names, in the text format that Prometheus reads.

Prometheus asks `/metrics` every few seconds and keeps what it finds. So a server keeps no history, only totals that
grow (*counters*: the rate is the difference of two readings), what is now (*gauges*), and *histograms*: how many
observations were at most this large, for a handful of limits. Averages and percentiles over any time are computed
later, from the differences.

Totals and gauges are read from the engine between two steps when they are asked for. Histograms are filled
from the events on their way to the clients.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/. Names: https://docs.vllm.ai/en/stable/usage/metrics.html.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from beyond.serving.engine_loop import Call
from stage_a_naive.contract.outputs import Request
from stage_e_batching.calls import Calls, Event

# Upper limits of the histograms' buckets, in seconds: vLLM's.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
WHOLE_REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)

ENGINE = {  # kind and meaning of what the engine itself counts
    "num_requests_running": ("gauge", "Requests that run."),
    "num_requests_waiting": ("gauge", "Requests that wait to run."),
    "kv_cache_usage_perc": ("gauge", "Share of blocks in use; 1 is all."),
    "prefix_cache_queries": ("counter", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("counter", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("counter", "Prompt tokens, computed or found in the cache."),
    "generation_tokens": ("counter", "Tokens generated."),
    "num_preemptions": ("counter", "How often the blocks of a request were taken away."),
    "spec_decode_num_drafts": ("counter", "Drafts verified."),
    "spec_decode_num_draft_tokens": ("counter", "Tokens of these drafts."),
    "spec_decode_num_accepted_tokens": ("counter", "Tokens of these drafts that were right."),
}


class Histogram:
    """How many observations fell into each bucket, and their sum, in seconds.

    Args:
        name, meaning: as they are written out.
        limits: upper limits of the buckets, ascending; what is above the last one is counted as well.
    """

    def __init__(self, name: str, meaning: str, limits: tuple[float, ...]) -> None:
        self.name, self.meaning, self.limits = name, meaning, limits
        self.counts = [0] * (len(limits) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value


class RequestMetrics:
    """The histograms and the ends of requests, filled event by event."""

    def __init__(self) -> None:
        self.num_ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.first_token = Histogram("time_to_first_token", "From arrival to the first token", FIRST_TOKEN)
        self.next_token = Histogram("inter_token_latency", "Between two tokens of a request", NEXT_TOKEN)
        self.queue_time = Histogram("request_queue_time", "From arrival to the first step", WHOLE_REQUEST)
        self.whole_request = Histogram("e2e_request_latency", "From arrival to the last token", WHOLE_REQUEST)

    def observe(self, now: float, call: Call, request: Request, event: Event) -> None:
        """Note what an event says.

        Args:
            now: when the event's tokens were known, in seconds on the monotonic clock.
        """
        if event.tokens:
            before = call.last_token_times.get(request.index)
            if before is None:
                self.first_token.observe(now - call.arrival_time)
            else:
                self.next_token.observe(now - before)
            call.last_token_times[request.index] = now
        if event.error is not None:
            self.num_ended["error"] += 1
        elif event.output is not None:
            metrics = event.output["metrics"]
            self.num_ended[event.output["finish_reason"]] += 1
            self.queue_time.observe(metrics["ttft"] - metrics["prefill_time"])
            self.whole_request.observe(now - call.arrival_time)

    def count_aborted(self, num_requests: int) -> None:
        """Note requests whose client went away before they were answered."""
        self.num_ended["abort"] += num_requests


def exposition(model_name: str, engine: Mapping[str, float], requests: RequestMetrics) -> str:
    """All metrics as Prometheus reads them.

    Args:
        model_name: a label of every line.
        engine: what `engine_numbers` returns.
    """
    quoted = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'model_name="{quoted}"'
    lines = [*_engine_lines(engine, label), *_end_lines(requests, label)]
    for histogram in (requests.first_token, requests.next_token, requests.queue_time, requests.whole_request):
        lines += _histogram_lines(histogram, label)
    return "\n".join(lines) + "\n"


def engine_numbers(calls: Calls) -> dict[str, float]:
    """Read the engine's gauges and totals, by the names of `ENGINE`. Between two steps nothing changes."""
    scheduler, counters = calls.engine.scheduler, calls.engine.counters
    blocks = scheduler.block_manager
    found = {
        "num_requests_running": scheduler.num_running,
        "num_requests_waiting": len(scheduler.waiting),
        "kv_cache_usage_perc": blocks.num_used / blocks.num_blocks,
        "prefix_cache_queries": counters.num_prompt_tokens if blocks.enable_prefix_caching else 0,
        "prefix_cache_hits": counters.num_cached_tokens,
        "prompt_tokens": counters.num_prompt_tokens,
        "generation_tokens": counters.num_generated_tokens,
        "num_preemptions": counters.num_preemptions,
    }
    totals = vars(counters)
    if "num_verifications" in totals:
        found["spec_decode_num_drafts"] = totals["num_verifications"]
        found["spec_decode_num_draft_tokens"] = totals["num_draft_tokens"]
        found["spec_decode_num_accepted_tokens"] = totals["num_accepted_tokens"]
    return found


def _engine_lines(numbers: Mapping[str, float], label: str) -> Iterator[str]:
    for name, value in numbers.items():
        kind, meaning = ENGINE[name]
        sample = f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}"
        yield from _head(sample, kind, meaning)
        yield f"{sample}{{{label}}} {value}"


def _end_lines(requests: RequestMetrics, label: str) -> Iterator[str]:
    yield from _head("vllm:request_success_total", "counter", "Requests that ended, by reason.")
    for reason, count in requests.num_ended.items():
        yield f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {count}'


def _histogram_lines(histogram: Histogram, label: str) -> Iterator[str]:
    name = f"vllm:{histogram.name}_seconds"
    yield from _head(name, "histogram", f"{histogram.meaning}, in seconds.")
    at_most = list(accumulate(histogram.counts))  # every bucket also holds what the smaller ones hold
    for limit, count in zip([*histogram.limits, "+Inf"], at_most, strict=True):
        yield f'{name}_bucket{{{label},le="{limit}"}} {count}'
    yield f"{name}_sum{{{label}}} {histogram.sum}"
    yield f"{name}_count{{{label}}} {at_most[-1]}"


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
