"""Decode steps in a single launch: the CPU side of the persistent megakernel.

A step is a copy of the input and one kernel. With stage D's layers there would be more: a gather of the tokens, the
sampler's kernels, copies to the host; and the GPU loses time between each copy and kernel. Here the kernel does all of
that:

* It reads each row's token from `last_tokens`, and writes the sampled token back.
* It also writes the tokens to host memory, over the bus, with a word that says whether the step is valid.

A single kernel needs no CUDA graph: launching it is one call, whose arguments may change from step to step. The GPU may
be waiting for that call, so everything that is the same in every step is made once: memory, views, events.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stage_d_paged.kv_cache import KVCache
from stage_e_batching.sampler import RANDOM
from stage_f_graph_tp.cuda_graph import Compute, DecodeGraphs, Recorder
from stage_f_graph_tp.forward import StepHead, StepOutput
from stage_f_graph_tp.last_tokens import Tokens
from stage_f_graph_tp.megakernel import Megakernel, most_rows
from stage_f_graph_tp.step_input import StepBuffers, StepInput, StepShape, TokenSource


class Launch(NamedTuple):
    """The results of a launch. Those on the host may be read once the event `arrived` has happened."""

    logits: Tensor  # float32 [rows, vocab], on the device
    result: Tensor  # int64 [rows + 1], on the host: the tokens, and the word that says whether they are valid
    arrived: torch.cuda.Event | None  # None on a CPU
    sampled: StepOutput  # with the kernel's tokens, for greedy or temperature-only rows
    scored: StepOutput  # with the logits only


class MegakernelSteps:
    """A forward for decodes of a few requests: one launch. At most two may be in flight.

    The kernel samples for greedy or temperature-only requests. For others the sampler runs after it, in a graph if one
    was recorded.

    Args:
        kernel: compiled for the model.
        kv_cache: the pool of keys and values.
        tokens: each batch slot's last sampled token.
        table_width, max_model_len: as of `DecodeGraphs`.
    """

    def __init__(
        self, kernel: Megakernel, kv_cache: KVCache, tokens: Tokens, table_width: int, max_model_len: int
    ) -> None:
        self.kernel, self.most_rows = kernel, min(most_rows(kernel.config), tokens.num_slots)
        self._kv_cache, self._last_tokens = kv_cache, tokens.by_slot
        sizes = list(range(1, self.most_rows + 1))
        name = "the sampler after the megakernel"
        self._samplers = DecodeGraphs(sizes, table_width, max_model_len, tokens.num_slots, name=name)
        self._logits = kernel.make_logits(self.most_rows)  # used by every step
        # Two per number of rows, used in turn: while a step runs, the host reads the tokens of the previous one.
        self._launches = [self._make_launches() for _ in range(2)]

    def _make_launches(self) -> dict[int, Launch]:
        arrived = torch.cuda.Event() if self._logits.is_cuda else None
        launches = {}
        for rows in range(1, self.most_rows + 1):
            logits, result = self._logits[:rows], self.kernel.make_result(rows)
            ids, check = result[:-1], partial(self._check, result[-1], arrived)
            sampled = StepOutput(logits=logits, kept=ids, check=check, is_on_host=True)
            launches[rows] = Launch(logits, result, arrived, sampled, StepOutput(logits=logits, check=check))
        return launches

    def _check(self, failure: Tensor, arrived: torch.cuda.Event | None) -> None:
        """Wait for a step, and raise if a wait between its blocks timed out: its tokens are invalid then."""
        if arrived is not None:
            arrived.synchronize()
        self.kernel.check(failure)

    def takes(self, shape: StepShape) -> StepShape | None:
        """Accept steps of a few decodes whose tokens are on the device, with their shape unchanged."""
        few = shape.num_decodes == shape.num_seqs <= self.most_rows
        return shape if few and shape.source == TokenSource.DEVICE else None

    def pad(self, host: StepInput, exact: StepShape) -> None:
        """Do nothing: the input has no padding."""

    def run(self, inputs: StepInput[Tensor], shape: StepShape, needs: int) -> StepOutput:
        """Launch a step."""
        launch = self.launch(shape.num_seqs, inputs)
        if not needs & ~RANDOM:
            return launch.sampled
        if not self._samplers.is_recorded:
            return launch.scored
        graph = self._samplers.takes(shape)
        assert graph is not None
        return self._samplers.run(inputs, graph, needs)._replace(check=launch.sampled.check)

    def launch(self, rows: int, inputs: StepInput[Tensor]) -> Launch:
        """Launch a step of `rows` requests; its input must be on the device before the kernel runs."""
        self._launches.reverse()
        launch = self._launches[0][rows]
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
            launch.logits,
            launch.result,
        )
        if launch.arrived is not None:
            launch.arrived.record()
        return launch

    def record_steps(
        self, record: Recorder, buffers: StepBuffers, compute: Compute, head: StepHead, device: torch.device
    ) -> str:
        """Record the sampler that may run after the kernel; returns a line about it."""

        def scored(inputs: StepInput[Tensor], shape: StepShape) -> StepOutput:
            return StepOutput(logits=self._logits[: shape.num_seqs])

        for shape in self._samplers.shapes:
            # Launch a step of padding: the first launch loads the kernel, and no request should wait for that.
            self.launch(shape.num_seqs, self._samplers.padding(buffers, shape))
        return self._samplers.record_steps(record, buffers, scored, head, device)
