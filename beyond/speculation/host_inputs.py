"""A step's input where the host has made the guesses, and CUDA graphs for verification.

Stage F takes the token of a decode from the device, where the step before left it. A guess was never there. When a
draft is verified nothing is in flight, so all tokens travel with the step's input. So they do in the next step too: the
device does not know which of the tokens that it sampled was the last right one. From then on steps are stage F's.

A verification is a decode step with more rows, and its graph is recorded like a decode step's, from the embedding to
the sampled tokens. The sizes are multiples of what one full draft takes.
"""

from __future__ import annotations

import numpy as np

from beyond.speculation.sequence import token_at
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.cuda_graph import DecodeGraphs
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.step_input import StepInput, StepShape, TokenSource


def verification_sizes(draft_tokens: int, max_rows: int) -> list[int]:
    """Return the numbers of rows to capture: those of 1, 2, 4, … sequences with a full draft, up to `max_rows`."""
    sizes = [(1 + draft_tokens) << i for i in range(max_rows.bit_length())]
    return [*(size for size in sizes if size < max_rows), max_rows]


def verification_graphs(batch: InputBatch, draft_tokens: int, max_rows: int, source: TokenSource) -> DecodeGraphs:
    """Make the graphs for steps with drafts, whose tokens come from `source`; they are recorded later."""
    sizes = verification_sizes(draft_tokens, max_rows)
    return DecodeGraphs(sizes, batch.max_blocks, batch.max_model_len, max_rows, source, "verification")


class DraftBatch(InputBatch):
    """Builds a step's input with the tokens of decodes too, where the device lacks one and the host knows them all.

    Args:
        max_num_seqs, max_model_len, block_size: see `InputBatch`.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        self._verified = np.zeros(max_num_seqs, bool)  # by batch slot: its last step had guesses

    def shape_of(self, step: ScheduledStep) -> StepShape:
        """Return the sizes of a step's input, and where the tokens of its decodes come from."""
        shape = super().shape_of(step)
        return shape._replace(source=TokenSource.HOST) if self._are_sent(step) else shape

    def _are_sent(self, step: ScheduledStep) -> bool:
        """Whether the tokens of decodes travel with the step's input."""
        decodes = step.sequences[: step.num_decodes]
        if any(sequence.num_in_flight for sequence in decodes):
            return False
        return any(sequence.guesses.draft or self._verified[sequence.batch_slot] for sequence in decodes)

    def _fill_decodes(self, step: ScheduledStep, out: StepInput) -> np.ndarray:
        generated = super()._fill_decodes(step, out)
        decodes = step.sequences[: step.num_decodes]
        if self._are_sent(step):
            out.input_ids[: len(decodes)] = [token_at(s, start) for s, start in zip(decodes, step.starts, strict=False)]
        self._verified[out.batch_slots[: len(decodes)]] = [bool(sequence.guesses.draft) for sequence in decodes]
        return generated
