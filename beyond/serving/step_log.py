"""The data of the live page: the engine's last steps, its queues, and the contents of the pool between two steps.

A page must not slow down a step, so a step records only a few numbers here. The rest is read from the queues between
two steps, when nothing changes, and only while a page is open.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import chain, islice
from typing import Any

from stage_e_batching.calls import Calls
from stage_e_batching.engine import Engine
from stage_e_batching.queues import LOOKAHEAD
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep, State

MOST_STEPS, MOST_ENDED, MOST_WAITING, MOST_BLOCKS, MOST_OWNERS = 120, 10, 64, 2048, 4  # in one picture
FREE, CACHED = 0, 1  # a block without an owner: empty, or with content that the prefix cache can find
TICK_SECONDS, MOST_TICKS = 0.5, 120  # tokens per second are counted in these pieces, for a minute


class StepLog:
    """Keeps an engine's last steps, its last minute, and the requests that ended or lost their blocks.

    Args:
        engine: the engine whose steps are logged.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_accepted = self._num_generated = 0  # tokens until the last step
        self.steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
        self.ended: deque[dict[str, Any]] = deque(maxlen=MOST_ENDED)
        self.preempted: deque[dict[str, int]] = deque(maxlen=MOST_WAITING)
        self.ticks: deque[list[int]] = deque(maxlen=MOST_TICKS)  # number, tokens, how many waited at its end
        self.accepted: dict[int, int] = {}  # guesses that were right in the last step, by request

    def __call__(self, step: ScheduledStep, ended: list[BatchSequence], ran: float) -> None:
        """Record a step, and the requests that got their last token in it.

        Args:
            ran: when the step's tokens were known (monotonic clock).
        """
        if len(step):
            decodes, accepted = step.sequences[: step.num_decodes], self._count_accepted(step)
            self.steps.append(
                {
                    "number": step.number,
                    "prefill": step.total_tokens - step.num_decodes,
                    "decode": step.num_decodes,
                    "guesses": step.num_decodes - len(set(decodes)),  # of the decodes: all but each sequence's first
                    "accepted": accepted,
                    "recomputed": step.num_recomputed,
                    "preempted": len(step.preempted),
                    "ms": round(1e3 * (ran - step.time), 2),
                }
            )
        self._count_tokens(ran)
        for sequence, num_blocks, num_tokens, _ in step.preempted:
            lost = {"id": sequence.request_id, "step": step.number, "blocks": num_blocks, "tokens": num_tokens}
            self.preempted.append(lost)
        self.ended.extend(_summary(sequence) for sequence in ended if sequence.output is not None)

    def _count_accepted(self, step: ScheduledStep) -> int:
        """Count the guesses that were right: a sequence that samples n tokens in a step had n - 1 of them."""
        before = self._num_accepted
        self._num_accepted = getattr(self._engine.counters, "num_accepted_tokens", 0)  # of engines that speculate
        found = Counter(step.sampling) if self._num_accepted > before else {}
        self.accepted = {sequence.request_id: n - 1 for sequence, n in found.items() if n > 1}
        return self._num_accepted - before

    def _count_tokens(self, ran: float) -> None:
        tick, total = int(ran / TICK_SECONDS), self._engine.counters.num_generated_tokens
        if not self.ticks or self.ticks[-1][0] != tick:
            self.ticks.append([tick, 0, 0])
        now = self.ticks[-1]
        now[1] += total - self._num_generated
        now[2] = len(self._engine.scheduler.waiting)
        self._num_generated = total


def watch(calls: Calls) -> None:
    """Begin the log of an engine's steps. It contains the engine, so it is not returned to another process."""
    log_of(calls)


def log_of(calls: Calls) -> StepLog:
    """Return the log of an engine's steps; it begins with the first call."""
    reports = calls.engine.reports
    log = next((report for report in reports if isinstance(report, StepLog)), None)
    if log is None:
        log = StepLog(calls.engine)
        reports.append(log)
    return log


def describe(calls: Calls) -> dict[str, Any]:
    """Describe an engine between two steps: queues, pool of blocks, and what its log holds."""
    log = log_of(calls)
    with calls.lock:  # other threads of the program may run steps, too
        scheduler, counters = calls.engine.scheduler, calls.engine.counters
        manager = scheduler.block_manager
        running = [sequence for sequence in scheduler.unfinished if sequence.state is not State.WAITING]
        return {
            "batch_slots": scheduler.max_num_seqs,
            "token_budget": scheduler.max_num_batched_tokens,
            "num_waiting": len(scheduler.waiting),
            "waiting": [_progress(sequence, log) for sequence in islice(scheduler.waiting, MOST_WAITING)],
            "why": _why(scheduler),
            "running": [_progress(sequence, log) for sequence in running],
            "block_size": manager.block_size,
            "num_blocks": manager.num_blocks,
            "num_used_blocks": manager.num_used,
            "num_free_blocks": manager.num_free,
            **_pool(scheduler, running),
            "steps": list(log.steps),
            "tick_seconds": TICK_SECONDS,
            "ticks": [[tick - log.ticks[-1][0], *counted] for tick, *counted in log.ticks],
            "ended": list(log.ended),
            "preempted": list(log.preempted),
            "num_steps": counters.num_steps,
            "num_preemptions": counters.num_preemptions,
        }


def describe_table(calls: Calls, request_id: int) -> dict[str, Any]:
    """Describe a request's block table: for each block its number in the pool, and how many requests share it."""
    with calls.lock:
        scheduler = calls.engine.scheduler
        sequence = scheduler.find(request_id)
        table = sequence.block_table if sequence else []
        users = scheduler.block_manager._ref_counts
        return {"id": request_id, "table": [[block, users[block]] for block in table]}


def _progress(sequence: BatchSequence, log: StepLog) -> dict[str, Any]:
    return {
        "id": sequence.request_id,
        "slot": sequence.batch_slot,
        "state": sequence.state.value,
        "prompt": sequence.num_prompt_tokens,
        "cached": sequence.num_cached_tokens,
        "computed": sequence.num_computed_tokens,
        "lost": max(0, sequence.highest_computed - sequence.num_computed_tokens),  # computed once, and to be again
        "generated": sequence.num_generated_tokens,
        "accepted": log.accepted.get(sequence.request_id, 0),
        "most": sequence.max_total_tokens,
        "blocks": len(sequence.block_table),
        "preemptions": sequence.num_preemptions,
        "constrained": sequence.request.params.structured_outputs is not None,
    }


def _why(scheduler: Scheduler) -> dict[str, Any] | None:
    """Explain what the first waiting request waits for: a batch slot, blocks, tokens of a step, or the next step."""
    manager = scheduler.block_manager
    first = next(iter(scheduler.order.candidates(scheduler.waiting, LOOKAHEAD, manager)), None)
    if first is None:
        return None
    # As `BlockManager.allocate` counts them: those that another request holds already are shared and cost nothing.
    held = sum(manager._ref_counts[block] > 0 for block in manager._find_cached(first))
    needs, kept = manager.blocks_for(len(first)) - held, scheduler.watermark(first)
    if not scheduler.free_slots_for(first):
        reason = "slots"
    elif needs + kept > manager.num_free:
        reason = "blocks"
    elif scheduler.prefilling:  # an earlier prompt takes what a step's decodes leave
        reason = "tokens"
    else:
        reason = "step"
    return {"id": first.request_id, "reason": reason, "needs": needs, "held": held, "kept": kept}


def _pool(scheduler: Scheduler, running: list[BatchSequence]) -> dict[str, Any]:
    """Count the blocks of the pool, and list them, or every n-th of a large one.

    Each is `FREE`, `CACHED`, or [number of owners, batch slots of the first few].
    """
    manager = scheduler.block_manager
    users = Counter(chain.from_iterable(sequence.block_table for sequence in running))
    num_shared = sum(count > 1 for count in users.values())
    num_with_content = manager.num_blocks - manager._contents.count(None)
    num_cached = num_with_content - sum(manager.is_cached(block) for block in users)
    count = {"free": manager.num_free - num_cached, "cached": num_cached}
    count |= {"owned": manager.num_used - num_shared, "shared": num_shared}
    stride = -(-manager.num_blocks // MOST_BLOCKS)
    owners: dict[int, list[int]] = {}
    for sequence in running:
        for block in sequence.block_table:
            if block % stride == 0:
                owners.setdefault(block, []).append(sequence.batch_slot)
    shown = range(0, manager.num_blocks, stride)
    found = {block: [len(slots), *slots[:MOST_OWNERS]] for block, slots in owners.items()}
    blocks = [found.get(block) or (CACHED if manager.is_cached(block) else FREE) for block in shown]
    return {"count": count, "every_nth_block": stride, "blocks": blocks}


def _summary(sequence: BatchSequence) -> dict[str, Any]:
    assert sequence.output is not None  # it was not aborted
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
