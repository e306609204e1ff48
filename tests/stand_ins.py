"""Stand-ins for CUDA graphs, the megakernel and other processes on a CPU; the code around them is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import stage_f_graph_tp
from labs.tests.forks import fork_worker
from stage_a_naive.contract.noise import mix32
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.sampler.reference import sample_reference
from stage_f_graph_tp.cuda_graph import Body, Recorded
from stage_f_graph_tp.megakernel import Megakernel
from stage_f_graph_tp.megakernel_steps import MegakernelSteps
from stage_f_graph_tp.runner import StepRunner
from stage_f_graph_tp.tensor_parallel.watch import workers


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Make the other ranks forks of this process: they start at once, with everything that a test has changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_start_worker", fork_worker)
        yield


class EagerRecorder:
    """A replay runs the body again and puts its result where the first one's is stored; counts the replays by rows."""

    def __init__(self, replays: Counter[int | str] | None = None) -> None:
        self.replays = Counter() if replays is None else replays

    def __call__(self, body: Body) -> Recorded:
        kept = body()

        def replay() -> None:
            again = body()
            for tensor, value in zip(kept, again, strict=True):
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(value)
            self.replays[f"{len(kept.hidden)} tokens" if kept.ids is None else len(kept.ids)] += 1

        return Recorded(replay, kept)


def forwards_of(runner: StepRunner, kind: type) -> list:
    """The runner's forwards of a class, in the order in which they are tried."""
    return [forward for forward in runner.forwards if isinstance(forward, kind)]


def with_megakernel(llm: stage_f_graph_tp.LLM, most_rows: int | None = None) -> tuple[StepRunner, FakeMegakernel]:
    """Make the engine's runner again with a stand-in for the megakernel, for steps of up to `most_rows` requests."""
    runner, fake = llm.runner, FakeMegakernel(llm)
    layers, batch = runner.layers, runner.batch
    steps = MegakernelSteps(fake, runner.kv_cache, layers.tokens, batch.max_blocks, batch.max_model_len)
    steps.most_rows = most_rows or steps.most_rows
    parts = batch, runner.buffers, runner.sampler, layers, runner.head
    llm.runner = llm.engine.runner = StepRunner(*parts, forwards=[steps], graphs=runner._graphs)
    return llm.runner, fake


class FakeMegakernel(Megakernel):
    """The model's layers in place of the kernel; from step `gives_up` until the reset, NaN and a failure word."""

    def __init__(self, llm: stage_f_graph_tp.LLM) -> None:
        self.model, self.config = llm.runner.model, llm.runtime.config
        self.kv_cache, self.longest = llm.runner.kv_cache, llm.max_model_len
        self.workspace = torch.zeros(64, dtype=torch.uint8)
        self.steps, self.gives_up = 0, 0
        self.sizes: set[int] = set()

    def step(self, last_tokens, batch_slots, positions, *others) -> None:
        slot_mapping, block_tables, context_lens, temperatures, noise_keys, _, logits, result = others
        rows, token_ids = len(batch_slots), last_tokens[batch_slots]
        starts = torch.arange(rows + 1, dtype=torch.int32)
        metadata = AttentionMetadata(starts, context_lens, slot_mapping, block_tables, 1, self.longest)
        logits.copy_(self.model.compute_logits(self.model(token_ids, positions, self.kv_cache, metadata)))
        self.steps += 1
        self.sizes.add(rows)
        if self.steps == self.gives_up:
            self.failure.fill_(3 * 16 + 2 + 1)
        result[-1] = self.failure[0]
        if self.failure:
            logits.fill_(float("nan"))
        else:
            mixed_ids = mix32(torch.arange(self.config.vocab_size))
            result[:-1] = last_tokens[batch_slots] = sample_reference(logits, temperatures, noise_keys, mixed_ids)


def countdown(most: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests whose batch shrinks by one each step: every size from `most` to 1."""
    prompts = [[7 * i + 1, 3 * i + 2] for i in range(most)]
    return prompts, [SamplingParams(temperature=0, max_tokens=i + 2, ignore_eos=True) for i in range(most)]
