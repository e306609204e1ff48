"""Run a step: inputs -> forward -> head and sampler -> tokens copied to the host.

    inputs             which rows, at which positions, in which blocks: one copy    (input_batch.py, step_input.py)
    forward            the first of an ordered list that takes the step's shape    (forward.py)
    head and sampler   the outputs that the forward did not produce                (head.py)

On several ranks `execute` sends the step to the others first (ranks.py).

`launch` enqueues a step's work and returns at once: a sampled token stays on the device, where the next step reads it,
and `InFlight.wait` fetches the host's copy when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stage_e_batching.parts import InFlight
from stage_e_batching.sampler import Sampler
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.cuda_graph import DecodeGraphs, Recorder
from stage_f_graph_tp.forward import Forward, Layers, Run, StepHead
from stage_f_graph_tp.head import NOTHING_SAMPLED
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.megakernel_steps import MegakernelSteps
from stage_f_graph_tp.prefill_graphs import PrefillGraphs, make_graphs
from stage_f_graph_tp.step_input import StepBuffers, StepShape


class StepRunner:
    """Runs steps, each by the first forward that takes its shape.

    Args:
        batch: builds a step's input.
        buffers: the input's memory, here and on the device.
        sampler: knows what each request asks for.
        layers: the forward that takes every step.
        head: what follows a forward.
        forwards: tried before all others.
        graphs: recorded along with those of decodes and prefill.
    """

    def __init__(
        self,
        batch: InputBatch,
        buffers: StepBuffers,
        sampler: Sampler,
        layers: Layers,
        head: StepHead,
        forwards: Sequence[MegakernelSteps] = (),
        graphs: Sequence[DecodeGraphs] = (),
    ) -> None:
        self.model, self.kv_cache = layers.model, layers.kv_cache
        self.batch, self.buffers, self.sampler = batch, buffers, sampler
        self.layers, self.head = layers, head
        self._first, self._graphs = list(forwards), list(graphs)
        self.forwards: list[Forward] = [*self._first, layers]
        self._last: InFlight = NOTHING_SAMPLED  # the last launched step

    def launch(self, step: ScheduledStep) -> InFlight:
        """Register admitted sequences; launch the step's work, if any, and the copy of its tokens to the host."""
        for sequence in step.admitted:
            self.sampler.admit(sequence)
        self.batch.update(step)
        if not step.sequences:
            return NOTHING_SAMPLED
        exact = self.batch.shape_of(step)
        forward, shape = self.choose_forward(exact)
        host = self.buffers.next_host(shape)
        if shape is not exact:
            forward.pad(host, exact)
        generated = self.batch.fill(step, host)
        sample_slots = host.sample_slots[: exact.num_samples]
        needs = self.sampler.fill(sample_slots, generated, host.sampling)
        self._last = self.execute(forward.run, shape, sample_slots, needs)
        return self._last

    def choose_forward(self, exact: StepShape) -> tuple[Forward, StepShape]:
        """Choose the forward that runs a step of this shape, and the shape in which it runs."""
        for forward in self.forwards:
            if (shape := forward.takes(exact)) is not None:
                return forward, shape
        raise AssertionError("the layers take every step")

    @torch.inference_mode()
    def execute(self, run: Run, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        """Run a step on the device: copy its input there, run the model, sample the tokens."""
        inputs = self.buffers.send()
        output = run(inputs, shape, needs)
        return self.head.finish(output, inputs, shape, sample_slots, needs)

    @torch.inference_mode()
    def capture(self, record: Recorder, sizes: list[int], prefills: Sequence[int] = ()) -> list[str]:
        """Record decode steps of these numbers of sequences; prefill steps of these numbers of tokens when needed.

        Returns:
            a line per kind of step.
        """
        launched = max((first.most_rows for first in self._first), default=0)  # these need no graph
        rest = [size for size in sizes if size > launched]
        decode, prefill = make_graphs(self.batch, self.layers.tokens, rest, list(prefills))
        decodes = [*([decode] if rest else []), *(self._graphs if sizes else [])]
        behind = [*decodes, *([prefill] if prefills else [])]
        recorded: list[MegakernelSteps | DecodeGraphs | PrefillGraphs] = [*(self._first if sizes else []), *behind]
        lines = self.head.prepare([shape for graphs in decodes for shape in graphs.shapes], record)
        parts = self.buffers, self.layers.run, self.head, self.layers.tokens.by_slot.device
        # The largest first: the others reuse their memory.
        lines += [forward.record_steps(record, *parts) for forward in reversed(recorded)]
        self.forwards = [*self._first, *behind, self.layers]
        return lines

    def release(self) -> None:
        """Release the graphs. The runner cannot be used any more."""
        self.forwards = [self.layers]
        self._first, self._graphs, self._last = [], [], NOTHING_SAMPLED
        self.head.release()

    def forget(self) -> None:
        """Wait for all steps in flight, and drop them. May be called at any moment, and twice."""
        self.head.discard(self._last)
