"""Decode steps that are a single launch: what the CPU does around the persistent megakernel.

A step is a copy of the input and one kernel. Around stage D's layers there would be more: a gather of the tokens, the
sampler's kernels, copies to the host, and the GPU loses time at every border between a copy and a kernel. Here the
kernel does all that:

* It reads each row's token from `last_tokens`, and writes there the token that it has sampled.
* It writes the tokens to the host's memory too, over the bus, with the word that says whether the step is valid.

A single kernel needs no CUDA graph: launching it is one call, whose arguments may change from step to step. But the GPU
may be waiting for that call, so whatever is the same in every step is made once: memory, its views, events.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stage_d_paged.kv_cache import KVCache
from stage_f_graph_tp.megakernel import Megakernel, most_rows
from stage_f_graph_tp.step_input import StepInput, StepShape


class StepOutput(NamedTuple):
    """A step's results. What is on the host may be read once the event `arrived` has happened."""

    logits: Tensor  # float32 [rows, vocab], on the device
    result: Tensor  # int64 [rows + 1], on the host: the next two together
    ids: Tensor  # int64 [rows]: the tokens
    failure: Tensor  # int64 []: for `Megakernel.check`
    arrived: torch.cuda.Event | None  # None on a CPU


class MegakernelSteps:
    """Launches decode steps of the megakernel, of up to `most_rows` requests. At most two may be under way.

    Args:
        kernel: the model's megakernel.
        kv_cache: the pool of keys and values.
        last_tokens: int64 [batch slots], each slot's last sampled token.
    """

    def __init__(self, kernel: Megakernel, kv_cache: KVCache, last_tokens: Tensor) -> None:
        self.kernel, self.most_rows = kernel, most_rows(kernel.config)
        self._kv_cache, self._last_tokens = kv_cache, last_tokens
        self._logits = kernel.make_logits(self.most_rows)  # of every step
        # By number of rows, and twice, used in turn: while a step runs, the host reads the tokens of the one before.
        self._outputs = [self._make_outputs() for _ in range(2)]

    def _make_outputs(self) -> dict[int, StepOutput]:
        arrived = torch.cuda.Event() if self._logits.is_cuda else None
        outputs = {}
        for rows in range(1, self.most_rows + 1):
            result = self.kernel.make_result(rows)
            outputs[rows] = StepOutput(self._logits[:rows], result, result[:-1], result[-1], arrived)
        return outputs

    def takes(self, shape: StepShape) -> bool:
        """Whether a step of this shape can be one launch."""
        return shape.num_decodes == shape.num_seqs <= self.most_rows

    def launch(self, rows: int, inputs: StepInput) -> StepOutput:
        """Launch a step of `rows` requests on an input that is on the device by then."""
        self._outputs.reverse()
        output = self._outputs[0][rows]
        self.kernel.step(
            self._last_tokens,
            inputs.batch_slots,
            inputs.positions,
            inputs.slot_mapping,
            inputs.block_tables,
            inputs.context_lens,
            inputs.sampling.temperatures,
            inputs.sampling.noise_keys,
            self._kv_cache.tensor,
            output.logits,
            output.result,
        )
        if output.arrived is not None:
            output.arrived.record()
        return output
