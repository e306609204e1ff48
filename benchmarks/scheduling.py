"""What the scheduler's rules are worth, counted in steps and tokens: the same on every machine, no model needed.

    python -m benchmarks.scheduling      # writes benchmarks/results/scheduling.json and two timelines

Stage E's scheduler and engine run real workloads with a model that takes no time and makes up its tokens:

* *seats*: `mixed` with 64 and 256 seats. A seat-step is one seat in one decode step; a static batch keeps a seat until
  its slowest member is done, continuous batching gives it away at once. How many steps does each take?
* *tight pool*: 16 requests of 8 in / 60 out in 40 pages of 4, with the watermark and the doubling and without them.
* *timelines*: a handful of requests on six seats, prompts in chunks and prompts whole.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import timeline
from benchmarks.environment import ROOT, environment
from benchmarks.results import RESULTS_DIRECTORY
from benchmarks.step_cost import NullRunner
from benchmarks.workloads import make_workload
from stage_a_naive.loading import load_tokenizer, resolve
from stage_a_naive.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching import scheduler as rules
from stage_e_batching.engine import Engine
from stage_e_batching.step import BatchSequence
from stage_e_batching.trace import Trace

STAGE = ROOT / "stage_e_batching"
RESULT = RESULTS_DIRECTORY / "scheduling.json"


def run(
    lengths: Sequence[tuple[int, int]],
    trace: Path | None = None,
    later: int | None = None,
    scheduler_class: type[rules.Scheduler] = rules.Scheduler,
    **options: object,
) -> dict[str, int]:
    """Serve requests of these (prompt, answer) lengths; returns the engine's counters at the end.

    Args:
        trace: record the steps here.
        later: requests from this one on arrive one by one, every third step.
    """
    scheduler = scheduler_class(**options)
    engine = Engine(
        scheduler,
        NullRunner(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.block_manager.block_size),
        tokenizer=load_tokenizer(resolve("tutor")),
        eos_token_ids=frozenset(),
        max_model_len=4096,
        trace=Trace(trace) if trace else None,
    )
    waiting = []
    for i, (prompt, answer) in enumerate(lengths):
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        ids = [(i * 131 + j * 7) % 4000 + 1 for j in range(prompt)]  # no two share a page
        waiting.append(Request(i, ids, params, seed=i))
    arriving = len(waiting) if later is None else later
    for request in waiting[:arriving]:
        engine.add_request(request, streams=False)
    rest = waiting[arriving:]
    while rest or engine.has_unfinished():
        if rest and engine.counters.num_steps % 3 == 2:
            engine.add_request(rest.pop(0), streams=False)
        engine.step()
    return engine.stats()


def seats(num_seats: int) -> dict[str, object]:
    """Decode steps of `mixed` with so many seats: static batches in the order of arrival, and continuous batching."""
    workload = make_workload("mixed", "gpu")
    [call] = workload.rounds[0]
    answers = list(call.max_tokens)
    lengths = list(zip(map(len, call.prompts), answers, strict=True))
    static = sum(max(answers[i : i + num_seats]) for i in range(0, len(answers), num_seats))
    counters = run(
        lengths, num_blocks=num_seats * 32, block_size=64, max_num_seqs=num_seats, max_num_batched_tokens=16384
    )
    tokens = sum(answers)
    assert counters["num_generated_tokens"] == tokens
    return {
        "seats": num_seats,
        "tokens": tokens,
        "static_steps": static,
        "continuous_steps": counters["num_steps"],
        "static_useful": tokens / (static * num_seats),
        "continuous_useful": tokens / (counters["num_steps"] * num_seats),
    }


class NoWatermark(rules.Scheduler):
    """Admits whoever fits."""

    def watermark(self, sequence: BatchSequence) -> int:
        return 0


class NoDoubling(rules.Scheduler):
    """Asks a sequence that returns for no more than one that is new."""

    def watermark(self, sequence: BatchSequence) -> int:
        return self.block_manager.blocks_for(rules.WATERMARK * (self.num_running + 1)) if self.num_running else 0


def tight_pool(name: str, scheduler_class: type[rules.Scheduler]) -> dict[str, object]:
    """16 requests of 8 in / 60 out in 40 pages of 4."""
    counters = run(
        [(8, 60)] * 16, scheduler_class=scheduler_class, num_blocks=40, block_size=4, max_num_seqs=16,
        max_num_batched_tokens=64, enable_prefix_caching=False,
    )  # fmt: skip
    return {
        "rule": name,
        "preemptions": counters["num_preemptions"],
        "recomputed": counters["num_recomputed_tokens"],
        "useful": 16 * (8 + 59),
        "steps": counters["num_steps"],
    }


def draw_timelines() -> None:
    """The pictures of the README."""
    lengths = [(12, 40), (30, 9), (8, 25), (20, 12), (10, 33), (16, 6), (90, 14), (9, 18), (24, 10), (70, 8), (12, 20)]
    options = {"num_blocks": 44, "block_size": 8, "max_num_seqs": 6}
    pictures = {
        "timeline.png": ("Chunks of at most 24 tokens a step", {"max_num_batched_tokens": 24}),
        "timeline_whole.png": (
            "Whole prompts, in steps of their own",
            {"max_num_batched_tokens": 96, "enable_chunked_prefill": False},
        ),
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, (title, extra) in pictures.items():
            trace = Path(directory) / "trace.jsonl"
            run(lengths, trace, later=5, **options, **extra)
            timeline.draw(trace, STAGE / name, title)


def count() -> dict[str, object]:
    """The results file."""
    return {
        "kind": "scheduling",
        "environment": environment(),
        "seats": [seats(number) for number in (64, 256)],
        "tight_pool": [
            tight_pool("no watermark", NoWatermark),
            tight_pool("watermark", NoDoubling),
            tight_pool("watermark that doubles", rules.Scheduler),
        ],
    }


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    result = count()
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw_timelines()
    for row in [*result["seats"], *result["tight_pool"]]:
        print(row)


if __name__ == "__main__":
    main()
