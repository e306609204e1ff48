"""Hidden tests of lab E, to extend: cases that follow from each student's own seed, for every exercise.

make grade-e LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch e submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from collections.abc import Iterator

import torch

from labs.mutants import Mutation, assert_catches
from labs.tests import test_lab_e as public
from labs.tests.support import request_of, student_random


def words() -> Iterator[str]:
    """Short texts of few letters, so that one often begins as another ends."""
    numbers = student_random()
    while True:
        yield "".join(numbers.choices("ab", k=numbers.randint(1, 4)))


class TestVariant:
    def test_random_orders(self):
        numbers, patience = student_random(), public.shortest_first.PATIENCE
        for _ in range(20):
            left, waited = ([numbers.randint(1, most) for _ in range(7)] for most in (9, 2 * patience))
            order = sorted(range(7), key=lambda i: (-max(waited[i], patience - 1), left[i] * (waited[i] < patience), i))
            public.TestVariant().test_the_order(left, waited, order)


class TestCutOffs:
    def test_random_rows(self):
        numbers = student_random()
        params = [
            public.SamplingParams(
                top_k=numbers.randint(0, 30), top_p=numbers.uniform(0.1, 1), min_p=numbers.choice((0.0, 0.01, 0.2))
            )
            for _ in range(20)
        ]
        logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(numbers.randint(0, 10**6)))
        distance = public.distances(logits - logits.amax(1, keepdim=True))
        found = public.TestCutOffs().cut_offs(distance, *params)
        for row, p, value in zip(distance, params, found, strict=True):
            kept, right = int((row <= value).sum()), int((row <= int(public.cut_off(row, p))).sum())
            assert kept == right, f"{p} keeps {right} of 100 tokens in stage A, and {kept} here"


class TestPenalised:
    def test_random_counts(self):
        numbers = student_random()
        prompts, outputs = ([numbers.choices(range(10), k=numbers.randint(1, 6)) for _ in range(8)] for _ in range(2))
        params = [
            public.SamplingParams(
                repetition_penalty=numbers.uniform(0.5, 2),
                presence_penalty=numbers.uniform(-2, 2),
                frequency_penalty=numbers.uniform(-2, 2),
            )
            for _ in range(8)
        ]
        counts = torch.zeros(8, 10, dtype=torch.int16)
        for row in range(8):
            counts[7 - row, prompts[row]] = 1
            for token in outputs[row]:
                counts[7 - row, token] += 2
        logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(numbers.randint(0, 10**6)))
        found = public.TestPenalised().penalised(logits, params, counts)
        expected = public.apply_penalties(logits, params, prompts, outputs)
        for row, p in enumerate(params):
            assert torch.allclose(found[row], expected[row], atol=1e-5), f"{p} differs from stage A"


class TestChunk:
    def test_random_chunks(self):
        numbers = student_random()
        for _ in range(20):
            length, highest = numbers.randint(2, 60), numbers.randint(0, 60)
            scheduler, start = public.scheduler_of(), 0
            sequence = public.TestChunk().prefilling(scheduler, length)
            sequence.highest_computed = highest
            while start < length:
                budget, step = numbers.randint(1, 16), public.new_step()
                count = min(budget, length - start)
                scheduler._schedule_chunk(sequence, step, budget)
                found = step.starts, step.num_tokens, step.samples, step.num_recomputed
                again = max(0, min(highest, start + count) - start)
                expected = [start], [count], [start + count == length], again
                assert found == expected, f"{start} of {length} tokens ran, budget {budget}: {expected}, got {found}"
                start += count


class TestDecodes:
    def test_random_lengths(self):
        lengths = [student_random().randint(1, 9) for _ in range(3)]
        scheduler, step = public.scheduler_of(), public.new_step()
        sequences = public.decoding(scheduler, *lengths)
        starts = [sequence.num_computed_tokens for sequence in sequences]
        grown = [i for i, start in enumerate(starts) if start % 4 == 0]
        scheduler._schedule_decodes(step)
        found = step.starts, public.ids_of(step.grown)
        assert found == (starts, grown), f"computed {starts}, blocks of 4: grown {grown}, got starts and grown {found}"


class TestGrow:
    def test_random_running_sequences(self):
        numbers = student_random()
        for _ in range(10):
            count = numbers.randint(2, 6)
            scheduler, sequences = public.TestGrow().full(count=count)
            for sequence in numbers.sample(sequences[1:], numbers.randint(0, count - 1)):
                scheduler.decoding.remove(sequence)
                sequence.state = public.State.PREFILLING
            scheduler.prefilling += [s for s in sequences if s.state is public.State.PREFILLING]
            step = public.new_step()
            scheduler._grow(sequences[0], step)
            found = public.ids_of(p.sequence for p in step.preempted)
            assert found == [count - 1], f"{count} run, request 0 asks: expected [{count - 1}] preempted, got {found}"


class TestSchedule:
    def test_random_requests_are_answered_within_the_limits_of_a_step(self):
        numbers = student_random()
        scheduler = public.scheduler_of(num_blocks=numbers.randint(12, 20))
        sequences = [public.add(scheduler, numbers.randint(2, 20), numbers.randint(2, 12), i) for i in range(8)]
        for _ in range(400):
            step = scheduler.schedule()
            assert step.total_tokens <= 16, f"at most 16 tokens per step, got {step.total_tokens}"
            public.finish(scheduler, step)
            public.check_books(scheduler)
        left = [s.request_id for s in sequences if s.state is not public.State.FINISHED]
        assert left == [], f"400 steps later requests {left} still wait"


class TestAdmit:
    def test_random_overtakes(self):
        numbers = student_random()
        for _ in range(10):
            used, small = numbers.randint(0, public.MAX_OVERTAKES), numbers.randint(1, 5)
            scheduler, step = public.scheduler_of(num_blocks=24, max_num_batched_tokens=64), public.new_step()
            public.decoding(scheduler, 8)
            large = public.add(scheduler, 90, 4, phrase=5)
            large.times_overtaken = used
            for i in range(small):
                public.add(scheduler, 1, 1, phrase=6 + i)
            scheduler._admit(step, 64)
            count = min(small, public.MAX_OVERTAKES - used)
            found = len(step.admitted), large.times_overtaken
            given = f"{small} behind one that does not fit and was overtaken {used} times"
            assert found[0] <= count and found[1] == used + found[0], f"{given}: at most {count} pass, got {found}"
            assert found[0] >= min(count, 2), f"{given}: {min(count, 2)} or more fit, got {found[0]}"


class TestEngineStep:
    def test_random_lengths_and_depths(self):
        numbers, steps = student_random(), public.TestEngineStep()
        for _ in range(10):
            depth, lengths = numbers.randint(0, 3), [numbers.randint(1, 9) for _ in range(3)]
            calls = steps.calls(depth)
            for length in lengths:
                calls.add_request(request_of(list(range(length)), 5), streams=False)
            outputs = steps.run(calls)
            found = [outputs[i]["token_ids"] for i in range(3)]
            expected = [list(range(10 + length, 15 + length)) for length in lengths]
            assert found == expected, f"depth {depth}, prompts of {lengths}: expected {expected}, got {found}"


class TestShortestFirst(public.TestShortestFirst):
    seeds = tuple(student_random().sample(range(10, 100_000), 6))


class TestBreakIt:
    def test_it_sees_a_bug_that_learners_do_not_have(self):
        assert_catches(
            "e",
            Mutation(
                "stage_e_batching/scheduler.py",
                "if other.request_id > sequence.request_id:",
                "if other.request_id < sequence.request_id:",
            ),
        )


class TestStream:
    def test_random_pieces(self):
        texts, numbers = words(), student_random()
        for _ in range(60):
            pieces = [next(texts) for _ in range(numbers.randint(1, 6))]
            strings = [next(texts) + next(texts) for _ in range(numbers.randint(0, 2))]
            found, whole = public.stops.stream(pieces, strings), "".join(pieces)
            at = min((i for i in map(whole.find, strings) if i >= 0), default=len(whole))
            given = f"pieces {pieces}, stop strings {strings}"
            sent = "".join(found)
            assert len(sent) <= at or not strings, f"{given}: {whole[:at]!r} is sent at most, got {sent!r}"
