"""The scheduler: which sequences run in the next step, and with how many tokens.

*Continuous batching* (Orca, Yu et al., OSDI 2022) decides again before every step, so that a finished request's batch
slot is reused at once. A static batch stays together until its slowest member is done. The scheduler distributes:

* **Tokens.** A step runs at most `max_num_batched_tokens`. Decodes come first, one token each; what is left goes to
  prompts, which are cut into chunks to fit (Sarathi-Serve, Agrawal et al., OSDI 2024). A long prompt therefore shares
  its steps with the decodes of the others and never stalls them.
* **Batch slots.** At most `max_num_seqs` sequences run. Sequences with penalties also need one of the sampler's rows of
  counts.
* **Blocks.** A sequence is admitted when the blocks for all of its tokens are free and a *watermark* of free blocks
  remains: enough for the next `WATERMARK` tokens of each running sequence. When a decode finds no block, the running
  sequence that arrived last is *preempted*: its blocks are freed and it waits again, to be recomputed later (Kwon et
  al., SOSP 2023).

Rules that keep it fair and finite:

* The oldest running sequence is never preempted while another one runs, so something always gets finished.
* Each preemption doubles the watermark that a sequence must find at its return: it comes back when there is room to
  stay. A sequence is thus preempted at most about log2(tokens of the pool) times, which bounds the recomputation.
* A request that does not fit may be overtaken by later ones that do, but at most `MAX_OVERTAKES` times; then none
  passes it before it is admitted. Short requests do not starve behind a long one, nor a long one behind short ones. The
  same holds for a prompt that is scored (`allocate`), which waits in no queue.
* Without chunked prefill, prompts run in separate steps; at most `MAX_PROMPT_STEPS` of these follow one another while
  decodes wait.

`schedule()` advances the counts by what it scheduled; the engine appends the sampled tokens when the step has run. A
token that was launched and has not arrived is *in flight*. The scheduler counts it as present: the sequence is longer
by one, and its next position can be scheduled.

Plain Python, no tensors: every rule can be tested without a model.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable

from stage_d_paged.block_manager import BlockManager
from stage_d_paged.sequence import Sequence
from stage_e_batching.queues import LOOKAHEAD, MAX_OVERTAKES, FirstCome, Order, Queues, by_arrival
from stage_e_batching.step import BatchSequence, Preemption, ScheduledStep, State

WATERMARK = 16  # tokens that each running sequence can grow by after an admission
MAX_PROMPT_STEPS = 4


def check_step_limits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raise `ValueError` if a step has no room for one token of every running sequence."""
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) is less than max_num_seqs ({max_num_seqs}): "
            "a step could not run one token of every sequence; raise the first or lower the second"
        )


class Scheduler(Queues):
    """Decides which sequences run.

    Args:
        num_blocks, block_size, enable_prefix_caching: the pool of blocks.
        max_num_seqs: sequences that run at the same time.
        max_num_penalty_seqs: how many of these may have penalties; None means all.
        max_num_batched_tokens: tokens that run in one step.
        enable_chunked_prefill: False runs prompts whole, in steps without decodes, as engines did before chunking.
        new_sequence, block_manager_class: replaced by engines that extend stage E's sequences and blocks.

    Raises:
        ValueError: a step cannot run one token of every running sequence.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_penalty_seqs: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        new_sequence: Callable[..., BatchSequence] = BatchSequence,
        block_manager_class: type[BlockManager] = BlockManager,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        check_step_limits(max_num_seqs, max_num_batched_tokens)
        pool = num_blocks, block_size, enable_prefix_caching
        super().__init__(*pool, max_num_seqs, max_num_penalty_seqs, block_manager_class)
        self.new_sequence = new_sequence
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.order: Order = FirstCome()  # which waiting sequence is tried first; see queues.py and waiting_order.py
        self._steps = 0
        self._prompt_steps = 0  # steps with only prompts since the last step of decodes

    def check_prompt(self, num_tokens: int) -> None:
        """Raise `ValueError` for a prompt that can never run."""
        self.block_manager.check_prompt(num_tokens)
        if not self.enable_chunked_prefill and num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"{num_tokens} tokens are more than max_num_batched_tokens={self.max_num_batched_tokens}, and "
                "enable_chunked_prefill=False keeps prompts whole; raise max_num_batched_tokens or set "
                "enable_chunked_prefill=True"
            )

    def schedule(self) -> ScheduledStep:
        """Decide what the next step runs, and advance every sequence's count by it."""
        step = ScheduledStep(self._steps, time.perf_counter())
        self._steps += 1
        if self.enable_chunked_prefill:
            self._schedule_decodes(step)
            budget = self._schedule_prefills(step, self.max_num_batched_tokens - len(step))
            self._admit(step, budget)
        else:
            self._schedule_one_kind(step)
        if not step.sequences:
            step.idle_reason = "no request that waits fits" if self.waiting else "nothing to do"
        return step

    def count_in_flight(self, step: ScheduledStep) -> None:
        """Add a token in flight to every sequence that samples. One that is complete with it runs no more."""
        decoding = self.decoding
        for sequence in dict.fromkeys(step.sampling):
            sequence.num_in_flight += 1
            if len(sequence) == sequence.max_total_tokens:
                del decoding[bisect_left(decoding, sequence.request_id, key=by_arrival)]
                self.note_room()  # it does not grow any more, so the watermark is lower

    def _schedule_one_kind(self, step: ScheduledStep) -> None:
        """Schedule whole prompts, or else decodes. After `MAX_PROMPT_STEPS` steps of prompts the decodes go first."""
        kinds = [self._schedule_prompts, self._schedule_decodes]
        if self._prompt_steps >= MAX_PROMPT_STEPS:
            kinds.reverse()
        for schedule_kind in kinds:
            if not step.sequences:
                schedule_kind(step)
        self._prompt_steps = 0 if step.num_decodes else self._prompt_steps + 1

    def _schedule_prompts(self, step: ScheduledStep) -> None:
        budget = self._schedule_prefills(step, self.max_num_batched_tokens)
        self._admit(step, budget)

    def _schedule_decodes(self, step: ScheduledStep) -> None:
        """Schedule one token of every decoding sequence, in about 0.3 µs each: the scheduler's hottest loop."""
        decoding, block_size = self.decoding, self.block_manager.block_size
        scheduled, starts = step.sequences, step.starts
        i = 0
        while i < len(decoding):  # preemption shortens the list, at its end
            sequence = decoding[i]
            start = sequence.num_computed_tokens
            if start % block_size == 0 and not self._grow(sequence, step):
                break  # the sequence preempted itself
            scheduled.append(sequence)
            starts.append(start)
            sequence.num_computed_tokens = start + 1
            i += 1
        step.num_decodes = len(scheduled)
        step.num_tokens = [1] * len(scheduled)
        step.samples = [True] * len(scheduled)

    def _grow(self, sequence: BatchSequence, step: ScheduledStep) -> bool:
        """Reserve a block for the sequence's next token, preempting the most recent sequences if none is free.

        Returns False if that preempted this sequence.
        """
        self.block_manager.index_computed(sequence)
        while not self.block_manager.allocate(sequence, sequence.num_computed_tokens + 1):
            last = max((queue[-1] for queue in (self.prefilling, self.decoding) if queue), key=by_arrival)
            self._preempt(last, step, f"sequence {sequence.request_id} needs a block and none is free")
            if last is sequence:
                return False
        step.grown.append(sequence)
        return True

    def _preempt(self, sequence: BatchSequence, step: ScheduledStep, reason: str) -> None:
        step.preempted.append(Preemption(sequence, len(sequence.block_table), sequence.num_computed_tokens, reason))
        (self.decoding if sequence.state is State.DECODING else self.prefilling).pop()
        sequence.highest_computed = max(sequence.highest_computed, sequence.num_computed_tokens)
        sequence.num_preemptions += 1
        self._vacate(sequence)
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=by_arrival)

    def _schedule_prefills(self, step: ScheduledStep, budget: int) -> int:
        """Schedule the next chunk of every prompt that has begun; returns the tokens left."""
        for sequence in list(self.prefilling):
            if budget == 0:
                break
            budget -= self._schedule_chunk(sequence, step, budget)
        return budget

    def _schedule_chunk(self, sequence: BatchSequence, step: ScheduledStep, budget: int) -> int:
        remaining = sequence.num_uncomputed_tokens
        num_tokens = min(remaining, budget)
        start = sequence.num_computed_tokens
        step.sequences.append(sequence)
        step.starts.append(start)
        step.num_tokens.append(num_tokens)
        step.samples.append(num_tokens == remaining)
        step.num_recomputed += max(0, min(start + num_tokens, sequence.highest_computed) - start)
        sequence.num_computed_tokens += num_tokens
        self.block_manager.index_computed(sequence)  # the next admitted sequence can share these blocks
        if num_tokens == remaining:
            self.prefilling.remove(sequence)
            sequence.state = State.DECODING
            insort(self.decoding, sequence, key=by_arrival)
        return num_tokens

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        """Admit waiting sequences, earliest first, while there are tokens, batch slots and blocks."""
        if step.preempted or len(self._refused) >= min(len(self.waiting), LOOKAHEAD):
            return
        passed: list[BatchSequence] = []  # those that did not fit
        overtakes_left = MAX_OVERTAKES  # until one of them reaches its limit
        for sequence in self.order.candidates(self.waiting, LOOKAHEAD, self.block_manager):
            if budget == 0 or not self.has_free_slot:
                return
            if not overtakes_left:
                break
            if not self.enable_chunked_prefill and step.sequences and self._num_to_run(sequence) > budget:
                return  # only a recomputation longer than a whole step is cut, and it runs first in a step
            free_slots = self.free_slots_for(sequence)
            if sequence in self._refused or not free_slots or not self._allocate(sequence):
                passed.append(sequence)
                overtakes_left = min(overtakes_left, MAX_OVERTAKES - sequence.times_overtaken)
                continue
            self.waiting.remove(sequence)
            for other in self.waiting:
                if other.request_id > sequence.request_id:
                    break
                other.times_overtaken += 1
            overtakes_left -= bool(passed)
            sequence.batch_slot = free_slots.pop()
            sequence.state = State.PREFILLING
            insort(self.prefilling, sequence, key=by_arrival)
            sequence.first_scheduled_time = sequence.first_scheduled_time or step.time
            step.admitted.append(sequence)
            step.grown.append(sequence)
            budget -= self._schedule_chunk(sequence, step, budget)
        self._refused = set(passed)

    def _num_to_run(self, sequence: BatchSequence) -> int:
        return len(sequence) - self.block_manager.count_cached_tokens(sequence)

    def _allocate(self, sequence: BatchSequence) -> bool:
        """Allocate blocks for all of a waiting sequence's tokens, if they and the watermark are free."""
        if any(times >= MAX_OVERTAKES for times in self._unscored.values()):
            return False
        watermark = self.watermark(sequence)
        if self.block_manager.num_free <= watermark:  # its last block is never shared: skip the look-up
            return False
        if not self.block_manager.allocate(sequence, len(sequence), watermark):
            return False
        for unscored in self._unscored:
            self._unscored[unscored] += 1
        return True

    def watermark(self, sequence: BatchSequence) -> int:
        """Return how many blocks must stay free when `sequence` is admitted, so that running sequences can grow."""
        if not self.num_running:
            return 0
        num_tokens = WATERMARK * (self.num_running + 1) << sequence.num_preemptions
        return min(self.block_manager.blocks_for(num_tokens), self.block_manager.num_blocks)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give blocks to a prompt that is scored: it is in no queue, and keeps them until `free`.

        As at an admission, running sequences must still be able to grow. Returns False if too few blocks are free: ask
        again after the next step. While it waits, at most `MAX_OVERTAKES` requests are admitted.
        """
        self._scored.add(sequence)
        watermark = self.block_manager.blocks_for(WATERMARK * self.num_running)
        if self.block_manager.allocate(sequence, num_tokens, watermark):
            if self._unscored.pop(sequence, None) is not None:
                self.note_room()  # requests may be admitted again
            return True
        self._scored.discard(sequence)
        self._unscored.setdefault(sequence, 0)
        return False

    def free(self, sequence: Sequence) -> None:
        """Take the blocks of a scored prompt back, or forget one that waits for blocks."""
        self.block_manager.free(sequence)
        self._scored.discard(sequence)
        self._unscored.pop(sequence, None)
        self.note_room()
