"""Warm-up: what happens once must not be counted as if it happened always.

The first call of anything is slow: kernels are compiled, memory is allocated, graphs are recorded, clocks ramp up. So
every workload's shapes run once before they are timed, with other token ids (a prefix cache must find nothing).
A short warm-up comes first and tells how long the whole would take, which also decides whether it is run at all.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figures import TimedCall
from benchmarks.workloads import Call, Workload

TimeCall = Callable[[Call], TimedCall]
SHORT_TOKENS = 5
SHORT_REQUESTS = 2  # enough to know the pace of an engine that serves one request after another


def estimate(time_call: TimeCall, workload: Workload, one_at_a_time: bool) -> float:
    """Run a short version of one round, twice; returns about how many seconds a whole round would take."""
    seconds = 0.0
    for whole in workload.warm_up_round():
        count = SHORT_REQUESTS if one_at_a_time else len(whole.prompts)
        outputs = tuple(min(n, SHORT_TOKENS) for n in whole.max_tokens[:count])
        short = Call(whole.tag, whole.prompts[:count], outputs)
        time_call(short)
        timed = time_call(short)
        share = whole.prompt_tokens / short.prompt_tokens if one_at_a_time else 1.0
        steps = whole.output_tokens if one_at_a_time else max(whole.max_tokens)
        seconds += timed.seconds * share + max(steps - SHORT_TOKENS, 0) * _step_seconds(timed)
    return seconds


def _step_seconds(timed: TimedCall) -> float:
    """The pace of decoding. The fastest request counts: the others also waited for each other's prefill."""
    paces = [m["tpot"] for m in timed.metrics if m["tpot"] > 0]
    return min(paces) if paces else timed.seconds / max(timed.call.max_tokens)


def warm_up(
    time_call: TimeCall, workload: Workload, one_at_a_time: bool, expected_seconds: float, most_seconds: float
) -> None:
    """Run a whole round, where `most_seconds` allow it.

    An engine that serves one request at a time is given as many as fit, of all lengths: its programs may depend on the
    length. A batch would not be done sooner with fewer requests; if it is too long, the short version has to do.
    """
    share = min(1.0, most_seconds / max(expected_seconds, 1e-9))
    for call in workload.warm_up_round():
        by_length = sorted(range(len(call.prompts)), key=lambda i: len(call.prompts[i]) + call.max_tokens[i])
        count = int(share * len(by_length)) if one_at_a_time or share == 1 else 0
        if count == 0:
            continue
        # From the longest down, because memory grows with the longest.
        picked = [by_length[-1 - i * len(by_length) // count] for i in range(count)]
        time_call(Call(call.tag, tuple(call.prompts[i] for i in picked), tuple(call.max_tokens[i] for i in picked)))
