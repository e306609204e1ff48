"""Hidden tests of lab C, to extend: cases that follow from each student's own seed.

make grade-c LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch c submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

import torch

from labs.tests import test_lab_c as public
from labs.tests.support import student_random


class TestFormula:
    def test_random_shapes(self):
        numbers = student_random()
        for _ in range(5):
            rows, hidden, inter = (numbers.randint(1, 40) for _ in range(3))
            weights = [t.double() for t in public.inputs(rows, hidden, inter)]
            found = public.fused_mlp.swiglu_mlp_reference(*weights, 1e-3)
            expected = public.block_by_hand(*weights, 1e-3)
            assert torch.allclose(found, expected), f"{rows} rows, {hidden} columns, {inter} neurons, eps 0.001"
