"""Hidden tests of lab J, to extend: cases that follow from each student's own seed.

make grade-j LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch j submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.mutants import Mutation, assert_catches
from labs.tests import test_lab_j as public
from labs.tests.support import student_random


class TestIdleShare:
    def test_random_spans(self):
        numbers = student_random()
        stages = []
        for _ in range(numbers.randint(2, 5)):
            times = sorted(numbers.sample(range(1000), 8))
            stages.append([{"start": a, "end": b} for a, b in zip(times[::2], times[1::2], strict=True)])
        start, end = min(s[0]["start"] for s in stages), max(s[-1]["end"] for s in stages)
        busy = sum(span["end"] - span["start"] for spans in stages for span in spans)
        expected, found = 1 - busy / (end - start) / len(stages), public.spans.idle_share(stages)
        assert abs(found - expected) < 1e-9, f"{stages}: {expected:.3f} expected, got {found:.3f}"


class TestBreakIt:
    def test_it_sees_a_bug_that_learners_do_not_have(self):
        line, bug = (
            " for sequence in self._slots_in_use if not sequence.num_in_flight]",
            " for sequence in self._slots_in_use]",
        )
        assert_catches("j", Mutation("beyond/scale_out/pipeline_scheduler.py", line, bug))
