"""What the live page draws: the engine's last steps; what waits, what runs and what the pool holds between two steps.

A page is a reader like any other and must not slow a step down. So a step notes five numbers here. The rest is read off
the queues between two steps, where nothing changes, and only while a page is open.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from stage_e_batching.engine import Engine
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep, State
from stage_e_batching.trace import Trace

MOST_STEPS, MOST_ENDED, MOST_WAITING, MOST_BLOCKS = 120, 10, 64, 2048  # in one picture
FREE, CACHED = 0, 1  # a block without an owner: empty, or with content that the prefix cache can find


class StepLog:
    """Takes the place of the engine's trace, and keeps the last steps and the requests that ended in them.

    Args:
        trace: the engine's own, which goes on writing its file; None where there is none.
    """

    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace
        self.steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
        self.ended: deque[dict[str, Any]] = deque(maxlen=MOST_ENDED)

    def begin(self, step: ScheduledStep, scheduler: Scheduler) -> None:
        """Pass a step that begins on to the trace file."""
        if self.trace is not None:
            self.trace.begin(step, scheduler)

    def end(self, step: ScheduledStep, ended: list[BatchSequence], ran: float) -> None:
        """Note a step, and the requests that got their last token in it.

        Args:
            ran: when the step's tokens were known (monotonic clock).
        """
        if self.trace is not None:
            self.trace.end(step, ended, ran)
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

    def forget(self) -> None:
        """Pass on to the trace file that the steps which have begun broke off."""
        if self.trace is not None:
            self.trace.forget()

    def close(self) -> None:
        """Close the trace file, if there is one."""
        if self.trace is not None:
            self.trace.close()


def watch(engine: Engine) -> None:
    """Have the engine's steps noted in a `StepLog`, if they are not yet."""
    if not isinstance(engine.trace, StepLog):
        engine.trace = StepLog(engine.trace)


def describe(engine: Engine) -> dict[str, Any]:
    """Describe an engine that is watched, between two steps: queues, pool of blocks, and what its log holds."""
    log = engine.trace
    assert isinstance(log, StepLog)
    with engine._lock:  # other threads of the program may run steps, too
        scheduler = engine.scheduler
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
            "num_steps": engine.counters.num_steps,
            "num_preemptions": engine.counters.num_preemptions,
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
