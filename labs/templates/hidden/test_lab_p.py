"""Hidden tests of lab P, to extend: cases that follow from each student's own seed.

make grade-p LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch p submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

from labs.tests import test_lab_p as public
from labs.tests.support import student_random


class TestReplays:
    def test_a_random_largest_size(self):
        top = student_random().randint(17, 200)
        sizes = public.cuda_graph.capture_sizes(top)
        graphs = public.cuda_graph.DecodeGraphs(sizes, table_width=5, max_model_len=20, padding_slot=top)
        found = [graphs.takes(public.StepShape(n, n, n, 2, n, 1, 8)) for n in range(1, top + 2)]
        wrong = [n for n, shape in enumerate(found[:-1], 1) if shape not in graphs.shapes or shape.num_seqs < n]
        assert wrong == [] and found[-1] is None, (
            f"sizes {sizes}: {wrong[:5]} decodes have a graph, {top + 1} have none"
        )


class TestBlocks:
    def test_a_random_option(self):
        size = 2 ** student_random().randint(0, 5)
        found = public.TestBlocks().block_size(kvcache_block_size=size)
        assert found == size, f"kvcache_block_size={size} was asked for, got {found}"


class TestWaitsCount(public.TestWaitsCount):
    sizes = tuple(student_random().sample(range(2, 200), 3))


class TestReplaysCount(public.TestReplaysCount):
    sizes = tuple(student_random().sample(range(2, 200), 3))


class TestBlocksCount(public.TestBlocksCount):
    sizes = tuple(student_random().sample(range(2, 2000), 3))


class TestHashesCount(public.TestHashesCount):
    sizes = tuple(zip(student_random().sample(range(2, 40), 3), student_random().sample(range(3, 30), 3), strict=True))


class TestOperatorsCount(public.TestOperatorsCount):
    sizes = tuple(student_random().sample(range(2, 60), 3))
