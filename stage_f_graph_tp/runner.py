"""The runner of a step: inputs -> forward -> head and sampler -> tokens on their way to the host.

    inputs             which rows, at which positions, in which blocks: one copy    (input_batch.py, step_input.py)
    forward            the first of an ordered list that takes the step's shape    (forward.py)
    head and sampler   what the forward has not made                               (head.py)
    placement          this process alone, or several ranks that all execute the step (ranks.py)

`launch` enqueues a step's work and returns at once: a sampled token stays on the device, where the next step reads it,
and `InFlight.wait` fetches the host's copy when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stage_e_batching.sampler import Sampler
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.cuda_graph import DecodeGraphs, Recorder, decode_shape
from stage_f_graph_tp.forward import Forward, Layers
from stage_f_graph_tp.head import Head, InFlight
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.megakernel_steps import MegakernelSteps
from stage_f_graph_tp.prefill_graphs import PrefillGraphs
from stage_f_graph_tp.step_input import StepBuffers, StepShape


class Local:
    """The placement of one process on one device. That of several ranks is `ranks.Ranks`."""

    def execute(self, run: Callable[[], Any], *step: Any) -> Any:
        """Execute a step here, by `run`; other placements send it, from `step`, to the other ranks first."""
        return run()


class StepRunner:
    """Runs steps, each by the first forward that takes its shape.

    Args:
        batch: builds a step's input.
        buffers: the input's memory, here and on the device.
        sampler: knows what each request asks for.
        layers: the forward that takes every step.
        head: what follows a forward.
        placement: where steps are executed.
        forwards: tried in front of all others.
        graphs: recorded with the graphs of decodes and prefill.
    """

    def __init__(
        self,
        batch: InputBatch,
        buffers: StepBuffers,
        sampler: Sampler,
        layers: Layers,
        head: Head | Any,
        placement: Any = None,
        forwards: Sequence[MegakernelSteps] = (),
        graphs: Sequence[DecodeGraphs] = (),
    ) -> None:
        self.model, self.kv_cache = layers.model, layers.kv_cache
        self.batch, self.buffers, self.sampler = batch, buffers, sampler
        self.layers, self.head = layers, head
        self.placement = placement or Local()
        self._first, self._graphs = list(forwards), list(graphs)
        self.forwards: list[Forward] = [*self._first, layers]
        self._last: Any = InFlight(None)  # the step that was launched last

    def launch(self, step: ScheduledStep) -> Any:
        """Launch a step's work and the copy of its tokens to the host: an `InFlight`, or what the head makes of it."""
        self.admit(step)
        if not step.sequences:
            return InFlight(None)
        exact = self.batch.shape_of(step)
        forward, shape = self.choose_forward(exact)
        host = self.buffers.next_host(shape)
        if shape is not exact:
            forward.pad(host, exact)
        generated = self.batch.fill(step, host)
        count = exact.num_samples
        sample_slots = host.sample_slots[:count]
        needs = self.sampler.fill(sample_slots, generated, host.sampling.first(count))
        run = partial(self.execute, forward, shape, sample_slots, needs)
        self._last = self.placement.execute(run, shape, count, needs, self.buffers)
        return self._last

    def admit(self, step: ScheduledStep) -> None:
        """Record the admitted sequences and the block tables that have grown."""
        for sequence in step.admitted:
            self.sampler.admit(sequence)
        self.batch.update(step)

    def choose_forward(self, exact: StepShape) -> tuple[Forward, StepShape]:
        """Choose what runs a step of this shape, and in which shape."""
        for forward in self.forwards:
            if (shape := forward.takes(exact)) is not None:
                return forward, shape
        raise AssertionError("the layers take every step")

    @torch.inference_mode()
    def execute(self, forward: Forward, shape: StepShape, sample_slots: np.ndarray, needs: int) -> Any:
        """Do the device's part of a step: send what was filled in, run the model, sample the tokens."""
        inputs = self.buffers.send(shape)
        output = forward.run(inputs, shape, needs)
        return self.head.finish(output, inputs, shape, sample_slots, needs)

    @torch.inference_mode()
    def capture(self, record: Recorder, sizes: list[int], prefills: Sequence[int] = ()) -> list[str]:
        """Record a decode step for each of these numbers of sequences, and steps with prefill for these of tokens.

        Returns:
            a line about each kind of steps.
        """
        tokens, limits = self.layers.tokens, (self.batch.max_blocks, self.batch.max_model_len)
        shapes = [decode_shape(size, *limits) for size in sizes]
        rest = [shape.num_seqs for shape in shapes if not any(first.takes(shape) for first in self._first)]
        decodes = [DecodeGraphs(rest, *limits, tokens.num_slots)] if rest else []
        decodes += self._graphs if sizes else []
        prefill = [PrefillGraphs(list(prefills), tokens.num_slots, *limits, tokens)] if prefills else []
        recorded: list[Any] = [*(self._first if sizes else []), *decodes, *prefill]
        lines = self.head.prepare([shape for graphs in decodes for shape in graphs.shapes], record)
        parts = self.buffers, self.layers.run, self.head, self.layers.tokens.by_slot.device
        # Those of prefill first: the larger ones, into whose memory the others fit.
        lines += [forward.record_steps(record, *parts) for forward in reversed(recorded)]
        self.forwards = [*self._first, *decodes, *prefill, self.layers]
        return lines

    def release(self) -> None:
        """Release the graphs. The runner cannot be used any more."""
        self.forwards = [self.layers]
        self._first, self._graphs, self._last = [], [], InFlight(None)
        self.head.release()

    def forget(self) -> None:
        """Wait for what is under way, and drop it; at any moment, and twice."""
        self.head.discard(self._last)
