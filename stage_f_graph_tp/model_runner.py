"""Stage E's model runner with the CPU taken out: graphs for decode, fused kernels.

Where there is a graph for a step, its input is padded to the graph's size and sent in one copy. A decode step, from the
embedding to the sampled tokens, is one replay, or one launch of the persistent megakernel (`megakernel_steps.py`). A
step with prefill is a replay up to the final states, and the LM head and the sampler run after it. Everything else
(steps above the largest graph, a machine without a GPU) runs eagerly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.engine import Sampled
from stage_e_batching.sampler import RANDOM, SampledTokens, Sampler
from stage_f_graph_tp.async_runner import AsyncModelRunner, InFlight, StepResult
from stage_f_graph_tp.cuda_graph import (
    Body,
    DecodeGraphs,
    GraphRecorder,
    Recorded,
    Recorder,
    StepGraphs,
    capture_sizes,
)
from stage_f_graph_tp.megakernel import Megakernel, choose_decode_step
from stage_f_graph_tp.megakernel_steps import MegakernelSteps
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.prefill_graphs import PrefillGraphs, prefill_sizes
from stage_f_graph_tp.step_input import StepInput, StepShape


class GraphModelRunner(AsyncModelRunner):
    """Runs steps, by graphs where there are any.

    Args:
        runtime: the model, or this rank's share of it.
        kv_cache: its pool.
        sampler: with `options.max_num_seqs` batch slots.
        options: which ideas are switched on, and the limits of a step.
    """

    def __init__(self, runtime: Runtime, kv_cache: KVCache, sampler: Sampler, options: GraphOptions) -> None:
        super().__init__(runtime, kv_cache, sampler, options.max_num_seqs, options.max_num_batched_tokens)
        self.graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self.megakernel: MegakernelSteps | None = None
        self._choices: dict[int, Recorded] = {}  # by rows: the sampler behind a step of the megakernel
        self._is_cuda = runtime.device.type == "cuda"
        self._max_model_len = runtime.max_model_len
        if self._is_cuda and not options.enforce_eager:
            if runtime.backend.name == "reference":  # it asks the device for the longest context
                self._report("CUDA graphs: not used (attention_backend='reference' cannot be recorded)")
            else:
                if options.fused and options.tensor_parallel_size == 1 and (kernel := choose_decode_step(runtime)):
                    self.use_megakernel(kernel)
                prefills = prefill_sizes(options.max_num_batched_tokens) if options.prefill_graphs else []
                self.capture(GraphRecorder(runtime.device), capture_sizes(self.most_decodes(options)), prefills)

    def most_decodes(self, options: GraphOptions) -> int:
        """Sequences of the largest decode step."""
        return options.max_num_seqs

    def use_megakernel(self, kernel: Megakernel) -> None:
        """Run decode steps of a few requests as one launch of this kernel. Before `capture`."""
        self.megakernel = MegakernelSteps(kernel, self.kv_cache, self.last_tokens)

    # ---- graphs ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, record: Recorder, sizes: list[int], prefills: Sequence[int] = ()) -> None:
        """Record a decode step for each of these numbers of sequences, and steps with prefill for these of tokens."""
        self.reserve_logits(max(sizes, default=0))
        max_num_seqs = len(self.last_tokens) - 1
        limits = self.batch.max_blocks, self._max_model_len
        if prefills:  # first: the larger ones, into whose memory the others fit
            graphs = PrefillGraphs(list(prefills), max_num_seqs, *limits)
            self._capture(record, graphs, "prefill", lambda shape: self._prefill_body(graphs, shape))
            self.prefill_graphs = graphs
        if self.megakernel is not None:
            sizes = [size for size in sizes if size > self.megakernel.most_rows]
        decode_graphs = DecodeGraphs(sizes, *limits, padding_slot=max_num_seqs)
        self._capture(record, decode_graphs, "decode", lambda shape: self._decode_body(decode_graphs, shape))
        if (megakernel := self.megakernel) is not None:
            for rows in range(1, min(megakernel.most_rows, max_num_seqs) + 1):
                self._choices[rows] = record(self._choose_body(megakernel, decode_graphs, rows))
        self.graphs = decode_graphs

    def reserve_logits(self, rows: int) -> None:
        """Make one place for the logits of all recorded steps of up to this many rows. Before they are recorded."""
        if self._is_cuda and rows > len(self.logits) and self.logits_in_graphs:
            self.logits = self.logits.new_empty(rows, self.logits.shape[1])

    def _capture(self, record: Recorder, graphs: StepGraphs, name: str, body_of: Callable[[StepShape], Body]) -> None:
        start = time.perf_counter()
        graphs.capture(record, body_of, self.device)
        if self._is_cuda:
            seconds, size = time.perf_counter() - start, graphs.num_bytes / 2**20
            self._report(f"CUDA graphs: {len(graphs.shapes)} for {name}, {size:.0f} MiB, {seconds:.1f} s")

    def _report(self, line: str) -> None:
        print(line, file=sys.stderr)

    def _decode_body(self, graphs: DecodeGraphs, shape: StepShape) -> Body:
        """Return a decode step of this shape, on inputs that are all padding while it is recorded."""
        host = self.buffers.next_host(shape)
        graphs.pad(host, 0)
        inputs = self.buffers.send(shape)
        return lambda: self._decode(inputs, shape)

    def _prefill_body(self, graphs: PrefillGraphs, shape: StepShape) -> Body:
        """Return the model on a step of this shape, on inputs that are all padding while it is recorded."""
        host = self.buffers.next_host(shape)
        host.cu_seqlens_q[0] = 0
        graphs.pad(host, 0, 0)
        inputs = self.buffers.send(shape)
        return partial(super().run_model, inputs, shape)

    def _choose_body(self, megakernel: MegakernelSteps, graphs: DecodeGraphs, rows: int) -> Body:
        """Return the sampler on the logits of a step of the megakernel, for rows that ask for filters or penalties."""
        shape = StepShape(rows, rows, rows, self.batch.max_blocks, rows, 1, self._max_model_len)
        graphs.pad(self.buffers.next_host(shape), 0)
        inputs = self.buffers.send(shape)
        # A step of padding: the first launch of a kernel loads it, and no request should wait for that.
        logits = megakernel.launch(rows, inputs).logits

        def body() -> StepResult:
            ids = self.sampler.choose(logits, inputs.sampling)
            return StepResult(logits, logits, ids, self.keep(ids, inputs, shape))

        return body

    def _decode(self, inputs: StepInput[Tensor], shape: StepShape) -> StepResult | Tensor:
        return self.sample_and_keep(self.forward(inputs, shape), inputs, shape)

    # ---- a step ------------------------------------------------------------------------------------------------

    def is_for_megakernel(self, shape: StepShape) -> bool:
        """Whether a step of this shape is one launch, around which there is neither `forward` nor `keep`."""
        return self.megakernel is not None and self.megakernel.takes(shape)

    def next_host(self, exact: StepShape) -> tuple[StepShape, StepInput[np.ndarray]]:
        """Return a host buffer for a step of shape `exact`, padded to a graph's size where there is one."""
        if self.is_for_megakernel(exact):
            return super().next_host(exact)
        graphs, prefill_graphs = self.graphs, self.prefill_graphs  # a thread that closes the engine takes them away
        if graphs is not None and (shape := graphs.padded(exact)) is not exact:
            host = self.buffers.next_host(shape)
            graphs.pad(host, exact.num_seqs)
            return shape, host
        if prefill_graphs is not None and (shape := prefill_graphs.padded(exact)) is not exact:
            host = self.buffers.next_host(shape)
            prefill_graphs.pad(host, exact.num_tokens, exact.num_seqs)
            return shape, host
        return super().next_host(exact)

    def execute_step(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        """Execute a prepared step: as one launch, by replaying its graph, or eagerly."""
        if self.is_for_megakernel(shape):
            return self._launch_megakernel(shape, sample_slots, needs)
        graphs = self.graphs
        recorded = graphs and graphs.find(shape)
        execute = partial(self._replay, recorded) if recorded else self.execute
        return execute(shape, sample_slots, needs)

    @torch.inference_mode()
    def _replay(self, recorded: Recorded, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        inputs = self.buffers.send(shape)
        recorded.replay()
        return self.fetch_result(recorded.result, inputs, shape, sample_slots, needs)

    @torch.inference_mode()
    def _launch_megakernel(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        assert self.megakernel is not None
        inputs = self.buffers.send(shape)
        output = self.megakernel.launch(shape.num_seqs, inputs)
        check = partial(self.megakernel.kernel.check, output.failure)
        if needs & ~RANDOM:  # the kernel's own tokens are those of a request that asks for nothing else
            try:
                chosen = self._choices[shape.num_seqs]
                chosen.replay()
                fetched = self.fetch_result(chosen.result, inputs, shape, sample_slots, needs)
            except Exception:
                self.megakernel.kernel.check()  # the sampler may have been handed what a step that gave up left
                raise
            return CheckedInFlight(fetched.sampled, fetched.host_ids, fetched.arrived, check)
        return CheckedInFlight(SampledTokens(output.ids), output.ids, output.arrived, check)

    def run_model(self, inputs: StepInput[Tensor], shape: StepShape) -> Tensor:
        """Run all layers: in a step with prefill by replaying its graph, if it has one."""
        graphs = self.prefill_graphs
        recorded = graphs and graphs.find(shape._replace(num_decodes=0))
        if not recorded:
            return super().run_model(inputs, shape)
        recorded.replay()
        return recorded.result

    def release(self) -> None:
        """Release the graphs. The runner cannot be used any more."""
        self.graphs = self.prefill_graphs = None
        self._choices = {}


@dataclass(frozen=True)
class CheckedInFlight(InFlight):
    """A step of the megakernel: its blocks wait for one another, and if one gave up, the tokens are not handed on."""

    check: Callable[[], None] = lambda: None  # raises if the step gave up

    def wait(self) -> Sampled:
        if self.arrived is not None:
            self.arrived.synchronize()
        self.check()  # before anything is made of the results, which may be any numbers
        return super().wait()
