"""CUDA graphs: the launches of a decode step recorded once and replayed as one.

A decode step is a few hundred kernels of a few microseconds each, and launching a kernel from Python takes about as
long as running it. A CUDA graph is a recorded list of launches with all their arguments. Replaying it costs one launch,
and its kernels follow each other within about a microsecond.

A recording fixes addresses, grid sizes and the number of rows. So

* inputs are stored at fixed addresses, and a step copies its input there before the replay;
* there is a graph for each of the *capture sizes*, and a batch is padded up to the next one. Padding rows have a
  context of 0 and slot -1, so that they neither read nor write KV, and share a spare batch slot, where their tokens do
  no harm. Steps with prefill have other graphs (`prefill_graphs.py`). A step with more decodes than the largest size
  runs in one of those graphs, or eagerly if none fits;
* lengths, positions and block tables are read from device memory, so one graph serves every step of its size.

All graphs share one memory pool: they never run at the same time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.entrypoints.progress import progress_bar
from stage_f_graph_tp.forward import StepHead, StepOutput
from stage_f_graph_tp.step_input import StepBuffers, StepInput, StepShape, TokenSource

LARGEST_GRAPH = 512
NOTHING = StepShape(0, 0, 0, 0, 0, 0, 0)  # a step of padding only


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: small ones close together, then every 16, up to `max_num_seqs` or 512."""
    top = min(max_num_seqs, LARGEST_GRAPH)
    sizes = [size for size in (1, 2, 4, 8) if size < top] + list(range(16, top, 16))
    return [*sizes, top]


@dataclass(frozen=True)
class Recorded:
    """A recorded list of launches that can be replayed."""

    replay: Callable[[], object]
    result: StepOutput


Body = Callable[[], StepOutput]
Recorder = Callable[[Body], Recorded]
Compute = Callable[[StepInput[Tensor], StepShape], StepOutput]  # computes the layers, which come before the head


class GraphRecorder:
    """Records with CUDA graphs into one shared memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, body: Body) -> Recorded:
        # Run it once without recording: compiling kernels and allocating library workspaces cannot be recorded.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = body()
        return Recorded(graph.replay, result)


class StepGraphs:
    """Recorded steps, one for each of a few shapes.

    Args:
        name: names the recorded work in the report.
        shapes: ascending by size.
    """

    def __init__(self, name: str, shapes: list[StepShape]) -> None:
        self.name = name
        self.shapes = shapes
        self._recorded: dict[StepShape, Recorded] = {}
        self.num_bytes = 0  # device memory that the graphs take

    def capture(self, record: Recorder, body_of: Callable[[StepShape], Body], device: torch.device) -> None:
        """Record every shape, the largest first, so that smaller graphs reuse its memory."""
        before = _used_bytes(device)
        shapes = progress_bar(reversed(self.shapes), desc="capture CUDA graphs", total=len(self.shapes), unit="graph")
        for shape in shapes:
            self._recorded[shape] = record(body_of(shape))
        self.num_bytes = _used_bytes(device) - before

    def record_steps(
        self, record: Recorder, buffers: StepBuffers, compute: Compute, head: StepHead, device: torch.device
    ) -> str:
        """Record every shape, using the parts that run it without a graph; returns a line about memory and time."""
        start = time.perf_counter()
        self.capture(record, lambda shape: self.body(shape, buffers, compute, head), device)
        seconds, size = time.perf_counter() - start, self.num_bytes / 2**20
        return f"CUDA graphs: {len(self.shapes)} for {self.name}, {size:.0f} MiB, {seconds:.1f} s"

    def body(self, shape: StepShape, buffers: StepBuffers, compute: Compute, head: StepHead) -> Body:
        """Return the function to record for a shape. During the recording its input is padding only."""
        raise NotImplementedError

    @property
    def is_recorded(self) -> bool:
        return bool(self._recorded)


class DecodeGraphs(StepGraphs):
    """Recorded decode steps, one per capture size: a forward from the embedding to the sampled tokens.

    Args:
        sizes: batch sizes, ascending.
        table_width: columns of the block tables, enough for `max_model_len`.
        max_model_len: the longest context.
        padding_slot: the batch slot of padding rows.
        source: a `TokenSource`, where the decodes' tokens come from; it takes no steps with another source.
        name: names the steps in the report.
    """

    def __init__(
        self,
        sizes: list[int],
        table_width: int,
        max_model_len: int,
        padding_slot: int,
        source: int = TokenSource.DEVICE,
        name: str = "decode",
    ) -> None:
        self._sizes = sizes
        self._padding_slot = padding_slot
        self._source = source
        rest = 1, max_model_len, source  # of a shape: a token per sequence
        super().__init__(name, [StepShape(size, size, size, table_width, size, *rest) for size in sizes])

    def takes(self, shape: StepShape) -> StepShape | None:
        """Return the recorded shape that can run `shape`; None if there is none."""
        if shape.num_decodes != shape.num_seqs or shape.source != self._source or shape.num_seqs > self._sizes[-1]:
            return None
        return self.shapes[bisect_left(self._sizes, shape.num_seqs)]

    def pad(self, host: StepInput, exact: StepShape) -> None:
        """Pad the rows that `exact` leaves unfilled."""
        count = exact.num_seqs
        host.input_ids[count:] = 0
        host.positions[count:] = 0
        host.slot_mapping[count:] = -1
        host.batch_slots[count:] = self._padding_slot
        host.sample_slots[count:] = self._padding_slot
        host.sample_tokens[count:] = 0
        host.cu_seqlens_q[:] = np.arange(len(host.cu_seqlens_q))
        host.context_lens[count:] = 0
        host.sampling.temperatures[count:] = 0
        host.sampling.noise_keys[count:] = 0
        host.sampling.rules[count:] = 0
        host.block_tables[count:] = -1

    def padding(self, buffers: StepBuffers, shape: StepShape) -> StepInput[Tensor]:
        """Return a device input of this shape that is padding only, for recording."""
        self.pad(buffers.next_host(shape), NOTHING)
        return buffers.send()

    def body(self, shape: StepShape, buffers: StepBuffers, compute: Compute, head: StepHead) -> Body:
        """Return the decode step to record for this shape: the layers, the LM head, the sampler."""
        inputs = self.padding(buffers, shape)
        return lambda: head.sample(compute(inputs, shape), inputs, shape)

    def run(self, inputs: StepInput[Tensor], shape: StepShape, needs: int) -> StepOutput:
        """Replay a step."""
        recorded = self._recorded[shape]
        recorded.replay()
        return recorded.result


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # cached memory does not count as used; recording empties the cache too
    return torch.cuda.memory_reserved(device)
