"""CUDA graphs for steps with prompt tokens: prefill, and prefill mixed with decodes.

A prefill of 128 tokens is a millisecond of GPU work, and but launching it kernel by kernel takes the CPU several times
as long. The launches are the same for all prompts of one length, so they can be recorded like those of a decode step:

* there is a graph for each of a few *numbers of tokens*, and a step is padded up to the next one;
* the attention kernels find out on the device which tokens belong to which sequence (`cu_seqlens_q`) and how long each
  context is (`context_lens`). Their grids cover every division of this many tokens among this many sequences, and
  programs without work end at once. So one graph serves every mixture of decodes, chunks and prompts;
* a step with a single prompt has a separate graph, in which no program looks for other sequences;
* padding tokens write no KV (slot -1). In a mixture they form one more sequence, whose context is empty.

The graph of a single prompt goes on to the sampled token, like that of a decode step. A mixture's graph ends with the
model's final states: the LM head and the sampler run after it, on the sampled rows only, and the CPU launches them
while the GPU is still busy with the graph. Above the largest size the GPU takes longer than the CPU needs for the
launches, so the step runs eagerly.

A graph is recorded when a step first needs it, so the engine starts sooner and no graph is recorded in vain.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from stage_f_graph_tp.cuda_graph import NOTHING, Body, Compute, DecodeGraphs, Recorded, Recorder
from stage_f_graph_tp.forward import StepHead, StepOutput
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.last_tokens import Tokens
from stage_f_graph_tp.step_input import StepBuffers, StepInput, StepShape

SIZES = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)


def prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture, up to the largest step or 4,096; none if a step has one token.

    With one token per step, a prompt runs token by token, and a graph of one token could be mistaken for a decode.
    """
    top = min(max_num_batched_tokens, SIZES[-1])
    if top < 2:
        return []
    return [*(size for size in SIZES if size < top), top]


class PrefillGraphs:
    """Recorded steps for every size, once for a single prompt and once for any mixture.

    Args:
        sizes: numbers of tokens, ascending.
        max_num_seqs: sequences of the largest step.
        table_width: columns of the block tables, enough for `max_model_len`.
        max_model_len: the longest context.
        tokens: fills in the decodes' tokens before the replay, because the number of decodes is not recorded.
    """

    def __init__(
        self, sizes: list[int], max_num_seqs: int, table_width: int, max_model_len: int, tokens: Tokens
    ) -> None:
        self._sizes = sizes
        self._tokens = tokens
        self._recorded: dict[StepShape, Recorded] = {}

        def shape_of(num_tokens: int, seqs: int) -> StepShape:
            return StepShape(num_tokens, seqs, seqs, table_width, 0, num_tokens, max_model_len)

        self._alone = {size: shape_of(size, 1) for size in sizes}
        # One sequence more than can run: the one that the padding tokens form.
        self._mixed = {size: shape_of(size, min(size, max_num_seqs) + 1) for size in sizes}
        self.shapes = [shape for size in sizes for shape in (self._alone[size], self._mixed[size])]

    def takes(self, shape: StepShape) -> StepShape | None:
        """Return the recorded shape that can run `shape`, with its decodes; None if there is none."""
        if shape.num_tokens > self._sizes[-1]:
            return None
        recorded = self._alone if shape.num_seqs == 1 and shape.num_tokens > 1 else self._mixed
        size = self._sizes[bisect_left(self._sizes, shape.num_tokens)]
        return recorded[size]._replace(num_decodes=shape.num_decodes, source=shape.source)

    def pad(self, host: StepInput, exact: StepShape) -> None:
        """Pad the tokens and sequences that `exact` leaves unfilled."""
        tokens, seqs, samples = exact.num_tokens, exact.num_seqs, exact.num_samples
        host.input_ids[tokens:] = 0
        host.positions[tokens:] = 0
        host.slot_mapping[tokens:] = -1
        host.context_lens[seqs:] = 0
        host.cu_seqlens_q[seqs + 1 :] = len(host.input_ids)  # the first padding sequence takes all padding tokens
        host.sample_slots[samples:] = self._tokens.num_slots  # of a chunk that is not its prompt's last
        for array in (host.sample_tokens, *host.sampling):
            array[samples:] = 0

    def record_steps(
        self, record: Recorder, buffers: StepBuffers, compute: Compute, head: StepHead, device: torch.device
    ) -> str:
        """Keep the parts that run a step without a graph, to record it when it is needed; returns a line about that."""
        self._record, self._parts = record, (compute, head)
        return f"CUDA graphs: prefill steps of up to {self._sizes[-1]} tokens are recorded when first needed"

    def body(self, shape: StepShape, buffers: StepBuffers, compute: Compute, head: StepHead) -> Body:
        """Return a step of this shape that is padding only."""
        host = buffers.next_host(shape)
        host.cu_seqlens_q[0] = 0
        self.pad(host, NOTHING)
        inputs = buffers.send()
        return lambda: self._compute(inputs, shape, compute, head)

    def _compute(self, inputs: StepInput[Tensor], shape: StepShape, compute: Compute, head: StepHead) -> StepOutput:
        output = compute(inputs, shape)
        return head.sample(output, inputs, shape) if shape.num_seqs == 1 else output

    def run(self, inputs: StepInput[Tensor], shape: StepShape, needs: int) -> StepOutput:
        """Replay a step; the first time, run and record it."""
        self._tokens.read(inputs, shape)
        shape = (self._alone if shape.num_seqs == 1 else self._mixed)[shape.num_tokens]
        if shape not in self._recorded:
            outputs: list[StepOutput] = []

            def body() -> StepOutput:
                outputs.append(self._compute(inputs, shape, *self._parts))
                return outputs[-1]

            self._recorded[shape] = self._record(body)
            return outputs[0]  # of the run before the recording
        recorded = self._recorded[shape]
        recorded.replay()
        return recorded.result


def make_graphs(
    batch: InputBatch, tokens: Tokens, sizes: list[int], prefills: list[int]
) -> tuple[DecodeGraphs, PrefillGraphs]:
    """Make the graphs of decodes and of prefill, within the limits of a builder of inputs. Nothing is recorded yet.

    Args:
        sizes: numbers of sequences of the decode steps, ascending.
        prefills: numbers of tokens of the prefill steps, ascending.
    """
    limits = batch.max_blocks, batch.max_model_len
    return DecodeGraphs(sizes, *limits, tokens.num_slots), PrefillGraphs(prefills, tokens.num_slots, *limits, tokens)
