"""Hidden tests of lab D, to extend: cases that follow from each student's own seed.

make grade-d LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch d submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.mutants import Mutation, assert_catches
from labs.tests import test_lab_d as public
from labs.tests.support import student_random


class TestFlatBatch:
    def test_a_random_chunk(self):
        numbers = student_random()
        block, count = numbers.randint(2, 9), numbers.randint(3, 20)
        table = numbers.sample(range(50), -(-count // block))
        out = public.batch.flat_batch(
            [public.batch.Chunk(public.sequence_of(list(range(count)), table=table), 0, count)], block, public.CPU
        )
        expected = [table[i // block] * block + i % block for i in range(count)]
        found = out.metadata.slot_mapping.tolist()
        assert found == expected, f"{count} tokens, blocks of {block}, table {table}: {expected} expected, got {found}"


class TestBreakIt:
    def test_it_sees_a_bug_that_learners_do_not_have(self):
        assert_catches(
            "d",
            Mutation(
                "stage_d_paged/block_manager.py",
                "        entry.blocks.remove(block)\n",
                "        entry.blocks.remove(block) if len(entry.blocks) > 1 else None\n",
            ),
        )
