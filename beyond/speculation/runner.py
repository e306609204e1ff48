"""Stage F's runner for steps whose tokens are all on the host, and its CUDA graphs for verification.

Stage F takes the token of a decode from the device, where the step before left it. A guess was never there. When a
draft is verified nothing is in flight, so all tokens travel with the step's input, and the step needs no others:
`num_decodes`, which counts the rows whose token is taken from the device, is 0. So it is in the next step too: the
device does not know which of the tokens that it sampled was the last right one. From then on steps are stage F's.

A verification is a decode step with more rows, and its graph is recorded like a decode step's, from the embedding to
the sampled tokens. The sizes are multiples of what one full draft takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_d_paged.sequence import Sequence
from stage_e_batching.sampler import Sampler
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.cuda_graph import DecodeGraphs, Recorded, Recorder
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.model_runner import GraphModelRunner
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.step_input import StepInput, StepShape


def verification_sizes(draft_tokens: int, max_rows: int) -> list[int]:
    """Return the numbers of rows to capture: those of 1, 2, 4, … sequences with a full draft, up to `max_rows`."""
    sizes = [(1 + draft_tokens) << i for i in range(max_rows.bit_length())]
    return [*(size for size in sizes if size < max_rows), max_rows]


class RegrownBatch(InputBatch):
    """Builds a step's input for sequences that give blocks of wrong guesses back and later get others."""

    def update(self, step: ScheduledStep) -> None:
        """Take over what the step changed, and of grown sequences every block that may have been replaced."""
        for sequence in step.grown:
            slot, lasting = sequence.batch_slot, self.num_lasting_tokens(sequence) // self.block_size
            self._table_lens[slot] = min(self._table_lens[slot], lasting)
        super().update(step)

    def num_lasting_tokens(self, sequence: Sequence) -> int:
        """Tokens whose blocks the sequence has kept since they were taken over here."""
        return sequence.num_computed_tokens - 1  # the last one is being scheduled


class DraftBatch(RegrownBatch):
    """Builds a step's input with the tokens of decodes too, where the device lacks one and the host knows them all.

    Args:
        max_num_seqs, max_model_len, block_size: see `InputBatch`.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        self._verified = np.zeros(max_num_seqs, bool)  # by batch slot: its last step had guesses

    def shape_of(self, step: ScheduledStep) -> StepShape:
        """Return the sizes of a step's input; no decodes, where no token is taken from the device."""
        shape = super().shape_of(step)
        return shape._replace(num_decodes=0) if self._are_sent(step) else shape

    def _are_sent(self, step: ScheduledStep) -> bool:
        """Whether the tokens of decodes travel with the step's input."""
        decodes = step.sequences[: step.num_decodes]
        if any(sequence.num_in_flight for sequence in decodes):
            return False
        return any(sequence.draft or self._verified[sequence.batch_slot] for sequence in decodes)

    def _fill_decodes(self, step: ScheduledStep, out: StepInput) -> np.ndarray:
        generated = super()._fill_decodes(step, out)
        decodes = step.sequences[: step.num_decodes]
        if self._are_sent(step):
            out.input_ids[: len(decodes)] = [s.token_at(start) for s, start in zip(decodes, step.starts, strict=False)]
        self._verified[out.batch_slots[: len(decodes)]] = [bool(sequence.draft) for sequence in decodes]
        return generated


class VerificationGraphs(DecodeGraphs):
    """Recorded steps for rows whose tokens come from the host, beside the decode graphs.

    Args:
        decode_graphs: serve all other steps.
        sizes: numbers of rows, ascending.
        limits: as of `DecodeGraphs`.
    """

    def __init__(self, decode_graphs: DecodeGraphs, sizes: list[int], *limits: int) -> None:
        super().__init__(sizes, *limits)
        self.shapes = [shape._replace(num_decodes=0) for shape in self.shapes]
        self._decode_graphs = decode_graphs

    def padded(self, shape: StepShape) -> StepShape:
        """Return the recorded shape that serves `shape`; `shape` itself where none does."""
        if shape.num_decodes or shape.num_samples < shape.num_tokens:
            return self._decode_graphs.padded(shape)
        return self.shapes[bisect_left(self._sizes, shape.num_tokens)]

    def find(self, shape: StepShape) -> Recorded | None:
        return super().find(shape) or self._decode_graphs.find(shape)


class SpeculativeRunner(GraphModelRunner):
    """Stage F's runner, which also runs steps with drafts.

    Args:
        runtime, kv_cache, sampler: see `GraphModelRunner`.
        options: stage F's, with a batch slot for every row.
        draft_tokens: the longest draft.
    """

    graphs_class = VerificationGraphs

    def __init__(
        self, runtime: Runtime, kv_cache: KVCache, sampler: Sampler, options: GraphOptions, draft_tokens: int
    ) -> None:
        self._draft_tokens = draft_tokens
        super().__init__(runtime, kv_cache, sampler, options)
        self.batch = DraftBatch(options.max_num_seqs, runtime.max_model_len, runtime.block_size)

    @torch.inference_mode()
    def capture(self, record: Recorder, sizes: list[int], prefills: SequenceOf[int] = ()) -> None:
        """Record stage F's steps, and verifications."""
        max_rows = len(self.last_tokens) - 1
        self.reserve_logits(max_rows)
        super().capture(record, sizes, prefills)
        assert self.graphs is not None
        graphs = self.graphs_class(
            self.graphs,
            verification_sizes(self._draft_tokens, max_rows),
            self.batch.max_blocks,
            self._max_model_len,
            max_rows,
        )
        self._capture(record, graphs, "verification", lambda shape: self._decode_body(graphs, shape))
        self.graphs = graphs
