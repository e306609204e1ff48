"""The engine with the CPU out of the loop, and more GPUs.

    schedule n + 1 -> launch n + 1 -> tokens of n -> postprocess n            (stage E's engine)
                      one graph replay, or eager with fused kernels           (runner.py, cuda_graph.py)
                      on every rank                                           (ranks.py, tensor_parallel/)

With one rank there is no process group, no NCCL and no other process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from stage_d_paged.config import ModelConfig
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_e_batching import llm as stage_e
from stage_e_batching.engine import Engine
from stage_e_batching.runner import ModelRunner
from stage_f_graph_tp.compose import compose_runner
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.megakernel import build_early
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.runner import StepRunner

if TYPE_CHECKING:
    from stage_f_graph_tp.ranks import Job, MakeBatch
    from stage_f_graph_tp.tensor_parallel import Build


class LLM(stage_e.LLM):
    """Stage E's engine with CUDA graphs, overlapped scheduling, fused kernels and tensor parallelism.

    `LLM(..., tensor_parallel_size=n)` starts its own workers.

    With overlap, `step` returns the results of the previous step.

    Args:
        model, device, dtype, seed: as in stage A.
        options: see `GraphOptions`; passed by name.

    Raises:
        ModelError, TypeError, ValueError, MemoryError, OSError: as in stage E.
        ValueError: more ranks than GPUs, or a number of ranks that does not divide the model.
        WorkerError: a worker failed while starting.
    """

    options_class = GraphOptions
    options: GraphOptions
    runner: StepRunner | ModelRunner

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._end_ranks: Callable[[], object] | None = None  # ends the workers, if any, and releases the graphs
        try:
            super().__init__(model, device=device, dtype=dtype, seed=seed, **options)
        except BaseException:
            if self._end_ranks is not None:
                self._end_ranks()
            raise

    def _engine(self) -> Engine:
        """Make stage E's engine; with overlap it launches a step before it fetches the tokens of the last one."""
        depth = 1 if self.options.uses("overlap") else 0
        return Engine(self._scheduler(), self.runner, depth=depth, trace=self.trace)

    def _build(self, seed: int) -> tuple[Runtime, StepRunner | ModelRunner]:
        if self.options.tensor_parallel_size > 1:
            return self._build_ranks(seed)
        if self.options.uses("megakernel"):
            build_early(ModelConfig.from_hf(self.source.config), self.dtype, self.device)
        runtime = load_runtime(self.source, self.options, self.device, self.dtype, seed, patch=choose_layers)
        sampler = stage_e.make_sampler(runtime, self.options)
        kv_cache = runtime.make_pool(choose_num_blocks(runtime, self.options))
        if not any(map(self.options.uses, ("graphs", "prefill_graphs", "megakernel", "overlap"))):
            return runtime, ModelRunner(runtime, kv_cache, sampler)  # nothing needs the last tokens on the device
        return runtime, compose_runner(runtime, kv_cache, sampler, self.options)

    def _build_ranks(self, seed: int) -> tuple[Runtime, StepRunner]:
        from stage_f_graph_tp.ranks import Job, build_worker  # here: one rank needs no torch.distributed

        job = Job.of(self.source.name, self.device, self.dtype, seed, self.options)
        return self._start_ranks(job, build_worker)

    def _start_ranks(self, job: Job, build_worker: Build, batch: MakeBatch = InputBatch) -> tuple[Runtime, StepRunner]:
        from stage_f_graph_tp.ranks import build_ranks, end_ranks

        rank = build_ranks(job, ModelConfig.from_hf(self.source.config), build_worker, batch)
        self.device = rank.runtime.device
        workers = rank.runner.ranks.workers
        assert workers is not None  # this is rank 0
        # Called by close(), and also if the engine is collected or the program ends without close().
        self._end_ranks = weakref.finalize(self, end_ranks, workers, rank.groups, weakref.ref(rank.runner))
        return rank.runtime, rank.runner

    def close(self) -> None:
        """End the workers, release the graphs and close the trace file. A second call is a no-op."""
        super().close()
        if self._end_ranks is not None:
            self._end_ranks()
        elif isinstance(self.runner, StepRunner):
            self.runner.release()
