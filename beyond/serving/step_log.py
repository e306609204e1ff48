"""What the live page draws: the engine's last steps; what waits, what runs and what the pool holds between two steps.

A page is a reader like any other and must not slow a step down. So a step notes five numbers here. The rest is read off
the queues between two steps, where nothing changes, and only while a page is open.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from stage_e_batching.calls import Calls
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep, State

MOST_STEPS, MOST_ENDED, MOST_WAITING, MOST_BLOCKS = 120, 10, 64, 2048  # in one picture
FREE, CACHED = 0, 1  # a block without an owner: empty, or with content that the prefix cache can find


class StepLog:
    """Keeps an engine's last steps and the requests that ended in them."""

    def __init__(self) -> None:
        self.steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
        self.ended: deque[dict[str, Any]] = deque(maxlen=MOST_ENDED)

    def __call__(self, step: ScheduledStep, ended: list[BatchSequence], ran: float) -> None:
        """Note a step, and the requests that got their last token in it.

        Args:
            ran: when the step's tokens were known (monotonic clock).
        """
        if len(step):
            self.steps.append(
                {
                    "number": step.number,
                    "prefill": step.total_tokens - step.num_decodes,
                    "decode": step.num_decodes,
                    "preempted": len(step.preempted),
                    "ms": round(1e3 * (ran - step.time), 2),
                }
            )
        self.ended.extend(_summary(sequence) for sequence in ended if sequence.output is not None)


def watch(calls: Calls) -> StepLog:
    """Return the log of an engine's steps; it begins with the first call."""
    reports = calls.engine.reports
    log = next((report for report in reports if isinstance(report, StepLog)), None)
    if log is None:
        log = StepLog()
        reports.append(log)
    return log


def describe(calls: Calls) -> dict[str, Any]:
    """Describe an engine between two steps: queues, pool of blocks, and what its log holds."""
    log = watch(calls)
    with calls.lock:  # other threads of the program may run steps, too
        scheduler, counters = calls.engine.scheduler, calls.engine.counters
        manager = scheduler.block_manager
        running = [sequence for sequence in scheduler.unfinished if sequence.state is not State.WAITING]
        return {
            "batch_slots": scheduler.max_num_seqs,
            "token_budget": scheduler.max_num_batched_tokens,
            "num_waiting": len(scheduler.waiting),
            "waiting": [_progress(sequence) for sequence in islice(scheduler.waiting, MOST_WAITING)],
            "running": [_progress(sequence) for sequence in running],
            "block_size": manager.block_size,
            "num_blocks": manager.num_blocks,
            "num_used_blocks": manager.num_used,
            **_pool(scheduler, running),
            "steps": list(log.steps),
            "ended": list(log.ended),
            "num_steps": counters.num_steps,
            "num_preemptions": counters.num_preemptions,
        }


def _progress(sequence: BatchSequence) -> dict[str, Any]:
    return {
        "id": sequence.request_id,
        "state": sequence.state.value,
        "prompt": sequence.num_prompt_tokens,
        "cached": sequence.num_cached_tokens,
        "computed": sequence.num_computed_tokens,
        "generated": sequence.num_generated_tokens,
        "most": sequence.max_total_tokens,
        "blocks": len(sequence.block_table),
        "preemptions": sequence.num_preemptions,
    }


def _pool(scheduler: Scheduler, running: list[BatchSequence]) -> dict[str, Any]:
    """List the blocks of the pool, or every n-th of a large one: `FREE`, `CACHED`, or [first owner, their number]."""
    manager = scheduler.block_manager
    stride = -(-manager.num_blocks // MOST_BLOCKS)
    owners: dict[int, list[int]] = {}
    for sequence in running:
        for block in sequence.block_table:
            if block % stride == 0:
                owners.setdefault(block, [sequence.request_id, 0])[1] += 1
    shown = range(0, manager.num_blocks, stride)
    blocks = [owners.get(block) or (CACHED if manager.is_cached(block) else FREE) for block in shown]
    return {"every_nth_block": stride, "blocks": blocks}


def _summary(sequence: BatchSequence) -> dict[str, Any]:
    assert sequence.output is not None  # it ended well
    metrics = sequence.output["metrics"]
    return {
        "id": sequence.request_id,
        "prompt": metrics["num_prompt_tokens"],
        "cached": metrics["num_cached_tokens"],
        "generated": metrics["num_generated_tokens"],
        "ttft_ms": round(1e3 * metrics["ttft"], 2),
        "tpot_ms": round(1e3 * metrics["tpot"], 2),
        "reason": sequence.output["finish_reason"],
    }
