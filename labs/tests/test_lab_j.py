"""Judges lab J. Nothing waits for a clock: what is started, waited for and scheduled is noted and compared."""

from __future__ import annotations

import json
import math
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import beyond.scale_out.links as links
import beyond.scale_out.sessions as sessions
import beyond.scale_out.spans as spans
import beyond.scale_out.stages as stages
from beyond.scale_out import LLM
from beyond.scale_out.micro_batches import MicroBatches
from beyond.scale_out.pipeline_scheduler import PipelineScheduler
from labs.mutants import assert_catches
from labs.tests.forks import fork_worker
from labs.tests.support import check_whole_stage, completion_of
from stage_e_batching.step import BatchSequence, ScheduledStep, State
from stage_f_graph_tp.tensor_parallel.watch import workers


class TestLayersOf:
    @pytest.mark.parametrize("num_layers", [1, 2, 7, 24, 29])
    def test_the_stages_have_all_layers_in_order_and_each_about_as_many(self, num_layers):
        for num_stages in range(1, num_layers + 1):
            parts = [list(stages.layers_of(stage, num_stages, num_layers)) for stage in range(num_stages)]
            case = f"{num_layers} layers on {num_stages} stages, got {parts}"
            assert sum(parts, []) == list(range(num_layers)), f"every layer once, in order: {case}"
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1, f"equal shares, or one layer more: {case}"
            assert sizes[0] == min(sizes), f"stage 0 has the LM head too, so it has no more than another: {case}"

    def test_they_are_a_range(self):
        assert stages.layers_of(1, 2, 24) == range(12, 24)


class NotedLink(links.Link):
    """A link on which nothing arrives before it is waited for."""

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
    def test_what_is_sent_arrives_also_if_its_memory_is_not_contiguous(self):
        link = NotedLink(max_unsent=4)
        x = torch.arange(6.0).view(2, 3)
        link.send(x, 7)
        link.send(x.t(), 7)
        assert torch.equal(link.sent[0], x) and torch.equal(link.sent[1], x.t())

    @pytest.mark.parametrize("max_unsent", [1, 3])
    def test_it_waits_for_the_oldest_when_too_many_are_unsent_and_never_before(self, max_unsent):
        link = NotedLink(max_unsent)
        for number in range(8):
            link.send(states(number), 7)
            expected = list(range(max(0, number + 1 - max_unsent)))
            assert link.waited == expected, f"{number + 1} sent, {max_unsent} may be unsent: waited for {link.waited}"

    def test_a_tensor_is_kept_until_it_was_sent_and_no_longer(self):
        link = NotedLink(max_unsent=2)
        for number in range(5):
            link.send(states(number), 7)  # nobody else holds it
        alive = [held() is not None for held in link.held]
        assert alive[3:] == [True, True], "the memory of a tensor that is under way must not be used for another one"
        assert alive[:3] == [False] * 3, "what was sent takes memory no more"

    def test_bytes_are_counted(self):
        link = NotedLink(max_unsent=2)
        link.send(states(0), 7)
        link.send(states(1).bfloat16(), 7)
        assert link.num_bytes == 6 * 4 + 6 * 2


class TestIdleInTheory:
    @pytest.mark.parametrize(
        ("batches", "num_stages", "expected"), [(1, 2, 1 / 2), (2, 2, 0), (1, 4, 3 / 4), (3, 4, 1 / 4), (9, 4, 0)]
    )
    def test_decodes_keep_as_many_stages_busy_as_there_are_batches(self, batches, num_stages, expected):
        found = spans.idle_in_theory("decode", batches, num_stages)
        case = f"{batches} batches in flight on {num_stages} stages"
        assert math.isclose(found, expected, abs_tol=1e-9), f"{case}: {expected} of the time idle, got {found}"

    @pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
    @pytest.mark.parametrize("chunks", [1, 2, 8])
    def test_a_prompt_in_chunks_fills_and_empties_the_pipeline_once(self, chunks, num_stages):
        ends = [stage + chunks for stage in range(num_stages)]  # chunk c is on stage s in step s + c
        idle = 1 - num_stages * chunks / (num_stages * ends[-1])
        found = spans.idle_in_theory("prefill", chunks, num_stages)
        case = f"a prompt in {chunks} chunks on {num_stages} stages"
        assert math.isclose(found, idle, abs_tol=1e-9), f"{case}: {idle:.4f} of the time idle, got {found:.4f}"


def timeline(*times: tuple[float, float]) -> list[dict[str, object]]:
    return [{"step": i, "work": "layers", "start": start, "end": end} for i, (start, end) in enumerate(times)]


class TestIdleShare:
    def test_one_stage_that_always_works_is_never_idle(self):
        found = spans.idle_share([timeline((5, 6), (6, 8))])
        assert math.isclose(found, 0, abs_tol=1e-9), f"it works from 5 to 8 without a pause: 0 expected, got {found}"

    def test_the_time_is_that_of_all_stages_from_the_first_start_to_the_last_end(self):
        found = spans.idle_share([timeline((100, 101), (102, 103)), timeline((101, 102))])
        assert math.isclose(found, 0.5), f"3 of 2 x 3 seconds are busy: 0.5 expected, got {found}"
        found = spans.idle_share([timeline((10, 11)), timeline((11, 12)), timeline((12, 16))])
        assert math.isclose(found, 1 - 6 / 18), f"6 of 3 x 6 seconds are busy, got {found}"
        found = spans.idle_share([timeline((12, 14)), timeline((10, 11))])
        assert math.isclose(found, 1 - 3 / 8), (
            f"the second stage started first: 3 of 2 x 4 seconds are busy, got {found}"
        )

    def test_what_it_counts_for_chunks_is_the_theory(self):
        for chunks in (1, 2, 8):
            picture = [timeline(*((stage + c, stage + c + 1) for c in range(chunks))) for stage in range(3)]
            assert math.isclose(spans.idle_share(picture), 2 / (chunks + 2)), f"{chunks} chunks on 3 stages"


def scheduler_of(num_micro_batches: int, count: int, **options: object) -> PipelineScheduler:
    """A scheduler with `count` sequences, whose prompts of one token have run and been answered."""
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


def numbers(step: ScheduledStep) -> list[int]:
    return [sequence.request_id for sequence in step.sequences]


class TestScheduleDecodes:
    @pytest.mark.parametrize(
        ("count", "batches", "sizes"), [(8, 2, [4, 4]), (7, 3, [3, 3, 1]), (5, 1, [5]), (1, 4, [1]), (3, 4, [1, 1, 1])]
    )
    def test_a_step_takes_its_share_and_the_next_one_others(self, count, batches, sizes):
        scheduler = scheduler_of(batches, count)
        found = [numbers(decodes(scheduler)) for _ in range(batches)]
        assert [len(part) for part in found if part] == sizes, f"{count} decodes in {batches} batches, got {found}"
        assert sum(found, []) == list(range(count)), f"the oldest first, and none twice: got {found}"

    def test_a_sequence_runs_again_when_its_token_is_there(self):
        scheduler = scheduler_of(2, 4)
        first, second = decodes(scheduler), decodes(scheduler)
        assert numbers(decodes(scheduler)) == [], "all four are in flight"
        arrive(first)
        assert numbers(decodes(scheduler)) == [0, 1], "the first two are not in flight any more"
        arrive(second)
        assert numbers(decodes(scheduler)) == [2, 3], "and now the other two"

    def test_a_sequence_runs_again_when_its_batch_has_been_sampled_and_its_token_is_on_its_way(self):
        scheduler = scheduler_of(2, 4)
        first, _ = decodes(scheduler), decodes(scheduler)
        scheduler.note_sampled(first)
        for sequence in first.sequences:
            sequence.token_ids.append(7)
        assert numbers(decodes(scheduler)) == [0, 1], "the device has their tokens"

    def test_the_share_is_of_all_that_decode_and_not_of_those_that_are_ready(self):
        scheduler = scheduler_of(2, 8)
        decodes(scheduler)
        assert len(decodes(scheduler)) == 4, "half of 8, although only 4 are ready"

    def test_the_columns_of_the_step_say_what_runs(self):
        scheduler = scheduler_of(2, 4)
        for step in [decodes(scheduler), decodes(scheduler)]:
            arrive(step)
        step = decodes(scheduler)
        assert (step.num_decodes, step.starts, step.num_tokens, step.samples) == (2, [2, 2], [1, 1], [True, True]), (
            "num_decodes, starts, num_tokens and samples of a step that runs two sequences, each with 2 tokens computed"
        )
        assert [sequence.num_computed_tokens for sequence in step.sequences] == [3, 3], (
            "num_computed_tokens of each scheduled sequence is one more than its start"
        )
        others = [sequence for sequence in scheduler.decoding if sequence not in step.sequences]
        assert [sequence.num_computed_tokens for sequence in others] == [2, 2], (
            "num_computed_tokens of a sequence that was not scheduled stays as it was"
        )

    def test_a_block_that_is_full_is_followed_by_another(self):
        scheduler = scheduler_of(1, 2, block_size=2)
        for expected in (1, 2, 2, 3):
            step = decodes(scheduler)
            assert [len(sequence.block_table) for sequence in step.sequences] == [expected] * 2
            arrive(step)

    def test_a_sequence_that_was_preempted_for_another_one_does_not_run(self):
        scheduler = scheduler_of(1, 3, num_blocks=4, block_size=1, enable_prefix_caching=False)
        step = decodes(scheduler)  # three need a block, and one is free: the third goes for the second
        assert numbers(step) == [0, 1] and step.num_decodes == 2, f"got {numbers(step)}"
        assert [p.sequence.request_id for p in step.preempted] == [2], "the latest is preempted"
        assert [sequence.state for sequence in scheduler.waiting] == [State.WAITING]

    def test_a_sequence_that_finds_no_block_goes_itself(self):
        scheduler = scheduler_of(2, 3, num_blocks=3, block_size=1, enable_prefix_caching=False)
        step = decodes(scheduler)  # the first takes the third's block; the second finds none, and is the last now
        assert numbers(step) == [0] and step.num_decodes == len(step.samples) == 1, f"got {numbers(step)}"


class States:
    """A batch on its way through the stages; sampled, its tokens are on their way."""

    def __init__(self, number: int, log: list[str]) -> None:
        self._number, self._log = number, log

    def sample(self) -> str:
        self._log.append(f"sample {self._number}")
        return f"tokens of {self._number}"


def asked(num_in_flight: int, batches: int, ready: bool) -> tuple[int, list[str], deque]:
    """What `next_depth` returns with this many batches in flight, what was called meanwhile, and what is in flight."""
    log: list[str] = []
    scheduler = SimpleNamespace(
        num_micro_batches=batches,
        has_ready=lambda: ready,
        note_sampled=lambda step: log.append(f"note {step.number}"),
    )
    launched = deque((ScheduledStep(number, 0.0), States(number, log)) for number in range(num_in_flight))
    return MicroBatches(scheduler).next_depth(launched), log, launched


class TestNextDepth:
    @pytest.mark.parametrize("batches", [1, 2, 3])
    def test_batches_are_launched_until_as_many_are_in_flight_as_the_scheduler_says(self, batches):
        for num_in_flight in range(batches):
            depth, log, _ = asked(num_in_flight, batches, ready=True)
            assert (depth, log) == (num_in_flight + 1, []), f"{num_in_flight} of {batches} in flight, one more may be"

    @pytest.mark.parametrize("batches", [1, 2, 3])
    def test_then_the_oldest_is_sampled_and_makes_room_for_the_next(self, batches):
        depth, log, launched = asked(batches, batches, ready=True)
        assert depth == batches, f"as many as before stay in flight, got {depth}"
        assert log == ["sample 0", "note 0"], f"the oldest is sampled, and the scheduler told; got {log}"
        assert launched[0][1] == "tokens of 0", "in flight from now on is what its sampling returned"
        assert [step.number for step, _ in launched] == list(range(batches)), "it waits in the queue"

    def test_where_no_sequence_can_run_the_oldest_batch_is_sampled_early(self):
        depth, log, _ = asked(1, 3, ready=False)
        assert (depth, log) == (1, ["sample 0", "note 0"]), f"nobody else can run, got {depth} and {log}"

    def test_with_nothing_in_flight_there_is_nothing_to_sample(self):
        assert asked(0, 2, ready=False)[:2] == (1, [])


def chat(*contents: str, **fields: object) -> bytes:
    roles = ("system", *("user", "assistant") * len(contents))
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return json.dumps({"messages": messages} | fields).encode()


class TestSessionOf:
    def test_the_next_turn_of_a_conversation_is_of_the_same_session(self):
        first = sessions.session_of(chat("Be brief.", "What is a block?"))
        assert sessions.session_of(chat("Be brief.", "What is a block?", "Memory.", "And a slot?")) == first, (
            "the next turn is of the first's session"
        )
        assert sessions.session_of(chat("Be brief.", "What is a block?", temperature=0.5)) == first, (
            "other fields do not count"
        )
        assert sessions.session_of(chat("Be brief.", "What is a token?", "Memory.", "And a slot?")) != first, (
            "another question"
        )

    def test_one_long_system_prompt_is_one_session(self):
        long = "x" * sessions.PREFIX_CHARACTERS
        assert sessions.session_of(chat(long, "one")) == sessions.session_of(chat(long, "two")), (
            "cut the text first, then hash it"
        )
        assert sessions.session_of(chat(long[:40], "one")) != sessions.session_of(chat(long[:40], "two"))

    def test_a_prompt_counts_by_its_beginning(self):
        def session(prompt: object) -> str:
            return sessions.session_of(json.dumps({"prompt": prompt}).encode())

        long = "x" * sessions.PREFIX_CHARACTERS
        assert session(long + "one") == session(long + "two") != session("one"), (
            "the first PREFIX_CHARACTERS count, and no others"
        )
        assert session([1, 2, 3]) == session([1, 2, 3]) != session([1, 2, 4])

    def test_it_is_the_same_in_every_process_and_short(self, monkeypatch):
        found = set()
        for salt in range(3):  # Python's hash() of a text has another salt in every process
            monkeypatch.setattr(sessions, "hash", lambda x, salt=salt: hash((salt, x)), raising=False)
            found.add(sessions.session_of(chat("Be brief.", "What is a block?" * 100)))
        assert len(found) == 1, f"one session in three processes, got {found}"
        [name] = found
        assert 8 <= len(name) <= 128 and set(name) <= set("0123456789abcdef"), f"hexadecimal digits, got {name!r}"

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": [1]}', b'{"messages": []}', b"\xff"])
    def test_what_is_no_request_has_no_session(self, body):
        assert sessions.session_of(body) == "", f"no prompt and no message with the role user: {body}"


class TestBreakIt:
    def test_your_test_tells_the_broken_scheduler_from_the_reference(self):
        assert_catches("j")


class TestWholeStage:
    def test_the_tutor_answers_on_two_stages(self, monkeypatch):
        monkeypatch.setattr(workers, "_start_worker", fork_worker)
        monkeypatch.setattr(workers, "ANSWER_SECONDS", 30.0)  # less than a test may take
        variants = {}, {"max_num_seqs": 2, "num_kvcache_blocks": 12, "kvcache_block_size": 8, "num_micro_batches": 3}
        check_whole_stage(LLM, *variants, num_kvcache_blocks=64, pipeline_parallel_size=2)
