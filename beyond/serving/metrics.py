"""Metrics for operators, with vLLM's names, in Prometheus's text format.

Prometheus reads `/metrics` every few seconds and stores the values. So a server keeps no history, only growing totals
(*counters*: the rate is the difference of two readings), current values (*gauges*), and *histograms*: the number of
observations up to each of a few limits. Averages and percentiles over any period are computed later, from the
differences.

Totals and gauges are read from the engine between two steps, at each request. Histograms are filled from the events on
their way to the clients.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/. Names: https://docs.vllm.ai/en/stable/usage/metrics.html.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
    "engine_silent_seconds": ("gauge", "How long the engine has owed an answer, which it gives between two steps."),
    "prefix_cache_queries": ("counter", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("counter", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("counter", "Prompt tokens, computed or found in the cache."),
    "generation_tokens": ("counter", "Tokens generated."),
    "num_preemptions": ("counter", "How often the blocks of a request were taken away."),
    "spec_decode_num_drafts": ("counter", "Drafts verified."),
    "spec_decode_num_draft_tokens": ("counter", "Tokens of these drafts."),
    "spec_decode_num_accepted_tokens": ("counter", "Tokens of these drafts that were right."),
}


class RequestMetrics:
    """Histograms and counts of ended requests, updated event by event.

    Args:
        engine_pid: process id of the engine, if it runs in another process.
    """

    def __init__(self, engine_pid: int | None = None) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, meaning: str, limits: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", f"{meaning}, in seconds.", buckets=limits, registry=self.registry)

        self.first_token = histogram("time_to_first_token", "From arrival to the first token", FIRST_TOKEN)
        self.next_token = histogram("inter_token_latency", "Between two tokens of a request", NEXT_TOKEN)
        self.queue_time = histogram(
            "request_queue_time", "From arrival to the first step, or to leaving", WHOLE_REQUEST
        )
        self.whole_request = histogram("e2e_request_latency", "From arrival to the last token", WHOLE_REQUEST)
        meaning = "Requests that ended, by reason."
        ended = Counter("vllm:request_success", meaning, ["finished_reason"], registry=self.registry)
        self.ended = {reason: ended.labels(reason) for reason in ("stop", "length", "abort", "error")}
        meaning = "HTTP requests answered; code tells why one was refused or failed."
        self.answers = Counter("http_requests", meaning, ["handler", "status", "code"], registry=self.registry)
        self.processes = [ProcessCollector(registry=None)]  # this one, and the engine's
        if engine_pid is not None:
            self.processes.append(ProcessCollector("engine", pid=lambda: engine_pid, registry=None))

    def observe(self, now: float, call: Call, request: Request, event: Event) -> None:
        """Record an event.

        Args:
            now: when the event's tokens were known, in seconds on the monotonic clock.
        """
        if event.tokens:
            before = call.last_token_times.get(request.index)
            if before is None:
                self.first_token.observe(now - request.arrival_time)
            else:
                self.next_token.observe(now - before)
            call.last_token_times[request.index] = now
        if event.error is not None:
            self.ended["error"].inc()
        elif event.output is not None:
            metrics = event.output["metrics"]
            self.ended[event.output["finish_reason"]].inc()
            self.queue_time.observe(metrics["ttft"] - metrics["prefill_time"])
            self.whole_request.observe(now - request.arrival_time)

    def count_aborted(self, now: float, call: Call, num_requests: int) -> None:
        """Record requests whose client disconnected. Those without a token count as waiting until now.

        Args:
            num_requests: unfinished requests of the call.
        """
        self.ended["abort"].inc(num_requests)
        for request in call.requests:
            if request.index not in call.last_token_times:
                self.queue_time.observe(now - request.arrival_time)

    def count_answer(self, handler: str, status: int, code: str) -> None:
        """Record an answered HTTP request.

        Args:
            handler: the path of its route: each name invented by a client would become a separate series.
            code: the error's code; empty for an answer.
        """
        self.answers.labels(handler, str(status), code).inc()


def exposition(model_name: str, engine: Mapping[str, float], requests: RequestMetrics) -> str:
    """Return all metrics in Prometheus's format.

    Args:
        model_name: a label of every line but those of processes.
        engine: the result of `engine_numbers`.
    """
    families = [*_engine_families(engine), *requests.registry.collect()]
    for family in families:
        label = {"model_name": model_name}
        told = [sample for sample in family.samples if not sample.name.endswith("_created")]  # a time nobody asks for
        family.samples = [sample._replace(labels=label | sample.labels) for sample in told]
    families += [family for process in requests.processes for family in process.collect()]
    made = cast("CollectorRegistry", SimpleNamespace(collect=lambda: families))  # all that it is asked for
    return generate_latest(made).decode()


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


def _engine_families(numbers: Mapping[str, float]) -> Iterator[Metric]:
    for name, value in numbers.items():
        kind, meaning = ENGINE[name]
        make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        yield make(f"vllm:{name}", meaning, value=value)
