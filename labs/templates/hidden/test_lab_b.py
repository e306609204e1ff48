"""Hidden tests of lab B, to extend: cases that follow from each student's own seed.

make grade-b LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch b submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

import torch

from labs.tests import test_lab_b as public
from labs.tests.support import student_random


class TestCacheLength:
    def test_random_numbers_of_positions(self):
        sizes = sorted({*range(256, 1025, 256), *(n << k for n in (1024, 1536) for k in range(9))})
        for _ in range(200):
            positions = student_random().randint(1, sizes[-1])
            expected = next(size for size in sizes if size >= positions)
            found = public.static_cache.cache_length(positions)
            assert found == expected, f"{positions} positions take a cache of {expected}, got {found}"


class TestGroupedAttention:
    def test_random_shapes(self):
        numbers = student_random()
        torch.manual_seed(numbers.randint(0, 1000))
        for tokens in (1, numbers.randint(2, 7)):
            groups, kv_heads, keys = numbers.randint(2, 5), numbers.randint(2, 4), numbers.randint(8, 20)
            query = torch.randn(1, groups * kv_heads, tokens, 8)
            key, value = torch.randn(2, 1, kv_heads, keys, 8)
            mask = torch.arange(keys) < torch.arange(keys - tokens, keys)[:, None] + 1
            found, _ = public.attention.grouped_sdpa(None, query, key, value, mask[None, None], scaling=0.3)
            scores = 0.3 * query @ key.repeat_interleave(groups, 1).transpose(2, 3)
            expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)
            case = f"{tokens} tokens, {groups * kv_heads} heads, {kv_heads} KV heads"
            assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5), case
