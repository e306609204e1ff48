"""Hidden tests of lab E, to extend: cases that follow from each student's own seed.

make grade-e LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch e submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.mutants import Mutation, assert_catches
from labs.tests import test_lab_e as public
from labs.tests.support import student_random


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
