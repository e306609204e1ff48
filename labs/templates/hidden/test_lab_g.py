"""Hidden tests of lab G, to extend: cases that follow from each student's own seed.

make grade-g LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch g submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.mutants import Mutation, assert_catches


class TestBreakIt:
    def test_it_sees_a_bug_that_learners_do_not_have(self):
        assert_catches(
            "g",
            Mutation(
                "beyond/serving/engine_loop.py",
                "if self._inbox.empty() and self._may_step:",
                "if self._calls and self._may_step:",
            ),
        )
