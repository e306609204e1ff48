"""What a stage does with a step: its layers at once, and on stage 0 the LM head and the sampler when the states return.

Rank 0 sends every step's packed input to all ranks, as in stage F, and each runs its part of it in the order in which
the steps were launched. A step's tokens are sampled when the engine asks for it: only then does stage 0 receive the
last stage's hidden states. What the sampler needs of the step's input is kept until then, because the buffer on the
device belongs to the next step already.

Each stage records CUDA graphs of its own layers, for decode steps and for steps with prefill, and stage 0 also of the
LM head and the sampler. Messages are received before a replay and sent after it: what is recorded reads and writes
fixed addresses, but NCCL's calls stay outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from beyond.scale_out.links import StageLinks
from beyond.scale_out.options import ScaleOutOptions
from beyond.scale_out.spans import Spans
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.parts import Sampled
from stage_e_batching.sampler import Sampler
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.async_runner import InFlight
from stage_f_graph_tp.cuda_graph import Body, Recorded, Recorder, StepGraphs
from stage_f_graph_tp.rank_runner import RELEASE_SECONDS, RankRunner
from stage_f_graph_tp.step_input import StepBuffers, StepInput, StepShape, largest_input
from stage_f_graph_tp.tensor_parallel import RankGroup, Workers

SAMPLE = b"sample"  # the command to sample the oldest step, for the other ranks of stage 0


class Unsampled(NamedTuple):
    """A step on its way through the stages, and what its rows need of the sampler."""

    number: int  # of its command
    shape: StepShape  # without block tables
    sample_slots: np.ndarray
    needs: int
    data: bytes  # the packed input, without block tables


class PipelineRunner(RankRunner):
    """Runs this stage's layers of every step.

    Args:
        runtime, kv_cache, sampler, options: as in `RankRunner`, of this stage.
        group: the ranks of this stage.
        workers: rank 0's handle on all others; None on the others.
        links: to the neighbouring stages.
    """

    def __init__(
        self,
        runtime: Runtime,
        kv_cache: KVCache,
        sampler: Sampler,
        options: ScaleOutOptions,
        group: RankGroup,
        workers: Workers | None,
        links: StageLinks,
    ) -> None:
        self.links = links
        self._unsampled: deque[Unsampled] = deque()  # on stage 0, oldest first
        self.head_graphs: StepGraphs | None = None  # on stage 0, of the LM head and the sampler
        size = largest_input(options.max_num_batched_tokens, options.max_num_seqs + 1, 0)
        self._head_buffers = StepBuffers(size, runtime.device)
        # To the runner, `fused` means the megakernel, which is a whole model's; the fused layers are there already.
        super().__init__(runtime, kv_cache, sampler, replace(options, fused=False), group, workers)
        if options.trace and group.rank == 0:
            links.spans = Spans(f"{options.trace}.stage{links.stage}", runtime.device)

    # ---- graphs ------------------------------------------------------------------------------------------------

    def most_decodes(self, options: ScaleOutOptions) -> int:
        return -(-options.max_num_seqs // options.batches_in_flight)

    @torch.inference_mode()
    def capture(self, record: Recorder, sizes: list[int], prefills: Sequence[int] = ()) -> None:
        super().capture(record, sizes, prefills)
        if self.links.stage == 0:
            assert self.graphs is not None
            heads = StepGraphs([_without_tables(shape) for shape in self.graphs.shapes])
            self._capture(record, heads, "the LM head and the sampler", self._head_body)
            self.head_graphs = heads

    def _decode(self, inputs: StepInput, shape: StepShape) -> Tensor:
        """Run this stage's layers: what a decode graph is of."""
        return self.forward(inputs, shape)

    def _head_body(self, shape: StepShape) -> Body:
        """Return the sampling of a decode step's states, on inputs that are all padding while it is recorded."""
        assert self.graphs is not None
        self.graphs.pad(self._head_buffers.next_host(shape), 0)
        inputs = self._head_buffers.send(shape)
        return lambda: self.sample_and_keep(self.links.states[: shape.num_samples], inputs, shape)

    def _report(self, line: str) -> None:
        super()._report(f"stage {self.links.stage}: {line}")

    # ---- a step ------------------------------------------------------------------------------------------------

    def launch(self, step: ScheduledStep) -> Returning:
        """Send a step to all stages and run this one's layers; `sample` samples its tokens."""
        super().launch(step)
        return Returning(None, runner=self if any(step.samples) else None)

    def execute(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        return self._run_layers(lambda inputs: self.forward(inputs, shape), shape, sample_slots, needs)

    def _replay(self, recorded: Recorded, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        def run(inputs: StepInput) -> Tensor:
            recorded.replay()
            return recorded.result

        return self._run_layers(run, shape, sample_slots, needs)

    @torch.inference_mode()
    def _run_layers(
        self, run: Callable[[StepInput], Tensor], shape: StepShape, sample_slots: np.ndarray, needs: int
    ) -> InFlight:
        """Run this stage's layers, and hand on what comes of them. Hidden states of padding rows are sent too."""
        inputs, links, count = self.buffers.send(shape), self.links, len(sample_slots)
        if links.stage > 0:
            links.receive(shape.num_tokens, self._number)
        elif links.spans:
            links.spans.begin()
        hidden = run(inputs)
        self._end_span("layers", shape.num_tokens, self._number)
        if not links.is_last:
            links.send(hidden.clone(), self._number)  # the next step writes over it
        elif count:
            links.send(hidden.index_select(0, inputs.sample_tokens[:count]), self._number)
        if count and links.stage == 0:
            shape = _without_tables(shape)
            data = self.buffers.packed(shape)
            self._unsampled.append(Unsampled(self._number, shape, sample_slots.copy(), needs, data))
        return InFlight(None)

    def execute_command(self, message: bytes) -> None:
        """Execute what rank 0 sent: a step, or the sampling of the oldest one."""
        if message != SAMPLE:
            super().execute_command(message)
            return
        self.begin_command()
        if self.links.stage == 0:
            self._sample(self._unsampled.popleft())

    def sample_oldest(self) -> InFlight:
        """Launch the sampling of the oldest step that has no tokens yet; rank 0 calls it.

        Raises:
            WorkerError: a rank died or failed.
        """
        with self.in_step(SAMPLE if self.group.size > 1 else None):
            sampled = self._sample(self._unsampled.popleft())  # in here: an interrupt must not take a step away
        return self.watched(sampled)

    def forget(self) -> None:
        """Receive what is on its way, so that the stages stay in step, and drop it."""
        for _ in range(len(self._unsampled)):
            with suppress(Exception):  # what fails here was reported before, or will be at the next step
                self.sample_oldest().wait()

    def release(self) -> None:
        self.head_graphs = None
        super().release()
        for link in self.links.links:
            link.wait_released(RELEASE_SECONDS)

    @torch.inference_mode()
    def _sample(self, step: Unsampled) -> InFlight:
        """Receive the hidden states of a step's last tokens and sample, by a replay or eagerly."""
        number, shape, sample_slots, needs, data = step
        self._head_buffers.unpack(data)
        inputs = self._head_buffers.send(shape)
        hidden = self.links.receive(len(sample_slots), number)
        graphs = self.head_graphs
        if recorded := graphs and graphs.find(shape):
            recorded.replay()
            result = recorded.result
        else:
            result = self.sample_and_keep(hidden, inputs, shape)
        fetched = self.fetch_result(result, inputs, shape, sample_slots, needs)
        self._end_span("head", len(sample_slots), number)
        return fetched

    def _end_span(self, work: str, tokens: int, step: int) -> None:
        if self.links.spans:
            self.links.spans.end(step=step, work=work, tokens=tokens)


@dataclass(frozen=True)
class Returning(InFlight):
    """A step whose hidden states are on their way back to stage 0."""

    runner: PipelineRunner | None = None  # None: nothing samples in this step

    def sample(self) -> InFlight:
        """Launch the sampling of the tokens; call it once, for the oldest step."""
        return InFlight(None) if self.runner is None else self.runner.sample_oldest()

    def wait(self) -> Sampled:
        return self.sample().wait()


def _without_tables(shape: StepShape) -> StepShape:
    """Return a step's shape without block tables, which come last: the arrays before them keep their offsets."""
    return shape._replace(table_width=0)
