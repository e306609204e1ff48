"""Hidden tests of lab A, to extend: cases that follow from each student's own seed.

make grade-a LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch a submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.tests import test_lab_a as public
from labs.tests.support import student_random


class TestFloor:
    def test_random_answers(self):
        numbers = student_random()
        for _ in range(50):
            weights, kv, prompt, generated = (numbers.randint(1, most) for most in (10**6, 1000, 500, 60))
            expected = sum(weights + (prompt + step) * kv for step in range(1, generated)) / 64
            found = public.floors.answer_floor(weights, kv, prompt, generated, 64.0)
            given = f"weights {weights}, {kv} per token, prompt {prompt}, answer {generated}, 64 bytes/s"
            assert abs(found - expected) <= 1e-9 * max(1, expected), f"{given}: {expected} s, got {found}"
