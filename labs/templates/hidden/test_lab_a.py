"""Hidden tests of lab A, to extend: cases that follow from each student's own seed.

make grade-a LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch a submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.tests import test_lab_a as public
from labs.tests.support import student_random


class TestOverlap:
    def test_random_texts(self):
        numbers = student_random()
        for _ in range(200):
            text = "".join(numbers.choice("ab") for _ in range(numbers.randint(0, 8)))
            stop = "".join(numbers.choice("ab") for _ in range(numbers.randint(1, 6)))
            expected = max((n for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
            found = public.stop_strings.overlap(text, stop)
            assert found == expected, f"overlap({text!r}, {stop!r}) is {expected}, got {found}"
