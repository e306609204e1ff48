"""Stage E's model runner with the CPU taken out: graphs for decode, fused kernels, several ranks.

Where there is a graph for a step, its input is padded to the graph's size, sent in one copy, and the whole step, from
the embedding to the drawn tokens, is one replay. Everything else (steps with prefill, batches above the ladder, a
machine without a GPU) goes stage E's way.

With several ranks, rank 0 prepares each step, sends its packed input to the others, and all execute it alike. Only
rank 0 draws tokens (it alone knows the requests); the drawn ids are broadcast on the device, inside the graph too.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stage_c_fused_mlp.extension import ExtensionError
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.engine import Sampled
from stage_e_batching.sampler import DRAWN, DrawnTokens
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.async_runner import AsyncModelRunner, InFlight
from stage_f_graph_tp.cuda_graph import Body, DecodeGraphs, DecodeResult, GraphRecorder, Recorded, Recorder, ladder
from stage_f_graph_tp.fused_decode import FusedDecode, why_unsupported
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.parallel import RankGroup
from stage_f_graph_tp.step_input import StepInput, StepShape
from stage_f_graph_tp.worker import Ranks, do_nothing, interrupts_held

FUSED_DECODE_ROWS = 2  # up to so many rows the one-launch step was measured faster than the layers in a graph
RELEASE_SECONDS = 10.0  # for NCCL to let go of its memory
STEP_SECONDS = 60.0  # a step that takes longer has ranks that wait for each other


@dataclass(frozen=True)
class StepCommand:
    """What rank 0 tells the others to execute."""

    shape: StepShape
    num_live: int  # sampling rows that are not padding
    needs: int  # what these rows need of the sampler
    data: bytes  # the packed input

    _HEADER = struct.Struct("<9q")

    def encode(self) -> bytes:
        return self._HEADER.pack(*vars(self.shape).values(), self.num_live, self.needs) + self.data

    @classmethod
    def decode(cls, message: bytes) -> StepCommand:
        """Raises `struct.error` or `ValueError` for what is no step."""
        *sizes, num_live, needs = cls._HEADER.unpack_from(message)
        shape, data = StepShape(*sizes), message[cls._HEADER.size :]
        if len(data) != shape.num_bytes:
            raise ValueError(f"a step of {shape.num_bytes} bytes came with {len(data)}")
        return cls(shape, num_live, needs, data)


class GraphModelRunner(AsyncModelRunner):
    """Runs steps on one rank.

    Args:
        runtime: the model, or this rank's share of it.
        kv_cache: its pool.
        options: which ideas are switched on, and the limits of a step.
        group: the ranks; None if there is one.
        ranks: rank 0's handle on the others; None elsewhere.
    """

    def __init__(
        self,
        runtime: Runtime,
        kv_cache: KVCache,
        options: GraphOptions,
        group: RankGroup | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(runtime, kv_cache, options.max_num_seqs, options.max_num_batched_tokens)
        self.group = group
        self.ranks = ranks
        self.graphs: DecodeGraphs | None = None
        self._draw_failed = False  # in this step, on rank 0
        self.fused_decode: FusedDecode | None = None
        self._is_cuda = runtime.device.type == "cuda"
        self._host_failure = torch.zeros(1, dtype=torch.int32, pin_memory=self._is_cuda)  # of the one-launch step
        self._max_model_len = runtime.max_model_len
        if options.fused and self._is_cuda:
            self.fused_decode = _fused_decode(runtime) if group is None else None
        if self._is_cuda and not options.enforce_eager:
            if runtime.backend.name == "reference":  # it asks the device for the longest context
                print("CUDA graphs: not used (attention_backend='reference' cannot be recorded)", file=sys.stderr)
            else:
                self.capture(GraphRecorder(runtime.device), ladder(options.max_num_seqs))

    # ---- graphs ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, record: Recorder, sizes: list[int]) -> None:
        """Record a decode step for each batch size; says how much memory that took."""
        padding_seat = len(self.last_tokens) - 1
        graphs = DecodeGraphs(sizes, self.batch.max_blocks, self._max_model_len, padding_seat)
        start = time.perf_counter()
        graphs.capture(record, lambda shape: self._decode_body(graphs, shape), self.device)
        self.graphs = graphs
        if self._is_cuda and (self.group is None or self.group.rank == 0):
            seconds = time.perf_counter() - start
            print(f"{len(sizes)} CUDA graphs: {graphs.num_bytes / 2**20:.0f} MiB, {seconds:.1f} s", file=sys.stderr)

    def _decode_body(self, graphs: DecodeGraphs, shape: StepShape) -> Body:
        """A decode step of this shape, on inputs that are all padding while it is recorded."""
        if self.ranks is not None:
            self.ranks.check()  # recording takes seconds, and a rank that died does not end it
        host = self.buffers.next_host(shape)
        graphs.pad(host, 0)
        inputs = self.buffers.send(shape)
        decode = self._decode_fused if self._takes_fused(shape.num_seqs) else self._decode_layers
        return lambda: decode(inputs, shape)

    def _takes_fused(self, rows: int) -> bool:
        return self.fused_decode is not None and rows <= FUSED_DECODE_ROWS

    def _decode_layers(self, inputs: StepInput, shape: StepShape) -> DecodeResult:
        hidden = self.forward(inputs, shape)
        logits = self.model.compute_logits(hidden)
        return DecodeResult(self._draw_plain(logits, inputs), hidden=hidden)

    def _decode_fused(self, inputs: StepInput, shape: StepShape) -> DecodeResult:
        torch.index_select(self.last_tokens, 0, inputs.seats, out=inputs.input_ids)
        logits = self.fused_decode.make_logits(shape.num_seqs)
        self.fused_decode.step(
            inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.block_tables, inputs.context_lens,
            self.kv_cache.tensor, logits,
        )  # fmt: skip
        return DecodeResult(self._draw_plain(logits, inputs), logits=logits)

    def _draw_plain(self, logits: Tensor, inputs: StepInput) -> Tensor:
        """Draw for rows that are greedy or at a plain temperature, from what the input says alone."""
        ids = self.sampler.draw_plain(logits, inputs.temperatures, inputs.noise_keys)
        if self.group is not None:
            self.group.broadcast(ids)
        self.last_tokens.index_copy_(0, inputs.sample_seats, ids)
        return ids

    # ---- a step ------------------------------------------------------------------------------------------------

    def launch(self, step: ScheduledStep) -> InFlight:
        """Order a step's work, on all ranks."""
        shape, host = self.prepare(step)
        if shape is None:
            return InFlight(None)
        seats = host.sample_seats
        needs = self.sampler.needs(seats) if len(seats) else 0
        if self.sampler.sampling_fn is not None:
            needs |= ~DRAWN
        if self.ranks is None:
            return self.execute_step(shape, seats, needs)
        command = StepCommand(shape, len(seats), needs, self.buffers.packed(shape))
        self._draw_failed = False
        with interrupts_held():
            self.ranks.send(command.encode())
            try:
                return WatchedInFlight(self.execute_step(shape, seats, needs), self.ranks)
            except BaseException as error:
                if not self._draw_failed:  # rank 0 left the step before its last collective: the others still wait
                    self.ranks.explain()
                    self.ranks.fail(f"rank 0 could not run a step: {error!r}")
                self.ranks.check()
                raise

    def prepare(self, step: ScheduledStep) -> tuple[StepShape | None, StepInput | None]:
        """Stage E's, padded to a graph's size where there is one. The views returned leave the padding out."""
        graphs = self.graphs  # a thread that closes the engine takes them away
        if graphs is None or not step.sequences:
            return super().prepare(step)
        self.take_seats(step)
        exact = self.batch.shape_of(step)
        shape = graphs.padded(exact)
        host = self.buffers.next_host(shape)
        if shape is not exact:
            host = graphs.pad(host, exact.num_seqs)
        self.fill(step, host)
        return shape, host

    def execute_step(self, shape: StepShape, sample_seats: np.ndarray, needs: int) -> InFlight:
        """Execute a prepared step: by replaying its graph, or eagerly."""
        graphs = self.graphs
        recorded = graphs and graphs.find(shape)
        return self._replay(recorded, shape, sample_seats, needs) if recorded else self.execute(shape, sample_seats)

    @torch.inference_mode()
    def _replay(self, recorded: Recorded, shape: StepShape, sample_seats: np.ndarray, needs: int) -> InFlight:
        inputs = self.buffers.send(shape)
        recorded.replay()
        count, result = len(sample_seats), recorded.result
        if needs & ~DRAWN:  # filters, penalties, logprobs, another sampler: draw again, with all of stage E's sampler
            logits = result.logits if result.logits is not None else self.model.compute_logits(result.hidden)
            live = StepInput(*(array[:count] for array in inputs))
            drawn = self.draw(logits[:count], sample_seats, live)
            self.last_tokens.index_copy_(0, live.sample_seats, drawn.ids)
        else:
            ids = result.ids[:count]
            drawn = DrawnTokens(ids if self._is_cuda else ids.clone())  # the next replay writes over it
        if not self._takes_fused(shape.num_seqs):
            return self.fetch(drawn)
        self._host_failure.copy_(self.fused_decode.failure, non_blocking=True)  # travels with the tokens
        fetched = self.fetch(drawn)
        check = partial(self.fused_decode.check, self._host_failure)
        return CheckedInFlight(fetched.drawn, fetched.host_ids, fetched.arrived, check)

    def draw(self, logits: Tensor, sample_seats: np.ndarray, inputs: StepInput) -> DrawnTokens:
        """Rank 0 draws, the others receive."""
        if self.group is None:
            try:
                return super().draw(logits, sample_seats, inputs)
            except Exception:
                if self.fused_decode is not None:
                    self.fused_decode.check()  # the sampler may have been handed what a step that gave up left
                raise
        drawn = DrawnTokens(torch.zeros(logits.shape[0], dtype=torch.int64, device=self.device))
        try:
            if self.group.rank == 0:
                drawn = super().draw(logits, sample_seats, inputs)
        except BaseException:  # a replaced sampler may raise; the others get zeros, so that all stay in step
            self._draw_failed = True
            raise
        finally:
            self.group.broadcast(drawn.ids)
        return drawn

    def execute_command(self, message: bytes) -> None:
        """Execute what rank 0 sent."""
        command = StepCommand.decode(message)
        self.buffers.unpack(command.data)
        self.execute_step(command.shape, np.empty(command.num_live, np.int64), command.needs)

    def release(self) -> None:
        """Release the graphs, and with them the group's memory. The runner cannot be used any more."""
        self.graphs = None
        if self.group is not None:
            self.group.wait_released(RELEASE_SECONDS)


class WatchedInFlight(InFlight):
    """A step on several ranks. If one of them died, its tokens are invalid, though they may be there."""

    def __init__(self, step: InFlight, ranks: Ranks) -> None:
        super().__init__(step.drawn, step.host_ids, step.arrived)
        object.__setattr__(self, "_ranks", ranks)

    def wait(self) -> Sampled:
        deadline = time.monotonic() + STEP_SECONDS
        while self.arrived is not None and not self.arrived.query():
            self._ranks.check()
            if time.monotonic() > deadline:
                self._ranks.fail(f"the ranks did not finish a step within {STEP_SECONDS:.0f} s")
        sampled = super().wait()
        self._ranks.check()
        return sampled


@dataclass(frozen=True)
class CheckedInFlight(InFlight):
    """A one-launch step: its blocks wait for one another, and if one gave up, the tokens are not handed on."""

    check: Callable[[], None] = do_nothing  # raises if the step gave up

    def wait(self) -> Sampled:
        if self.arrived is not None:
            self.arrived.synchronize()
        self.check()  # before anything is made of the results, which may be any numbers
        return super().wait()


def _fused_decode(runtime: Runtime) -> FusedDecode | None:
    """The one-launch decode step, or None, with one line that says why not."""
    reason = why_unsupported(runtime.config, runtime.dtype, runtime.block_size, 1)
    if not reason:
        try:
            return FusedDecode(runtime.model)
        except ExtensionError as error:
            reason = str(error)
    print(f"one-launch decode step: not used ({reason})", file=sys.stderr)
    return None
