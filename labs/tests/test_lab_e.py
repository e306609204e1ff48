"""Drives lab E. No model is needed: the scheduler is plain Python, and the tests invent a step's tokens."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stage_e_batching.llm as stage
from labs.driving import Compared, close, error_of, numbers
from labs.tests.support import DigitTokenizer, Values, completion_of, request_of, some, whole_stage
from labs.variants import shortest_first, stops
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.filters import distances
from stage_a_naive.sampling import SamplingParams
from stage_d_paged import loop as stage_loop
from stage_d_paged.sampler import reference
from stage_d_paged.sampler.rules import rules_of
from stage_e_batching.calls import Calls
from stage_e_batching.engine import Engine
from stage_e_batching.parts import Sampled
from stage_e_batching.queues import MAX_OVERTAKES, FirstCome
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import BatchSequence, ScheduledStep, State
from stage_e_batching.waiting_order import ShortestFirst

CPU = torch.device("cpu")


def scheduler_of(num_blocks: int = 100, **options: object) -> Scheduler:
    defaults = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    return Scheduler(num_blocks=num_blocks, **defaults | options)


def add(scheduler: Scheduler, prompt_len: int, max_tokens: int = 20, phrase: int = 0) -> BatchSequence:
    """Queue a request whose prompt shares no block with other phrases' prompts."""
    prompt = [1000 * phrase + i for i in range(prompt_len)]
    sequence = BatchSequence(completion_of(prompt, max_tokens))
    scheduler.add(sequence)
    return sequence


def finish(scheduler: Scheduler, step: ScheduledStep) -> None:
    """Complete a step: its tokens arrive, and sequences that have all their tokens leave."""
    for entry in step:
        if entry.samples:
            entry.sequence.token_ids.append(7)
    for entry in step:
        if len(entry.sequence) >= entry.sequence.max_total_tokens:
            scheduler.remove(entry.sequence)


def decoding(scheduler: Scheduler, *prompt_lens: int, max_tokens: int = 20) -> list[BatchSequence]:
    """Requests whose prompts have run, and that have one token each."""
    sequences = [add(scheduler, length, max_tokens, phrase) for phrase, length in enumerate(prompt_lens, 1)]
    while any(sequence.state is not State.DECODING for sequence in sequences):
        finish(scheduler, scheduler.schedule())
    return sequences


def new_step() -> ScheduledStep:
    return ScheduledStep(99, 0.0)


def ids_of(sequences: Iterable[BatchSequence]) -> list[int]:
    return [sequence.request_id for sequence in sequences]


def entries_of(step: ScheduledStep) -> list[tuple[int, int, int, bool]]:
    """Return request, first token, number of tokens and whether it samples, for each entry of a step."""
    return [(entry.sequence.request_id, entry.start, entry.num_tokens, entry.samples) for entry in step]


def books(scheduler: Scheduler) -> list[object]:
    """Return each queue's requests with their states, the blocks in use, and the number of taken batch slots."""
    scheduler.block_manager.check_invariants(scheduler.unfinished)
    queues = [scheduler.waiting, scheduler.prefilling, scheduler.decoding]
    slots = {s.batch_slot for s in scheduler.prefilling + scheduler.decoding}
    states = [[(s.request_id, s.state.name) for s in queue] for queue in queues]
    return [*states, scheduler.block_manager.num_used, len(slots - {-1})]


BOOKS = "waiting, prefilling, decoding, blocks in use, batch slots"


def rules_for(*params: SamplingParams, vocab_size: int = 10) -> torch.Tensor:
    """Return the rules of one request per row, whose rows in the table of counts are in reverse order."""
    rows = [rules_of(p, False, vocab_size, len(params) - 1 - i) for i, p in enumerate(params)]
    return torch.from_numpy(np.stack(rows))


class TestVariant:
    """Shortest prompt first, and no request waits forever."""

    def test_the_order(self) -> Values:
        cases = [
            ([30, 5, 9], [0, 0, 0]),
            ([30, 5, 9], [0, 0, 50]),
            ([30, 5, 9, 7], [41, 0, 60, 39]),
            ([8, 8, 8, 3], [0, 0, 0, 0]),
            ([8, 3, 9], [40, 45, 40]),
            ([9, 3], [40, 39]),
            ([9, 3], [40, 40]),
            ([], []),
            *((some(7, 1, 9), some(7, 1, 2 * shortest_first.PATIENCE)) for _ in range(20)),
        ]
        for left, waited in cases:
            sequences = [stage_loop.Sequence([1] * (count + 9 * i)) for i, count in enumerate(left)]
            for i, (sequence, steps) in enumerate(zip(sequences, waited, strict=True)):
                sequence.waited, sequence.num_computed = steps, 9 * i  # tokens that have run do not count
            waiting = deque(sequences)
            shortest_first.by_length(waiting)
            yield f"left to run {left}, waited {waited}: the order", [sequences.index(sequence) for sequence in waiting]

    def test_the_tutor_gives_the_same_answers_and_the_first_tokens_come_sooner(self) -> Values:
        model, tokenizer = stage_loop.load(stage_loop.PagedAttention()), load_tokenizer(resolve("tutor"))
        prompts = shortest_first.long_and_short(tokenizer)[:3]  # the first of them fills several steps
        for order in (shortest_first.by_arrival, shortest_first.by_length):
            answers, steps = shortest_first.generate(model, prompts, tokenizer.eos_token_id, order)
            yield f"{order.__name__}: answers", answers
            yield f"{order.__name__}: steps to the first token", steps


class TestCutOffs:
    def kept(self, distance: torch.Tensor, *params: SamplingParams) -> list[int]:
        """How many tokens of each row are kept."""
        found = reference.cut_offs(distance, rules_for(*params, vocab_size=distance.shape[1]))
        assert found.shape == (len(params), 1), f"one cut-off per row, [{len(params)}, 1]; got {list(found.shape)}"
        return (distance <= found).sum(1).tolist()

    def test_every_row_has_its_own_k(self) -> Values:
        distance = torch.tensor([[30, 0, 10, 20]] * 3, dtype=torch.int32)
        params = [SamplingParams(top_k=k) for k in (1, 3, 0)]
        yield (
            "distances 30, 0, 10, 20; k = 1, 3 and 0 (all): the cut-offs",
            reference.cut_offs(distance, rules_for(*params)),
        )

    def test_every_row_is_what_stage_a_computes_for_it_alone(self) -> Values:
        params = [
            SamplingParams(
                top_k=numbers.choice((0, 1, 20, 10**6, numbers.randint(1, 60))),
                top_p=numbers.choice((1.0, 0.9, 0.5, 5e-324, numbers.uniform(0.1, 1))),
                min_p=numbers.choice((0.0, 0.05, 1.0, numbers.uniform(0, 0.3))),
            )
            for _ in range(40)
        ]
        distance = distances(-torch.randint(0, 50, (40, 300)) / 10)  # equals are the rule
        distance[:, 7] = 0
        before = distance.clone()
        for p, kept in zip(params, self.kept(distance, *params), strict=True):
            yield f"{p}: tokens of 300 that are kept", kept
        yield "distances that were changed", int((distance != before).sum())
        logits = torch.randn(20, 100)
        yield (
            "random rows: tokens of 100 that are kept",
            self.kept(distances(logits - logits.amax(1, keepdim=True)), *params[:20]),
        )

    def test_more_rows_take_no_more_operators_and_nothing_is_read_on_the_host(self) -> Values:
        class Count(TorchDispatchMode):
            operators = reads = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                self.reads += function.name().split(".")[0] == "aten::_local_scalar_dense"
                self.operators += 1
                return function(*args, **(kwargs or {}))

        counted = []
        for rows in (2, 64):
            rules = rules_for(*[SamplingParams(top_k=5, top_p=0.5)] * rows)
            distance = torch.arange(10, dtype=torch.int32).repeat(rows, 1)
            with Count() as count:
                reference.cut_offs(distance, rules)
            counted.append(count.operators)
            yield f"{rows} rows: numbers read on the host, which waits for the device", count.reads
        yield "operators that 64 rows take more than 2", counted[1] - counted[0]


class TestPenalised:
    def found(
        self, given: str, params: list[SamplingParams], prompts: list[list[int]], outputs: list[list[int]]
    ) -> Values:
        counts = torch.zeros(len(params), 10, dtype=torch.int16)
        for row, (prompt, output) in enumerate(
            zip(prompts[::-1], outputs[::-1], strict=True)
        ):  # as the table's rows are
            counts[row, prompt] = 1
            for token in output:
                counts[row, token] += 2
        logits = torch.randn(len(params), 10)
        before = logits.clone()
        out = reference.penalised(logits, rules_for(*params), counts)
        for row, p in enumerate(params):
            yield f"{given}, row {row}, {p}: prompt {prompts[row]}, output {outputs[row]}", close(out[row], 1e-5)
        yield (
            f"{given}: the logits that were given must not be changed: numbers that were",
            int((logits != before).sum()),
        )

    def test_it_is_stage_as_penalty_row_for_row(self) -> Values:
        prompts, outputs = [[1, 2, 2], [5], [0, 9], [7]], [[3, 3, 4], [6, 6, 6], [], [7, 8]]
        options = [
            {"repetition_penalty": 1.5},
            {"presence_penalty": 0.5, "frequency_penalty": -0.25},
            {},
            {"repetition_penalty": 0.8, "frequency_penalty": 1.0},
        ]
        yield from self.found("as stage A", [SamplingParams(**o) for o in options], prompts, outputs)

    def test_random_counts(self) -> Values:
        prompts, outputs = ([some(numbers.randint(1, 6), 0, 9) for _ in range(8)] for _ in range(2))
        params = [
            SamplingParams(
                repetition_penalty=numbers.uniform(0.5, 2),
                presence_penalty=numbers.uniform(-2, 2),
                frequency_penalty=numbers.uniform(-2, 2),
            )
            for _ in range(8)
        ]
        yield from self.found("as stage A", params, prompts, outputs)

    def test_where_no_row_asks_the_logits_are_returned_as_they_are(self) -> Values:
        logits, params = torch.randn(2, 10), [SamplingParams(), SamplingParams(top_k=3)]
        out = reference.penalised(logits, rules_for(*params), torch.zeros(0, 10, dtype=torch.int16))
        yield "no row asks for a penalty: return `logits` itself, and read no table", out is logits


class TestChunk:
    def prefilling(self, scheduler: Scheduler, length: int) -> BatchSequence:
        sequence = add(scheduler, length)
        assert scheduler.block_manager.allocate(sequence, length)
        scheduler.waiting.remove(sequence)
        sequence.state, sequence.batch_slot = State.PREFILLING, scheduler._free_table_slots.pop()
        scheduler.prefilling.append(sequence)
        return sequence

    def found(self, given: str, scheduler: Scheduler, sequence: BatchSequence, budget: int) -> Values:
        step = new_step()
        yield f"{given}: tokens taken, which it returns", scheduler._schedule_chunk(sequence, step, budget)
        yield f"{given}: starts, num_tokens, samples of the step", [step.starts, step.num_tokens, step.samples]
        yield f"{given}: num_computed_tokens; what is scheduled counts", sequence.num_computed_tokens
        yield f"{given}: num_recomputed, tokens that had run before", step.num_recomputed
        yield f"{given}: the state", sequence.state.name
        yield f"{given}: prefilling and decoding", [ids_of(scheduler.prefilling), ids_of(scheduler.decoding)]

    def test_a_prompt_is_cut_to_the_budget_and_its_last_chunk_samples(self) -> Values:
        cases = [(10, 0, [6, 16]), (9, 0, [8, 8]), (10, 0, [8, 8]), (10, 4, [6, 6]), (10, 8, [6, 6])]
        cases += [(numbers.randint(2, 60), numbers.randint(0, 60), some(8, 1, 16)) for _ in range(10)]
        for length, highest, budgets in cases:
            scheduler = scheduler_of()
            sequence = self.prefilling(scheduler, length)
            sequence.highest_computed = highest
            for budget in budgets:
                done = sequence.num_computed_tokens
                if done < length:
                    given = f"{done} of {length} tokens have run, {highest} before a preemption, budget {budget}"
                    yield from self.found(given, scheduler, sequence, budget)

    def test_after_a_preemption_the_answer_so_far_is_run_again_too(self) -> Values:
        scheduler = scheduler_of()
        sequence = self.prefilling(scheduler, 10)
        sequence.token_ids.extend([7, 7, 7])  # tokens of an answer that had begun when it was preempted
        yield from self.found("a prompt of 10 and an answer of 3 so far, budget 16", scheduler, sequence, 16)

    def test_full_blocks_can_be_shared_at_once(self) -> Values:
        scheduler = scheduler_of()
        scheduler._schedule_chunk(self.prefilling(scheduler, 10), new_step(), 9)
        twin = BatchSequence(completion_of([*range(10), 77]))
        cached = scheduler.block_manager.count_cached_tokens(twin)
        yield "9 tokens are scheduled, 4 per block: tokens that the next request finds in the cache", cached

    def test_decoding_stays_in_order_of_arrival(self) -> Values:
        scheduler = scheduler_of()
        early, late = self.prefilling(scheduler, 12), self.prefilling(scheduler, 4)
        scheduler._schedule_chunk(late, new_step(), 16)
        scheduler._schedule_chunk(early, new_step(), 16)
        yield "the later request was done first: the earlier comes first in `decoding`", ids_of(scheduler.decoding)


class TestDecodes:
    def found(self, given: str, scheduler: Scheduler) -> ScheduledStep:
        step = new_step()
        scheduler._schedule_decodes(step)
        self.values = [
            (f"{given}: request, start, num_tokens, samples", entries_of(step)),
            (f"{given}: num_decodes", step.num_decodes),
            (f"{given}: num_computed_tokens afterwards", [s.num_computed_tokens for s in step.sequences]),
            (f"{given}: those that got a block, which `_grow` notes in step.grown", ids_of(step.grown)),
            (f"{given}: blocks of each", [len(s.block_table) for s in step.sequences]),
            (f"{given}: preempted", ids_of(p.sequence for p in step.preempted)),
            (f"{given}: {BOOKS}", books(scheduler)),
        ]
        return step

    def test_one_token_of_everybody_and_a_block_for_one_that_begins_it(self) -> Values:
        for lengths in ([5, 6], [4], some(3, 1, 9), some(5, 1, 9)):
            scheduler = scheduler_of()
            decoding(scheduler, *lengths)
            for number in range(3):
                given = f"prompts of {lengths}, 4 per block, step {number}"
                finish(scheduler, self.found(given, scheduler))
                yield from self.values

    def test_without_a_free_block_the_latest_is_preempted(self) -> Values:
        scheduler = scheduler_of(num_blocks=2)
        [_] = decoding(scheduler, 4, max_tokens=4)
        b = add(scheduler, 4, 4, phrase=9)
        scheduler.waiting.remove(b)
        assert scheduler.block_manager.allocate(b, 4)
        b.state, b.batch_slot, b.num_computed_tokens = State.DECODING, scheduler._free_table_slots.pop(), 4
        b.token_ids.append(7)
        scheduler.decoding.append(b)
        self.found("the pool has 2 blocks, both requests need a second one: only the earlier runs", scheduler)
        yield from self.values


class TestGrow:
    def full(self, prompt_len: int = 4, count: int = 2) -> tuple[Scheduler, list[BatchSequence]]:
        """Decoding sequences with full blocks, in a pool without a free one."""
        scheduler = scheduler_of(num_blocks=count)
        sequences = []
        for phrase in range(1, count + 1):
            sequence = add(scheduler, prompt_len, 4, phrase=phrase)
            scheduler.waiting.remove(sequence)
            assert scheduler.block_manager.allocate(sequence, prompt_len)
            sequence.state, sequence.batch_slot = State.DECODING, scheduler._free_table_slots.pop()
            sequence.num_computed_tokens = prompt_len
            sequence.token_ids.append(7)
            scheduler.decoding.append(sequence)
            sequences.append(sequence)
        return scheduler, sequences

    def found(self, given: str, scheduler: Scheduler, sequence: BatchSequence) -> Values:
        step = new_step()
        yield f"{given}: returns", scheduler._grow(sequence, step)
        yield f"{given}: preempted, the last to come first", ids_of(p.sequence for p in step.preempted)
        yield f"{given}: grown", ids_of(step.grown)
        running = sorted(scheduler.unfinished, key=lambda s: s.request_id)
        yield f"{given}: blocks of each request", [len(s.block_table) for s in running]
        yield f"{given}: {BOOKS}", books(scheduler)

    def test_a_free_block_is_simply_taken(self) -> Values:
        scheduler = scheduler_of()
        [sequence] = decoding(scheduler, 4)
        yield from self.found("a block is free", scheduler, sequence)

    def test_the_latest_arrival_gives_its_blocks_up(self) -> Values:
        for count, asks in ((3, 0), (2, 1), (numbers.randint(3, 6), 0), (5, numbers.randint(1, 4))):
            scheduler, sequences = self.full(count=count)
            yield from self.found(f"{count} requests, no block free, {asks} asks", scheduler, sequences[asks])

    def test_a_prompt_under_way_counts_as_running(self) -> Values:
        for count, prefilling in ((2, [1]), (3, [1]), (3, [2]), (6, sorted(numbers.sample(range(1, 6), 3)))):
            scheduler, sequences = self.full(count=count)
            for number in prefilling:
                scheduler.decoding.remove(sequences[number])
                sequences[number].state = State.PREFILLING
                scheduler.prefilling.append(sequences[number])
            given = f"{count} requests, of which {prefilling} prefill, no block free, 0 asks"
            yield from self.found(given, scheduler, sequences[0])

    def test_a_preemption_that_frees_no_block_is_followed_by_another(self) -> Values:
        scheduler, (a, b) = self.full()
        scheduler.block_manager.index_computed(b)
        c = BatchSequence(completion_of(b.token_ids, 4))
        scheduler.add(c)
        scheduler.waiting.remove(c)
        assert scheduler.block_manager.allocate(c, 4) and c.block_table == b.block_table, "c shares b's block"
        c.state, c.batch_slot = State.DECODING, scheduler._free_table_slots.pop()
        scheduler.decoding.append(c)
        yield from self.found("request 1 uses the block of 2 too, 0 asks: `allocate` may say no again", scheduler, a)

    def test_a_full_block_enters_the_prefix_cache(self) -> Values:
        scheduler = scheduler_of()
        [sequence] = decoding(scheduler, 7)
        finish(scheduler, scheduler.schedule())  # 8 tokens computed: the second block is full
        scheduler._grow(sequence, new_step())
        twin = BatchSequence(completion_of([*sequence.token_ids[:8], 1]))
        cached = scheduler.block_manager.count_cached_tokens(twin)
        yield "index what is full before taking a new block: tokens that a twin finds in the cache", cached


class TestSchedule:
    def test_decodes_first_then_prompts_under_way_then_new_ones(self) -> Values:
        scheduler = scheduler_of()
        decoding(scheduler, 5)
        lengths = numbers.randint(16, 30), numbers.randint(5, 12)
        for phrase, length in enumerate(lengths, 5):
            add(scheduler, length, phrase=phrase)
        for number in range(4):
            step = scheduler.schedule()
            given = f"request 0 decodes, prompts of {lengths} come, 16 tokens per step: step {number}"
            yield f"{given}: request, start, tokens, samples", entries_of(step)
            yield f"{given}: num_decodes", step.num_decodes
            finish(scheduler, step)

    def test_steps_are_numbered_and_say_why_nothing_runs(self) -> Values:
        scheduler = scheduler_of()
        first, second = scheduler.schedule(), scheduler.schedule()
        yield "numbers count up by", second.number - first.number
        yield "an empty step says why", bool(first.idle_reason)
        add(scheduler, 4)
        yield "a step that runs something has no reason to be idle", scheduler.schedule().idle_reason

    def test_without_chunking_prompts_go_alone_and_decodes_wait(self) -> Values:
        scheduler = scheduler_of(enable_chunked_prefill=False)
        decoding(scheduler, 5)
        add(scheduler, numbers.randint(6, 15), phrase=5)
        for number in range(2):
            step = scheduler.schedule()
            yield f"a whole prompt in a separate step, then both decode: step {number}", entries_of(step)
            yield f"num_decodes of step {number}", step.num_decodes
            finish(scheduler, step)

    def test_everybody_gets_an_answer(self) -> Values:
        for blocks in (12, numbers.randint(12, 20)):
            scheduler = scheduler_of(num_blocks=blocks)
            sequences = [
                add(scheduler, *length, phrase=i)
                for i, length in enumerate(zip(some(6, 2, 20), some(6, 2, 12), strict=True))
            ]
            for number in range(60):
                step = scheduler.schedule()
                if number < 12:
                    yield f"{blocks} blocks, step {number}: request, start, tokens, samples", entries_of(step)
                finish(scheduler, step)
                scheduler.block_manager.check_invariants(scheduler.unfinished)
            for _ in range(300):
                finish(scheduler, scheduler.schedule())
            left = [s.request_id for s in sequences if s.state is not State.FINISHED]
            yield f"{blocks} blocks: requests that still wait 360 steps later", left


class TestAdmit:
    def found(self, given: str, scheduler: Scheduler, budget: int) -> Values:
        step = new_step()
        scheduler._admit(step, budget)
        yield f"{given}: admitted", ids_of(step.admitted)
        yield f"{given}: request, start, tokens, samples", entries_of(step)
        yield f"{given}: grown", ids_of(step.grown)
        yield f"{given}: times that those who wait were overtaken", [s.times_overtaken for s in scheduler.waiting]
        yield f"{given}: those that are not tried again before `note_room`", sorted(ids_of(scheduler._refused))
        yield f"{given}: {BOOKS}", books(scheduler)
        yield (
            f"{given}: admitted ones whose first_scheduled_time is the step's",
            [s.first_scheduled_time == step.time for s in step.admitted],
        )

    def test_in_order_of_arrival_while_there_are_tokens(self) -> Values:
        for lengths, budget in (([6, 6, 6], 10), (some(4, 1, 12), numbers.randint(4, 16)), (some(4, 1, 12), 16)):
            scheduler = scheduler_of()
            for phrase, length in enumerate(lengths):
                add(scheduler, length, phrase=phrase)
            yield from self.found(f"prompts of {lengths}, {budget} tokens", scheduler, budget)

    def test_the_order_object_says_who_comes_first(self) -> Values:
        for budget in (8, 5):
            scheduler = scheduler_of()
            add(scheduler, 12, phrase=1), add(scheduler, 5, phrase=2)
            scheduler.order = ShortestFirst()
            yield from self.found(f"prompts of 12 and 5, the shortest first, {budget} tokens", scheduler, budget)

    def test_one_that_comes_back_keeps_the_time_when_it_was_first_scheduled(self) -> Values:
        scheduler = scheduler_of()
        sequence = add(scheduler, 6)
        sequence.first_scheduled_time = numbers.uniform(0.1, 0.9)
        scheduler._admit(new_step(), 10)
        yield "preempted and admitted again: when it was first scheduled", sequence.first_scheduled_time

    def test_no_more_than_there_are_batch_slots(self) -> Values:
        scheduler = scheduler_of(max_num_seqs=2)
        for i in range(4):
            add(scheduler, 2, phrase=i)
        yield from self.found("4 requests, 2 batch slots", scheduler, 16)

    def test_one_that_does_not_fit_may_be_overtaken_and_it_is_counted(self) -> Values:
        cases = [(12, 40, 0, 1), (12, 40, MAX_OVERTAKES, 1), (16, 50, MAX_OVERTAKES - 2, 4)]
        cases += [(24, 90, numbers.randint(0, MAX_OVERTAKES), numbers.randint(1, 5)) for _ in range(10)]
        for blocks, length, used, small in cases:
            scheduler = scheduler_of(num_blocks=blocks)
            decoding(scheduler, 8)
            add(scheduler, length, 4, phrase=5).times_overtaken = used
            for i in range(small):
                add(scheduler, 2, 2, phrase=6 + i)
            given = f"{small} behind one of {length} that does not fit and was overtaken {used} times"
            yield from self.found(given, scheduler, 16)

    def test_those_that_fit_are_all_admitted_when_nobody_is_passed_over(self) -> Values:
        count = MAX_OVERTAKES + 4
        scheduler = scheduler_of(400, max_num_seqs=2 * count, max_num_batched_tokens=10 * count)
        add(scheduler, 2, phrase=100).times_overtaken = MAX_OVERTAKES  # it fits now, so no request waits for it
        for i in range(count):
            add(scheduler, 2, phrase=i)
        yield from self.found(f"{count + 1} requests that all fit", scheduler, 10 * count)

    def test_those_that_did_not_fit_are_not_looked_at_again_while_nothing_came_free(self) -> Values:
        scheduler, tries, original = scheduler_of(num_blocks=12), [], Scheduler._allocate
        decoding(scheduler, 8)
        add(scheduler, 40, 4, phrase=5)
        found = []
        with patch.object(Scheduler, "_allocate", lambda self, s: tries.append(s.request_id) or original(self, s)):
            scheduler._admit(new_step(), 16)
            scheduler._admit(new_step(), 16)
            found.append(("refused once, and nothing came free: looks at", list(tries)))
            add(scheduler, 4, 4, phrase=6)
            step = new_step()
            scheduler._admit(step, 16)
            found.append(("one that arrived since then is looked at: looks, admitted", [tries, ids_of(step.admitted)]))
        yield from found

    def test_no_request_is_admitted_to_a_step_that_had_to_preempt(self) -> Values:
        scheduler, step = scheduler_of(), new_step()
        add(scheduler, 4)
        step.preempted.append(None)
        scheduler._admit(step, 16)
        yield "a step that had to preempt has no room for more: admitted", ids_of(step.admitted)


class LoggingRunner:
    """A slow device. The token after n tokens is 10 + n; a log records when steps are launched and waited for."""

    def __init__(self, fail_at: int = -1) -> None:
        self.log: list[str] = []
        self.fail_at = fail_at
        self.num_tokens: list[int] = []  # of each step that ran any

    def launch(self, step: ScheduledStep) -> object:
        self.num_tokens += [step.total_tokens] * bool(step.sequences)
        number = sum(line.startswith("launch") for line in self.log)
        self.log.append(f"launch {number}")
        if number == self.fail_at:
            raise RuntimeError("the device failed")
        tokens = [10 + entry.start + entry.num_tokens for entry in step if entry.samples]
        runner = self

        class Handle:
            def wait(self) -> Sampled:
                runner.log.append(f"wait {number}")
                return Sampled(tokens)

        return Handle()

    def forget(self) -> None:
        self.log.append("forget")


class TestEngineStep:
    def calls(self, depth: int, fail_at: int = -1, eos: int = -1) -> Calls:
        scheduler = Scheduler(num_blocks=50, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
        engine = Engine(scheduler, LoggingRunner(fail_at), depth=depth)
        return Calls(engine, tokenizer=DigitTokenizer(), eos_token_ids=frozenset({eos}), max_model_len=100)

    def run(self, calls: Calls, steps: int = 60) -> dict[int, dict]:
        outputs = {}
        for _ in range(steps):
            if not calls.has_unfinished():
                return outputs
            outputs |= {event.request_id: event.output for event in calls.step() if event.output is not None}
        raise AssertionError(f"not done after {steps} steps")

    def test_when_steps_are_launched_and_waited_for(self) -> Values:
        for depth in (0, 1, 2):
            calls, length = self.calls(depth), numbers.randint(1, 9)
            calls.add_request(request_of(list(range(length)), 6), streams=False)
            for number in range(4):
                events = calls.step()
                given = f"depth {depth}, call {number}"
                yield f"{given}: launches, and waits for tokens", calls.engine.runner.log
                yield f"{given}: events", len(events)

    def test_with_a_depth_of_0_no_token_is_counted_before_it_is_there(self) -> Values:
        calls, counted = self.calls(0), []
        with patch.object(calls.engine.scheduler, "count_in_flight", counted.append):
            calls.add_request(request_of([1, 2, 3], 3), streams=False)
            self.run(calls)
        yield "nothing stays in flight with a depth of 0: steps that were counted on", len(counted)

    def test_whatever_the_depth_the_tokens_are_the_same(self) -> Values:
        for depth in (0, 1, 2, 3):
            calls, lengths = self.calls(depth), some(3, 1, 9)
            for length in lengths:
                calls.add_request(request_of(list(range(length)), 5), streams=False)
            outputs = self.run(calls)
            found = [outputs[i]["token_ids"] for i in range(3)]
            yield f"depth {depth}, prompts of {lengths}: tokens", found
            yield f"depth {depth}, prompts of {lengths}: tokens run in each step", calls.engine.runner.num_tokens

    def test_the_token_past_the_end_is_thrown_away(self) -> Values:
        calls = self.calls(1, eos=15)
        calls.add_request(request_of([1, 2, 3], 50), streams=False)
        output = self.run(calls)[0]
        yield "the end is 15: tokens and finish_reason", [output["token_ids"], output["finish_reason"]]
        again = calls.add_request(request_of([1, 2, 3, 4, 5], 3), streams=False)
        yield "what was in flight does not disturb the next request", self.run(calls)[again]["token_ids"]

    def test_a_complete_sequence_runs_no_more(self) -> Values:
        calls, count = self.calls(1), numbers.randint(2, 9)
        calls.add_request(request_of([1, 2, 3], count), streams=False)
        self.run(calls)
        yield (
            f"3 tokens of prompt, then {count - 1} steps of one: count what is in flight",
            calls.engine.runner.num_tokens,
        )

    def test_a_step_without_sequences_is_postprocessed_and_not_launched(self) -> Values:
        calls = self.calls(0)
        calls.step()
        yield "nothing to run: launches", calls.engine.runner.log

    def test_after_a_step_that_failed_nothing_is_lost(self) -> Values:
        for fail_at in (0, 1, 3):
            calls = self.calls(1, fail_at)
            calls.add_request(request_of([1, 2, 3], 5), streams=False)
            yield (
                f"launch {fail_at} fails: the error goes on",
                error_of(lambda calls=calls: self.run(calls), RuntimeError),
            )
            log = calls.engine.runner.log
            lost = [n for n in range(fail_at) if f"launch {n}" in log and f"wait {n}" not in log]
            yield f"launch {fail_at} fails: steps that ran then and were not waited for", lost
            yield f"launch {fail_at} fails: the request goes on where it was", self.run(calls)[0]["token_ids"]


class TestShortestFirst:
    """Counts on traces of bursts: 3 long prompts among 12 short ones, 6 times."""

    def trace(self, seed: int) -> list[tuple[int, int, int]]:
        """Arrival step, prompt length, answer length of each request."""
        random_numbers, trace = random.Random(seed), []
        for burst in range(6):
            lengths = [random_numbers.randint(90, 150) for _ in range(3)]
            lengths += [random_numbers.randint(4, 20) for _ in range(12)]
            random_numbers.shuffle(lengths)
            trace += [(100 * burst + i // 4, length, random_numbers.randint(4, 16)) for i, length in enumerate(lengths)]
        return trace

    def replay(self, order: FirstCome, trace: list[tuple[int, int, int]]) -> dict[BatchSequence, int]:
        """The steps that each request waited, on a scheduler with 4 batch slots and 32 tokens per step."""
        scheduler = scheduler_of(num_blocks=300, max_num_seqs=4, max_num_batched_tokens=32)
        scheduler.order, waits, arrived = order, {}, {}
        coming = list(enumerate(trace))
        for number in range(5000):
            while coming and coming[0][1][0] <= number:
                phrase, (_, prompt_len, max_tokens) = coming.pop(0)
                arrived[add(scheduler, prompt_len, max_tokens, phrase)] = number
            if not coming and not scheduler.has_unfinished():
                return waits
            step = scheduler.schedule()
            waits |= {sequence: number - arrived[sequence] for sequence in step.admitted if sequence not in waits}
            finish(scheduler, step)
        raise AssertionError("5000 steps later some requests still wait")

    def test_the_mean_wait_is_shorter_than_in_order_of_arrival(self) -> Values:
        for seeds in (range(4), numbers.sample(range(10, 10**6), 6)):
            traces = [self.trace(seed) for seed in seeds]
            mine = [wait for trace in traces for wait in self.replay(ShortestFirst(), trace).values()]
            fcfs = [wait for trace in traces for wait in self.replay(FirstCome(), trace).values()]
            yield "the mean wait, as a share of first come first served", Compared(sum(mine) / sum(fcfs), most=0.93)
            yield "the longest wait, as a share of first come first served", Compared(max(mine) / max(fcfs), most=1.4)

    def test_a_long_request_gets_in_by_ageing_before_the_bound(self) -> Values:
        scheduler = scheduler_of(num_blocks=300, max_num_seqs=2, max_num_batched_tokens=32)
        scheduler.order, length = ShortestFirst(), numbers.randint(120, 150)
        long = None
        for number in range(300):
            add(scheduler, 8, 6, phrase=number)
            add(scheduler, 8, 6, phrase=1000 + number)
            if number == 2:
                long = add(scheduler, length, 4, phrase=5000)
            finish(scheduler, scheduler.schedule())
            if long is not None and long.state is not State.WAITING:
                break
        yield (
            f"a prompt of {length} among prompts of 8: times it is overtaken before it is admitted by its age",
            Compared(long.times_overtaken, least=1, most=MAX_OVERTAKES - 1),
        )


class TestStream:
    def test_what_may_become_a_stop_string_waits_and_the_rest_does_not(self) -> Values:
        def word(least: int = 1) -> str:
            return "".join(numbers.choices("ab", k=numbers.randint(least, 4)))

        cases = [
            (["ab", "cd", "xy"], ["cde"]),
            (["ab", "cd", "ef", "gh"], ["cde"]),
            (["aa", "a", "c"], ["aab"]),
            (["x<", "end", ">y"], ["<end>", "d"]),
            (["one.two.", "three"], ["."]),
            (["to the e", "n"], ["end"]),
            (["no ", "stops"], []),
            (["a", "b", "ac"], ["ba", "abac"]),
        ]
        for _ in range(60):
            pieces = [word() for _ in range(numbers.randint(1, 6))]
            cases.append((pieces, [word() + word() for _ in range(numbers.randint(0, 2))]))
        for pieces, strings in cases:
            yield f"pieces {pieces}, stop strings {strings}: sent after each", stops.stream(pieces, strings)


class TestWholeStage:
    def test_the_tutor_answers(self) -> Values:
        tight = {"num_kvcache_blocks": 12, "kvcache_block_size": 8, "max_num_seqs": 2, "enable_prefix_caching": False}
        whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}
        options = {"num_kvcache_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
        yield from whole_stage(stage.LLM, {}, whole, tight, **options)

    def test_a_pool_that_is_too_small_changes_no_token(self) -> Values:
        prompts, params = (
            [[20 + i] * (17 + 8 * i) for i in range(4)],
            SamplingParams(0.0, max_tokens=60, ignore_eos=True),
        )
        tight = {"num_kvcache_blocks": 18, "max_num_seqs": 3, "max_num_batched_tokens": 16}  # a last chunk of one token
        for options in ({"num_kvcache_blocks": 100}, tight):
            llm = stage.LLM("tutor", device="cpu", kvcache_block_size=8, **options)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            yield f"with {options}: answers", [output["token_ids"] for output in outputs]
            yield f"with {options}: requests gave their blocks back", llm.calls.stats()["num_preemptions"] > 0

    def test_requests_with_different_wishes_share_a_batch(self) -> Values:
        llm = stage.LLM("tutor", device="cpu", num_kvcache_blocks=64, kvcache_block_size=8)
        wishes = [{"top_k": 5}, {"repetition_penalty": 1.4}, {"top_p": 0.8}, {"frequency_penalty": 1.0, "top_k": 3}]
        params = [
            SamplingParams(temperature=0.9, seed=numbers.randrange(999), max_tokens=10, **wish) for wish in wishes
        ]
        outputs = llm.generate([[20 + i] * 6 for i in range(4)], params, use_tqdm=False)
        for wish, output in zip(wishes, outputs, strict=True):
            yield f"{wish} in a batch with others", output["token_ids"]
