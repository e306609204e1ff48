"""The part after a stage's layers: send their states to the next stage; stage 0 samples when the states return.

Rank 0 sends every step's packed input to all ranks, as in stage F, and each runs its part in launch order. A step's
tokens are sampled when the engine asks for it: only then does stage 0 receive the last stage's hidden states. The
sampler's part of the input is kept until then, because the next step already uses the device buffer.

Each stage records CUDA graphs of its layers, for decode steps and for prefill steps, and stage 0 also of the LM head
and the sampler. Messages are received before a replay and sent after it: graphs read and write fixed addresses, but
NCCL's calls stay outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from beyond.scale_out.links import StageLinks
from beyond.scale_out.spans import Spans
from stage_e_batching.parts import InFlight, Sampled
from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.forward import StepOutput
from stage_f_graph_tp.head import NOTHING_SAMPLED
from stage_f_graph_tp.ranks import RankHead, Ranks
from stage_f_graph_tp.step_input import StepBuffers, StepInput, StepShape
from stage_f_graph_tp.tensor_parallel import RankGroup, Workers

SAMPLE = b"sample"  # the command to sample the oldest step, for the other ranks of stage 0


class Unsampled(NamedTuple):
    """A step on its way through the stages, and its input for the sampler."""

    number: int  # of its command
    shape: StepShape  # without block tables
    sample_slots: np.ndarray
    needs: int
    data: bytes  # the packed input, without block tables


class TimedRanks(Ranks):
    """A stage's ranks; the spans record when their commands begin.

    Args:
        group, workers: as of `Ranks`.
        spans: of this stage.
    """

    def __init__(self, group: RankGroup, workers: Workers | None, spans: Spans) -> None:
        super().__init__(group, workers)
        self._spans = spans

    def begin_command(self) -> None:
        super().begin_command()
        self._spans.begin()


class StageHead:
    """The part after the layers of a stage.

    Args:
        links: to the neighbouring stages.
        ranks: of this stage; they count the commands.
        buffers: have a step's input.
        head: on stage 0, the LM head and the sampler; None elsewhere.
        head_buffers: for the inputs, without block tables, of returning steps.
    """

    def __init__(
        self, links: StageLinks, ranks: Ranks, buffers: StepBuffers, head: RankHead | None, head_buffers: StepBuffers
    ) -> None:
        self.links, self.ranks = links, ranks
        self._buffers, self._head, self._head_buffers = buffers, head, head_buffers
        self._graphs: DecodeGraphs | None = None  # of the LM head and the sampler
        self._unsampled: deque[Unsampled] = deque()  # on stage 0, oldest first

    def prepare(self, shapes: list[StepShape], record: Callable) -> list[str]:
        """Record the LM head and the sampler for decode steps of these shapes, on stage 0."""
        if self._head is None or not shapes:
            return []
        self._head.prepare(shapes, record)
        sizes, longest = [shape.num_seqs for shape in shapes], shapes[-1].max_context_len
        slots, device = self._head.tokens.num_slots, self._head.device
        self._graphs = DecodeGraphs(sizes, 0, longest, slots, name="the LM head and the sampler")

        def received(inputs: StepInput[Tensor], shape: StepShape) -> StepOutput:
            return StepOutput(hidden=self.links.states[: shape.num_samples])

        return [self._graphs.record_steps(record, self._head_buffers, received, self._head, device)]

    def sample(self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape) -> StepOutput:
        """Return the step unchanged: its tokens are sampled when its states are back."""
        return output

    def finish(
        self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape, sample_slots: np.ndarray, needs: int
    ) -> Returning:
        """Send the layers' states on. States of padding rows are sent to the next stage, but not back to stage 0."""
        hidden, links, count, number = output.hidden, self.links, len(sample_slots), self.ranks.number
        assert hidden is not None
        self._end_span("layers", shape.num_tokens, number)
        if not links.is_last:
            links.send(hidden.clone(), number)  # the next step overwrites it
        elif count:
            links.send(hidden.index_select(0, inputs.sample_tokens[:count]), number)
        if count == 0 or self._head is None:
            return Returning(None, number)
        shape = shape._replace(table_width=0)  # the tables come last: the arrays before them keep their offsets
        self._unsampled.append(Unsampled(number, shape, sample_slots.copy(), needs, self._buffers.packed(shape)))
        return Returning(self, number)

    def is_oldest(self, number: int) -> bool:
        """Whether command `number` is the oldest step without tokens."""
        return bool(self._unsampled) and self._unsampled[0].number == number

    def sample_oldest(self) -> InFlight:
        """Launch the sampling of the oldest step without tokens; rank 0 calls it.

        Raises:
            WorkerError: a rank died or failed.
        """
        with self.ranks.in_step(SAMPLE if self.ranks.group.size > 1 else None):
            return self.sample_here()  # inside the block: an interrupt must not lose a step

    def discard(self, last: InFlight) -> None:
        """Receive and drop all states in flight, so that the stages stay in step."""
        for _ in range(len(self._unsampled)):
            with suppress(Exception):  # its error was reported before, or will be at the next step
                self.sample_oldest().wait()

    @torch.inference_mode()
    def sample_here(self) -> InFlight:
        """Receive the hidden states of the oldest step's last tokens and sample, by a replay or eagerly."""
        number, shape, sample_slots, needs, data = self._unsampled.popleft()
        head, graphs = self._head, self._graphs
        assert head is not None
        self._head_buffers.unpack(shape, data)
        inputs = self._head_buffers.send()
        hidden = self.links.receive(len(sample_slots), number)
        if graphs is not None and (recorded := graphs.takes(shape)) is not None:
            output = graphs.run(inputs, recorded, needs)
        else:
            output = head.sample(StepOutput(hidden=hidden), inputs, shape)
        sampled = head.finish(output, inputs, shape, sample_slots, needs)
        self._end_span("head", len(sample_slots), number)
        return sampled

    def release(self) -> None:
        """Release the graphs."""
        self._graphs = None

    def _end_span(self, work: str, tokens: int, step: int) -> None:
        if self.links.spans:
            self.links.spans.end(step=step, work=work, tokens=tokens)


@dataclass(frozen=True)
class Returning:
    """A step whose hidden states are on their way back to stage 0."""

    head: StageHead | None  # None: nothing samples in this step
    number: int  # of its command

    def sample(self) -> InFlight:
        """Launch the sampling of the oldest step, unless an interrupted call has sampled it already."""
        if self.head is None or not self.head.is_oldest(self.number):
            return NOTHING_SAMPLED
        return self.head.sample_oldest()

    def wait(self) -> Sampled:
        """Sample the step, and wait for its tokens."""
        return self.sample().wait()
