"""Hidden tests of lab J, to extend: cases that follow from each student's own seed.

make grade-j LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch j submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.mutants import Mutation, assert_catches


class TestBreakIt:
    def test_it_sees_a_bug_that_learners_do_not_have(self):
        assert_catches(
            "j",
            Mutation(
                "beyond/scale_out/pipeline_scheduler.py",
                " for sequence in self._slots_in_use if not sequence.num_in_flight]",
                " for sequence in self._slots_in_use]",
            ),
        )
