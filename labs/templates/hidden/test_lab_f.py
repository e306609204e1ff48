"""Hidden tests of lab F, to extend: cases that follow from each student's own seed.

make grade-f LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch f submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.mutants import Mutation, assert_catches
from labs.tests import test_lab_f as public
from labs.tests.support import student_random


class TestCaptureSizes:
    def test_a_random_limit(self):
        top = student_random().randint(17, 500)
        sizes = public.cuda_graph.capture_sizes(top)
        expected = sorted({n for n in (1, 2, 4, 8, *range(16, top, 16)) if n < top} | {top})
        assert sizes == expected, f"capture_sizes({top}) is {expected}, got {sizes}"


class TestBreakIt:
    def test_it_sees_a_bug_that_learners_do_not_have(self):
        assert_catches(
            "f",
            Mutation(
                "stage_f_graph_tp/cuda_graph.py",
                "host.slot_mapping[count:] = -1",
                "host.slot_mapping[count + 1 :] = -1",
            ),
        )
