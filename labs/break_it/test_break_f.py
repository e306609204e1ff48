"""Break it, lab F: answers that share one old block turn to nonsense with CUDA graphs, and are correct without them.

It happens only when the number of requests is not one of the captured sizes. `cuda_graph.py` of the broken engine
differs from the reference by one number. Write a test that passes with the reference and fails with the broken one; it
needs no GPU.
"""

import numpy as np

from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.step_input import StepInput, StepShape, host_views


def graph_input(size: int) -> tuple[DecodeGraphs, StepInput]:
    """Return the graphs for batch size `size` alone, and the host arrays of its input with the data of an old step."""
    graphs = DecodeGraphs([size], table_width=2, max_model_len=8, padding_slot=size)
    shape = StepShape(size, size, size, 2, size, 1, 8)
    return graphs, host_views(np.full(shape.num_bytes, 3, np.uint8), shape)


def test_a_batch_of_3_in_a_graph_of_4():
    """A batch of 3 in a graph of 4: the fourth row may neither read nor write the pool."""
    graphs, host = graph_input(4)
    graphs.pad(host, StepShape(3, 3, 3, 2, 3, 1, 8))
    assert host.slot_mapping[3] == -1, "its key and value must go nowhere"
    assert host.context_lens[3] == 0, "it must read no key"
    assert host.batch_slots[3] == host.sample_slots[3] == 4, "its token must go to the padding slot"
