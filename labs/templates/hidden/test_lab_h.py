"""Hidden tests of lab H, to extend: cases that follow from each student's own seed.

make grade-h LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch h submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

import torch

from labs.tests import test_lab_h as public
from labs.tests.support import student_random


class TestQuantizeRows:
    def test_random_rows(self):
        numbers = student_random()
        torch.manual_seed(numbers.randint(0, 1000))
        for dtype in (public.INT8, public.FP8):
            shape = [numbers.randint(1, 9) for _ in range(3)]
            x = torch.randn(shape) * 10 ** numbers.uniform(-4, 4)
            values, scales = public.formats.quantize_rows(x, dtype)
            expected, expected_scales = public.quantized(x, dtype)
            assert torch.equal(values.float(), expected.float()), f"{dtype}, shape {shape}: values"
            assert torch.allclose(scales, expected_scales), f"{dtype}, shape {shape}: scales"


class TestDequantizeMatrix:
    def test_random_groups(self):
        numbers = student_random()
        rows, columns, group = numbers.randint(2, 9), numbers.randint(20, 90), numbers.randint(3, 40)
        weight = public.random_matrix(rows, columns, group)
        found = public.formats.dequantize_matrix(weight, torch.float32, group)
        wrong = [c for c in range(columns) if not found[:, c].equal(weight[0][:, c] * weight[1][:, c // group])]
        assert wrong == [], f"{columns} columns in groups of {group}: columns {wrong[:5]} have another group's scale"
