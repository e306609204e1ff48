"""Break it, lab J: a request is answered with the penalties of another one, now and then.

It takes a client that leaves, and another one that comes at the right moment. The scheduler of the broken engine
differs from the reference by one condition. Write a test that passes with the reference and fails with the broken one.
"""

from beyond.scale_out.pipeline_scheduler import PipelineScheduler
from labs.tests.support import completion_of
from stage_e_batching.step import BatchSequence


def make_scheduler() -> PipelineScheduler:
    """Two batches in flight, and batch slots for four sequences."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    return PipelineScheduler(num_micro_batches=2, num_blocks=40, block_size=4, **limits)


def add(scheduler: PipelineScheduler, prompt: list[int]) -> BatchSequence:
    """A new request."""
    sequence = BatchSequence(completion_of(prompt))
    scheduler.add(sequence)
    return sequence


def launch(scheduler: PipelineScheduler) -> list[BatchSequence]:
    """Schedule a step, whose tokens are in flight from now on. Returns the sequences that wait for one."""
    step = scheduler.schedule()
    waiting = [entry.sequence for entry in step if entry.samples]
    for sequence in waiting:
        sequence.num_in_flight += 1
    return waiting


def arrive(waiting: list[BatchSequence]) -> None:
    """The tokens of a step arrive: until now the sampler reads what is in the batch slots of its sequences.

    The next step that is scheduled may use these slots.
    """
    for sequence in waiting:
        sequence.num_in_flight -= 1


def test_a_batch_slot_is_kept_while_a_token_is_in_flight():
    """`scheduler.remove(sequence)` is what happens when a client leaves; `sequence.batch_slot` is where it runs."""
    scheduler = make_scheduler()
    first = add(scheduler, [1, 2, 3])
    in_flight, slot = launch(scheduler), first.batch_slot
    scheduler.remove(first)
    second = add(scheduler, [4, 5, 6])
    launch(scheduler)
    assert second.batch_slot != slot, "the sampler still needs the first one's parameters"
    arrive(in_flight)
    third = add(scheduler, [7, 8, 9])
    launch(scheduler)
    assert third.batch_slot == slot, "the slot is free when the token is there"
