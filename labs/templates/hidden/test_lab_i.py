"""Hidden tests of lab I, to extend: cases that follow from each student's own seed.

make grade-i LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch i submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.tests import test_lab_i as public
from labs.tests.support import student_random


class TestCountRight:
    def test_random_guesses(self):
        numbers = student_random()
        for _ in range(200):
            draft = [numbers.randint(0, 2) for _ in range(numbers.randint(0, 5))]
            sampled = [numbers.randint(0, 2) for _ in range(len(draft) + 1)]
            expected = next((n for n in range(len(draft)) if draft[n] != sampled[n]), len(draft))
            found = public.HostDrafts.count_right(None, list(draft), list(sampled))
            assert found == expected, f"draft {draft}, sampled {sampled}: {expected} are right, got {found}"


class TestDraft:
    def test_random_texts(self):
        numbers = student_random()
        for _ in range(100):
            tokens = [numbers.randint(1, 9) for _ in range(numbers.randint(2, 12))]
            drafter = public.FoundAt(numbers.randint(1, 8), 2)
            drafter.at = at = numbers.randint(1, len(tokens) - 1)
            expected = list(tokens)
            for _ in range(drafter._num_tokens):
                expected.append(expected[at + len(expected) - len(tokens)])
            found = drafter.draft(public.sequence_of(tokens))
            assert found == expected[len(tokens) :], f"{tokens} goes on as from position {at}, got {found}"
