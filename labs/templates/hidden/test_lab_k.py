"""Hidden tests of lab K, to extend: cases that follow from each student's own seed.

make grade-k LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch k submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

import re
from functools import reduce

import numpy as np

from labs.mutants import Mutation, assert_catches
from labs.tests import test_lab_k as public
from labs.tests.support import student_random


class TestAfter:
    def test_random_patterns_of_more_parts(self):
        numbers = student_random()
        for _ in range(30):
            pattern = public.random_pattern(numbers, numbers.randint(6, 9))
            for text in public.SHORT:
                ends = public.loop.may_end(reduce(public.loop.after, text, public.state_of(pattern)))
                assert ends == (re.fullmatch(pattern, text) is not None), f"{pattern}: may a text end after {text!r}?"


class TestMaskOf:
    def test_random_tokens_of_a_random_vocabulary(self):
        numbers = student_random()
        for _ in range(30):
            texts = ["".join(numbers.choices("nesoy", k=numbers.randint(0, 4))) for _ in range(40)]
            table, eos_ids = public.random_table(numbers), numbers.sample(range(40, 50), 2)
            for state in range(len(table.moves)):
                right = [text != "" and table.after(state, text) is not None for text in texts] + [False] * 10
                for eos_id in eos_ids:
                    right[eos_id] = state in table.ends
                found = public.masks.mask_of(table, state, public.masks.tree_of(texts), 50, eos_ids)
                wrong = np.flatnonzero(found != right).tolist()
                assert not wrong, f"tokens {wrong} of {texts} in state {state} of {table}"


class TestBreakIt:
    def test_it_sees_a_bug_that_learners_do_not_have(self):
        line = "            found = self._compiled.get(form)\n"
        bug = "            form = next(iter(self._compiled), form)\n"
        assert_catches("k", Mutation("beyond/structured/grammars.py", line, bug + line))
