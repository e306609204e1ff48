"""Decode steps that are a single launch: what the CPU does around the persistent megakernel.

As a graph such a step was five small things beside one long: a copy of the input, a gather of the tokens, two sampler
kernels, two copies to the host. Each took the device a microsecond or two, and each border between copies and kernels
two to three more. Here two are left, the copy of the input and the kernel:

* The kernel finds its tokens itself, in `last_tokens`, and leaves there what it has sampled.
* It writes them to the host's memory too, over the bus, with the word that says whether the step is valid.

A single kernel needs no graph: launching it is one call, and its arguments may be other ones each time. But the GPU may
be waiting for that call, so all that can be made once is: memory, its views, events.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stage_d_paged.kv_cache import KVCache
from stage_f_graph_tp.megakernel import MEGAKERNEL_ROWS, Megakernel
from stage_f_graph_tp.step_input import StepInput, StepShape


class StepOutput(NamedTuple):
    """What a step leaves behind. The host's part is there once `arrived` has come."""

    logits: Tensor  # float32 [rows, vocab], on the device
    result: Tensor  # int64 [rows + 1], on the host: the next two together
    ids: Tensor  # int64 [rows]: the tokens
    failure: Tensor  # int64 []: what `Megakernel.check` wants
    arrived: torch.cuda.Event | None  # None on a CPU


class MegakernelSteps:
    """Launches decode steps of the megakernel, of up to `MEGAKERNEL_ROWS` requests. At most two may be under way.

    Args:
        kernel: of the whole model.
        kv_cache: the pool.
        last_tokens: int64 [batch slots], each slot's last sampled token.
    """

    def __init__(self, kernel: Megakernel, kv_cache: KVCache, last_tokens: Tensor) -> None:
        self.kernel = kernel
        self._kv_cache, self._last_tokens = kv_cache, last_tokens
        logits = kernel.make_logits(MEGAKERNEL_ROWS)
        # Two, used in turn: while a step runs, the host reads the tokens of the one before. By number of rows.
        self._outputs = [self._make_outputs(logits) for _ in range(2)]

    def _make_outputs(self, logits: Tensor) -> dict[int, StepOutput]:
        arrived = torch.cuda.Event() if logits.is_cuda else None
        outputs = {}
        for rows in range(1, MEGAKERNEL_ROWS + 1):
            result = self.kernel.make_result(rows)
            outputs[rows] = StepOutput(logits[:rows], result, result[:-1], result[-1], arrived)
        return outputs

    def takes(self, shape: StepShape) -> bool:
        """Whether a step of this shape can be one launch."""
        return shape.num_decodes == shape.num_seqs <= MEGAKERNEL_ROWS

    def launch(self, rows: int, inputs: StepInput) -> StepOutput:
        """Launch a step of `rows` requests on an input that is on the device by then."""
        self._outputs.reverse()
        output = self._outputs[0][rows]
        self.kernel.step(
            self._last_tokens, inputs.batch_slots, inputs.positions, inputs.slot_mapping, inputs.block_tables,
            inputs.context_lens, inputs.temperatures, inputs.noise_keys, self._kv_cache.tensor, output.logits,
            output.result,
        )  # fmt: skip
        if output.arrived is not None:
            output.arrived.record()
        return output
