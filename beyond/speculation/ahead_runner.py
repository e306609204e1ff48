"""Stage F's runner for verifications that are launched before the step in flight is known.

The host sends where each sequence is at least. `TokenTable` makes the rest on the device, inside the verification's
graph: guesses, tokens, positions, slots, and after sampling which rows ran on the right tokens.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from torch import Tensor

from beyond.speculation.runner import RegrownBatch, SpeculativeRunner, VerificationGraphs
from beyond.speculation.sequence import DRAFT, NUM_UNSURE, SpeculativeSequence
from beyond.speculation.token_table import TokenTable
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.sampler import Sampler, SamplerInput
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.step_input import StepInput, StepShape


class AheadShape(StepShape):
    """The sizes of a step whose decodes the device completes, their guesses among them.

    It is equal to no shape of another step, so that no other step's graph is found for it.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AheadShape) and super().__eq__(other)

    __hash__ = StepShape.__hash__


def is_ahead(step: ScheduledStep) -> bool:
    """Whether a step has guesses, or follows one whose guesses the host does not know to be right or wrong."""
    decodes = step.sequences[: step.num_decodes]
    return any(map(DRAFT, decodes)) or any(map(NUM_UNSURE, decodes))


class AheadBatch(RegrownBatch):
    """Builds a step's input from where each sequence is at least.

    Args:
        max_num_seqs, max_model_len, block_size: see `InputBatch`.
        draft_tokens: how many tokens further a sequence may be.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, draft_tokens: int) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        self._longest = max_model_len
        self._draft_tokens = draft_tokens
        self.is_ahead = False  # whether the device completes the step that is being built

    def shape_of(self, step: ScheduledStep) -> StepShape:
        shape = super().shape_of(step)
        if not self.is_ahead:
            return shape
        longest = min(shape.max_context_len + self._draft_tokens, self._longest)
        width = -(-longest // self.block_size)
        return AheadShape(*shape._replace(max_context_len=longest, table_width=width))

    def _fill_decodes(self, step: ScheduledStep, out: StepInput) -> np.ndarray:
        generated = super()._fill_decodes(step, out)
        if self.is_ahead:
            rows = np.arange(step.num_decodes)
            firsts = np.where(np.diff(out.batch_slots[: len(rows)], prepend=-1) != 0, rows, 0)
            out.positions[: len(rows)] = rows - np.maximum.accumulate(firsts)
        return generated


class AheadGraphs(VerificationGraphs):
    """Recorded verifications whose rows the device completes, beside the decode graphs."""

    def __init__(self, decode_graphs: DecodeGraphs, sizes: list[int], *limits: int) -> None:
        super().__init__(decode_graphs, sizes, *limits)
        self.shapes = [AheadShape(*shape._replace(num_decodes=shape.num_tokens)) for shape in self.shapes]

    def padded(self, shape: StepShape) -> StepShape:
        """Return the recorded shape that serves `shape`; `shape` itself where none does."""
        if not isinstance(shape, AheadShape):
            return self._decode_graphs.padded(shape)
        if shape.num_decodes < shape.num_tokens:
            return shape
        return self.shapes[bisect_left(self._sizes, shape.num_tokens)]


class AheadRunner(SpeculativeRunner):
    """Runs stage F's steps, and verifications whose input the device completes.

    Args:
        runtime, kv_cache, sampler, options, draft_tokens: see `SpeculativeRunner`.
        table: of the sequences that run.
    """

    graphs_class = AheadGraphs

    def __init__(
        self,
        runtime: Runtime,
        kv_cache: KVCache,
        sampler: Sampler,
        options: GraphOptions,
        draft_tokens: int,
        table: TokenTable,
    ) -> None:
        self.table = table
        self._entered: set[SpeculativeSequence] = set()  # their rows of the table hold all of their tokens
        super().__init__(runtime, kv_cache, sampler, options, draft_tokens)
        self.batch = AheadBatch(options.max_num_seqs, runtime.max_model_len, runtime.block_size, draft_tokens)

    def admit(self, step: ScheduledStep) -> None:
        """Also enter the sequences whose tokens are not in the table: steps without guesses do not write to it."""
        super().admit(step)
        self.batch.is_ahead = is_ahead(step)
        if not self.batch.is_ahead:
            self._entered = set()
            return
        decoding = set(step.sequences[: step.num_decodes])
        new = [sequence for sequence in decoding if sequence not in self._entered]
        if new:
            self.table.enter(new, self._noise_keys, self.last_tokens)
        self._entered = decoding

    def is_for_megakernel(self, shape: StepShape) -> bool:
        """Whether a step of this shape is one launch, in which the table completes nothing and keeps nothing."""
        return not isinstance(shape, AheadShape) and super().is_for_megakernel(shape)

    def next_host(self, exact: StepShape) -> tuple[StepShape, StepInput]:
        """Return a host buffer for a step of shape `exact`, and the shape to run it in, which is of the same class."""
        shape, host = super().next_host(exact)
        return AheadShape(*shape) if self.batch.is_ahead else shape, host

    def forward(self, inputs: StepInput, shape: StepShape) -> Tensor:
        """Compute the model's final states `[tokens, hidden]`."""
        if not isinstance(shape, AheadShape):
            return super().forward(inputs, shape)
        self.table.resolve(inputs, shape.num_decodes, self.batch.block_size)
        return self.run_model(inputs, StepShape(*shape))  # complete now: a step like any other

    def keep(self, ids: Tensor, inputs: StepInput, shape: StepShape) -> Tensor:
        """Keep the sampled tokens on the device; `WRONG` takes the place of those that the host must not see."""
        if not isinstance(shape, AheadShape):
            return super().keep(ids, inputs, shape)
        kept = ids.clone()
        self.table.keep(kept, inputs, self.last_tokens)
        return kept

    def _noise_keys(self, sequence: SpeculativeSequence, count: int) -> np.ndarray:
        slots = np.full(count, sequence.batch_slot)
        rows = SamplerInput.empty(count)
        rows.noise_keys[:] = 0  # greedy: none is made
        self.sampler.fill(slots, np.arange(count), rows)
        return rows.noise_keys
