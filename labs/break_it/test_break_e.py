"""Break it, lab E: one user's long document is never answered while the others chat.

Nothing crashes and the throughput is excellent. The scheduler of the broken engine differs from the reference by two
lines. Write a test that passes with the reference and fails with the broken one.
"""

from labs.tests.support import completion_of
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, State


def sequence_of(prompt_len: int, max_tokens: int, phrase: int) -> BatchSequence:
    """Make a request whose prompt shares no block with the prompts of other phrases."""
    prompt = [phrase * 10_000 + i for i in range(prompt_len)]
    return BatchSequence(completion_of(prompt, max_tokens))


def run_step(scheduler: Scheduler) -> None:
    """Run a step of an engine whose model always says 7; sequences that have all their tokens leave."""
    step = scheduler.schedule()
    for entry in step:
        if entry.samples:
            entry.sequence.token_ids.append(7)
    for entry in step:
        if len(entry.sequence) >= entry.sequence.max_total_tokens:
            scheduler.remove(entry.sequence)


def test_a_long_request_comes_in_although_short_ones_keep_arriving():
    """A long prompt that does not fit at once waits among short ones that do; it must not wait forever."""
    scheduler = Scheduler(num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    for phrase in range(3):
        scheduler.add(sequence_of(8, 8, phrase))
    run_step(scheduler)
    long = sequence_of(120, 4, 3)
    scheduler.add(long)
    for phrase in range(4, 204):
        scheduler.add(sequence_of(8, 8, phrase))
        run_step(scheduler)
        if long.state is not State.WAITING:
            return
    raise AssertionError("200 short requests later the long one still waits")
