"""Hidden tests of lab G, to extend: cases that follow from each student's own seed.

make grade-g LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch g submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.mutants import Mutation, assert_catches
from labs.tests import test_lab_g as public
from labs.tests.support import student_random


class TestFrame:
    def test_random_data(self):
        numbers = student_random()
        for _ in range(100):
            data = "".join(numbers.choice(("a", " ", ":", "\n", "\r", "\r\n", "data: ", "é")) for _ in range(8))
            found = public.read_events(public.sse.frame(data).decode())
            expected = [data.replace("\r\n", "\n").replace("\r", "\n")]
            assert found == expected, f"frame({data!r}) is one event, read as {expected}, got {found}"


class TestBreakIt:
    def test_it_sees_a_bug_that_learners_do_not_have(self):
        line, bug = "if self._inbox.empty() and self._may_step:", "if self._calls and self._may_step:"
        assert_catches("g", Mutation("beyond/serving/engine_loop.py", line, bug))
