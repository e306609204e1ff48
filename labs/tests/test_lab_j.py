"""Drives lab J. No test depends on a clock: starts, waits and schedules are recorded."""

from __future__ import annotations

import json
import weakref
from collections import deque
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

import beyond.scale_out.links as links
import beyond.scale_out.sessions as sessions
import beyond.scale_out.spans as spans
import beyond.scale_out.stages as stages
from beyond.scale_out import LLM
from beyond.scale_out.micro_batches import MicroBatches
from beyond.scale_out.pipeline_scheduler import PipelineScheduler
from labs.driving import numbers
from labs.tests.forks import fork_worker
from labs.tests.support import Values, completion_of, some, whole_stage
from stage_e_batching.step import BatchSequence, ScheduledStep
from stage_f_graph_tp.tensor_parallel.watch import workers


class TestLayersOf:
    def test_the_stages_have_all_layers_in_order_and_each_about_as_many(self) -> Values:
        for num_layers in (1, 2, 7, 24, 29, numbers.randint(8, 60)):
            for num_stages in range(1, min(num_layers, 12) + 1):
                parts = [list(stages.layers_of(stage, num_stages, num_layers)) for stage in range(num_stages)]
                sizes = [len(part) for part in parts]
                given = f"{num_layers} layers on {num_stages} stages"
                yield f"{given}: every layer once, in order", sum(parts, [])
                yield f"{given}: shares differ by a layer at most", max(sizes) - min(sizes) <= 1
                yield f"{given}: stage 0 has the LM head too, so it has no more than another", sizes[0] == min(sizes)

    def test_they_are_a_range(self) -> Values:
        yield "stage 1 of 2, 24 layers", stages.layers_of(1, 2, 24) == range(12, 24)


class NotedLink(links.Link):
    """A link on which nothing arrives before a wait for it."""

    def __init__(self, max_unsent: int) -> None:
        self.max_unsent, self.num_bytes, self._unsent = max_unsent, 0, deque()
        self.sent: list[Tensor] = []  # copies, as they were when they were sent
        self.held: list[weakref.ref] = []  # the tensors themselves
        self.waited: list[int] = []

    def _start_sending(self, tensor: Tensor, number: int) -> SimpleNamespace:
        assert number == 7, f"sent as a tensor of command {number}, not 7"
        assert tensor.is_contiguous(), "a link sends contiguous memory: the rows of a transposed tensor are not"
        self.sent.append(tensor.clone())
        self.held.append(weakref.ref(tensor))
        return SimpleNamespace(number=len(self.sent) - 1)

    def _wait(self, work: SimpleNamespace) -> None:
        self.waited.append(work.number)


def states(number: int) -> Tensor:
    return torch.full((2, 3), float(number))


class TestSend:
    def test_what_is_sent_arrives_also_if_its_memory_is_not_contiguous(self) -> Values:
        link, x = NotedLink(max_unsent=4), torch.randn(2, 3)
        link.send(x, 7)
        link.send(x.t(), 7)
        yield "a tensor, and the same transposed", link.sent

    def test_it_waits_for_the_oldest_when_too_many_are_unsent_and_never_before(self) -> Values:
        for max_unsent in (1, 3, numbers.randint(2, 6)):
            link = NotedLink(max_unsent)
            for number in range(8):
                link.send(states(number), 7)
                yield f"{number + 1} sent, {max_unsent} may be unsent: waited for", link.waited

    def test_a_tensor_is_kept_until_it_was_sent_and_no_longer(self) -> Values:
        for kind in ("tensors", "tensors that are not contiguous, whose copies"):
            link = NotedLink(max_unsent=2)
            for number in range(5):
                x = states(number)  # nobody else holds it
                link.send(x if kind == "tensors" else x.t(), 7)
                del x
            alive = [held() is not None for held in link.held]
            yield f"5 sent, 2 of them under way: {kind} are kept until they were sent, and no other", alive

    def test_bytes_are_counted(self) -> Values:
        link, count = NotedLink(max_unsent=2), numbers.randint(1, 9)
        link.send(torch.zeros(2, count), 7)
        link.send(torch.zeros(2, count).bfloat16(), 7)
        yield f"{2 * count} numbers of 4 bytes and as many of 2: num_bytes", link.num_bytes


class TestIdleInTheory:
    def test_decodes_keep_as_many_stages_busy_as_there_are_batches(self) -> Values:
        for batches, num_stages in ((1, 2), (2, 2), (1, 4), (3, 4), (9, 4), some(2, 1, 12)):
            found = spans.idle_in_theory("decode", batches, num_stages)
            yield f"{batches} batches in flight on {num_stages} stages: the share of the time idle", found

    def test_a_prompt_in_chunks_fills_and_empties_the_pipeline_once(self) -> Values:
        for num_stages in (1, 2, 3, 5):
            for chunks in (1, 2, 8, numbers.randint(3, 20)):
                found = spans.idle_in_theory("prefill", chunks, num_stages)
                yield f"a prompt in {chunks} chunks on {num_stages} stages: the share of the time idle", found


def timeline(*times: tuple[float, float]) -> list[dict[str, object]]:
    return [{"step": i, "work": "layers", "start": start, "end": end} for i, (start, end) in enumerate(times)]


class TestIdleShare:
    def test_the_time_is_that_of_all_stages_from_the_first_start_to_the_last_end(self) -> Values:
        pictures = [
            [timeline((5, 6), (6, 8))],
            [timeline((100, 101), (102, 103)), timeline((101, 102))],
            [timeline((10, 11)), timeline((11, 12)), timeline((12, 16))],
            [timeline((12, 14)), timeline((10, 11))],
        ]
        for _ in range(5):
            times = [sorted(numbers.sample(range(1000), 8)) for _ in range(numbers.randint(2, 5))]
            pictures.append([timeline(*zip(stage[::2], stage[1::2], strict=True)) for stage in times])
        for picture in pictures:
            given = [[(span["start"], span["end"]) for span in stage] for stage in picture]
            yield f"the spans {given}: the share of the time idle", spans.idle_share(picture)

    def test_what_it_counts_for_chunks_is_the_theory(self) -> Values:
        for chunks in (1, 2, 8):
            picture = [timeline(*((stage + c, stage + c + 1) for c in range(chunks))) for stage in range(3)]
            yield f"{chunks} chunks on 3 stages", spans.idle_share(picture)


def scheduler_of(num_micro_batches: int, count: int, **options: object) -> PipelineScheduler:
    """A scheduler with `count` sequences, whose prompts of one token have run and been sampled."""
    options = {"num_blocks": 400, "block_size": 4, "max_num_seqs": 64, "max_num_batched_tokens": 64} | options
    scheduler = PipelineScheduler(num_micro_batches=num_micro_batches, **options)
    scheduler.watermark = lambda sequence: 0  # whoever fits comes in
    for number in range(count):
        scheduler.add(BatchSequence(completion_of([1000 + number], max_tokens=min(50, scheduler.capacity))))
    step = scheduler.schedule()
    assert len(step) == count
    for sequence in step.sequences:
        sequence.token_ids.append(7)
    return scheduler


def decodes(scheduler: PipelineScheduler) -> ScheduledStep:
    """A step of the scheduler's decodes, which are launched and not sampled."""
    step = ScheduledStep(0, 0.0)
    scheduler._schedule_decodes(step)
    for sequence in step.sequences:
        sequence.num_in_flight = 1
    return step


def arrive(step: ScheduledStep) -> None:
    for sequence in step.sequences:
        sequence.num_in_flight = 0
        sequence.token_ids.append(7)


def numbers_of(step: ScheduledStep) -> list[int]:
    return [sequence.request_id for sequence in step.sequences]


class TestScheduleDecodes:
    def test_a_step_takes_its_share_and_the_next_one_others(self) -> Values:
        for count, batches in ((8, 2), (7, 3), (5, 1), (1, 4), (3, 4), some(2, 1, 12)):
            scheduler = scheduler_of(batches, count)
            found = [numbers_of(decodes(scheduler)) for _ in range(batches)]
            yield f"{count} decodes in {batches} batches: the oldest first, and none twice", found

    def test_a_sequence_runs_again_when_its_token_is_there(self) -> Values:
        scheduler = scheduler_of(2, 4)
        first, second = decodes(scheduler), decodes(scheduler)
        yield "all four are in flight: who runs", numbers_of(decodes(scheduler))
        arrive(first)
        yield "the first two are not in flight any more: who runs", numbers_of(decodes(scheduler))
        arrive(second)
        yield "and now the other two: who runs", numbers_of(decodes(scheduler))

    def test_a_sequence_runs_again_when_its_batch_has_been_sampled_and_its_token_is_on_its_way(self) -> Values:
        scheduler = scheduler_of(2, 4)
        first, _ = decodes(scheduler), decodes(scheduler)
        scheduler.note_sampled(first)
        for sequence in first.sequences:
            sequence.token_ids.append(7)
        yield "the device has their tokens: who runs", numbers_of(decodes(scheduler))

    def test_the_share_is_of_all_that_decode_and_not_of_those_that_are_ready(self) -> Values:
        scheduler = scheduler_of(2, 8)
        decodes(scheduler)
        yield "half of 8, although only 4 are ready", len(decodes(scheduler))

    def test_the_columns_of_the_step_say_what_runs(self) -> Values:
        scheduler = scheduler_of(2, 4)
        for step in [decodes(scheduler), decodes(scheduler)]:
            arrive(step)
        step = decodes(scheduler)
        found = step.num_decodes, step.starts, step.num_tokens, step.samples
        yield "num_decodes, starts, num_tokens and samples of a step with two sequences of 2 tokens", found
        computed = [sequence.num_computed_tokens for sequence in step.sequences]
        yield "num_computed_tokens of each scheduled sequence is one more than its start", computed
        others = [s.num_computed_tokens for s in scheduler.decoding if s not in step.sequences]
        yield "num_computed_tokens of a sequence that was not scheduled stays as it was", others

    def test_a_block_that_is_full_is_followed_by_another(self) -> Values:
        scheduler = scheduler_of(1, 2, block_size=2)
        for number in range(4):
            step = decodes(scheduler)
            found = [len(sequence.block_table) for sequence in step.sequences]
            yield f"two sequences, blocks of 2, decode {number}: blocks of each", found
            arrive(step)

    def test_a_sequence_that_was_preempted_for_another_one_does_not_run(self) -> Values:
        for batches, blocks, what in (
            (1, 4, "three need a block, and one is free"),
            (2, 3, "two need one, none is free"),
        ):
            scheduler = scheduler_of(batches, 3, num_blocks=blocks, block_size=1, enable_prefix_caching=False)
            step = decodes(scheduler)
            yield f"{what}: who runs", [numbers_of(step), step.num_decodes, len(step.samples)]
            yield f"{what}: the latest is preempted", [p.sequence.request_id for p in step.preempted]
            yield f"{what}: who waits", [[s.request_id, s.state.name] for s in scheduler.waiting]

    def test_random_arrivals(self) -> Values:
        scheduler, flying = scheduler_of(numbers.randint(1, 4), numbers.randint(3, 12)), []
        for number in range(20):
            step = decodes(scheduler)
            yield f"step {number} of random arrivals: who runs", numbers_of(step)
            flying.append(step)
            if len(flying) > numbers.randint(0, 3):
                arrive(flying.pop(0))


class States:
    """A batch in flight through the stages; once sampled, its tokens are in flight."""

    def __init__(self, number: int, log: list[str]) -> None:
        self._number, self._log = number, log

    def sample(self) -> str:
        self._log.append(f"sample {self._number}")
        return f"tokens of {self._number}"


def asked(num_in_flight: int, batches: int, ready: bool) -> tuple[int, list[str], deque]:
    """Return `next_depth`'s result with this many batches in flight, the calls that it made, and what is in flight."""
    log: list[str] = []
    scheduler = SimpleNamespace(
        num_micro_batches=batches,
        has_ready=lambda: ready,
        note_sampled=lambda step: log.append(f"note {step.number}"),
    )
    launched = deque((ScheduledStep(number, 0.0), States(number, log)) for number in range(num_in_flight))
    return MicroBatches(scheduler).next_depth(launched), log, launched


class TestNextDepth:
    def test_batches_are_launched_until_as_many_are_in_flight_as_the_scheduler_says(self) -> Values:
        for batches in (1, 2, 3, numbers.randint(4, 9)):
            for num_in_flight in range(batches + 1):
                for ready in (True, False):
                    depth, log, launched = asked(num_in_flight, batches, ready)
                    whether = "somebody can run" if ready else "nobody else can run"
                    given = f"{num_in_flight} of {batches} in flight, {whether}"
                    yield f"{given}: the depth", depth
                    yield f"{given}: the oldest is sampled to make room, and the scheduler told", log
                    yield (
                        f"{given}: in flight from now on; it waits in the queue",
                        [(step.number, what if isinstance(what, str) else "states") for step, what in launched],
                    )


def chat(*contents: str, **fields: object) -> bytes:
    roles = ("system", *("user", "assistant") * len(contents))
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return json.dumps({"messages": messages} | fields).encode()


def alike(names: list[str]) -> list[int]:
    """Return, for each name, the index of the first equal one."""
    return [names.index(name) for name in names]


class TestSessionOf:
    def test_the_next_turn_of_a_conversation_is_of_the_same_session(self) -> Values:
        question = "".join(numbers.choices("abcdef ", k=12))
        bodies = [
            chat("Be brief.", question),
            chat("Be brief.", question, "Memory.", "And a slot?"),
            chat("Be brief.", question, temperature=0.5),
            chat("Be brief.", f"{question}?", "Memory.", "And a slot?"),
        ]
        yield (
            f"{question!r}, its next turn, with other fields, another question: the first request of the same session",
            alike([sessions.session_of(body) for body in bodies]),
        )

    def test_a_long_text_counts_by_its_beginning(self) -> Values:
        long = "x" * sessions.PREFIX_CHARACTERS
        bodies = [chat(long, "one"), chat(long, "two"), chat(long[:40], "one"), chat(long[:40], "two")]
        yield (
            "one long system prompt is one session, a short one is not: cut the text first, then hash it",
            alike([sessions.session_of(body) for body in bodies]),
        )
        tokens = some(3, 1, 99)
        prompts = [f"{long}one", f"{long}two", "one", tokens, list(tokens), [*tokens[:2], 100]]
        yield (
            f"prompts count by their first PREFIX_CHARACTERS; {tokens}, and with another last token",
            alike([sessions.session_of(json.dumps({"prompt": prompt}).encode()) for prompt in prompts]),
        )

    def test_it_is_the_same_in_every_process_and_short(self) -> Values:
        found = []
        for salt in range(3):  # Python's hash() of a text has a different salt in every process
            with patch.object(sessions, "hash", lambda x, salt=salt: hash((salt, x)), create=True):
                found.append(sessions.session_of(chat("Be brief.", "What is a block?" * 100)))
        yield "one session in three processes", alike(found)
        name = found[0]
        yield "it has 8 to 128 hexadecimal digits", 8 <= len(name) <= 128 and set(name) <= set("0123456789abcdef")

    def test_what_is_no_request_has_no_session(self) -> Values:
        for body in (b"", b"{", b"[]", b"{}", b'{"messages": [1]}', b'{"messages": []}', b"\xff"):
            yield f"no prompt and no message with the role user: {body}", sessions.session_of(body)


class TestWholeStage:
    def test_the_tutor_answers_on_two_stages(self) -> Values:
        variants = {}, {"max_num_seqs": 2, "num_kvcache_blocks": 12, "kvcache_block_size": 8, "num_micro_batches": 3}
        options = {"num_kvcache_blocks": 64, "pipeline_parallel_size": 2}
        # Shorter than a driver's time limit.
        with patch.multiple(workers, _start_worker=fork_worker, ANSWER_SECONDS=30.0):
            found = list(whole_stage(LLM, *variants, **options))
        yield from found
