"""The engine with the CPU out of the loop, and more GPUs.

    schedule n + 1 -> launch n + 1 -> tokens of n -> postprocess n            (stage E's ring)
                      one graph replay, or eager with fused kernels           (model_runner.py, cuda_graph.py)
                      on every rank                                           (rank_runner.py, tensor_parallel/)

With one rank there is no process group, no NCCL and no other process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from stage_d_paged.config import ModelConfig
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_e_batching import llm as stage_e
from stage_e_batching.engine import Engine
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.model_runner import GraphModelRunner
from stage_f_graph_tp.options import GraphOptions

if TYPE_CHECKING:
    from stage_f_graph_tp.rank_runner import Job, RankRunner
    from stage_f_graph_tp.tensor_parallel import Build, Workers


class LLM(stage_e.LLM):
    """Stage E's engine with CUDA graphs, overlapped scheduling, fused kernels and tensor parallelism.

    `LLM(..., tensor_parallel_size=n)` starts its own workers. Under `torchrun` the processes are there already: every
    one makes the same `LLM`; rank 0's returns, the others' work for it and end with the process when it closes.

    With overlap, `step` returns what came of the step before.

    Args:
        model, device, dtype, seed: as in stage A.
        options: those of `GraphOptions`, by name.

    Raises:
        ModelError, TypeError, ValueError, MemoryError, OSError: as in stage E.
        ValueError: more ranks than GPUs, or a number of ranks that does not divide the model.
        WorkerError: a worker failed while starting.
    """

    options_class = GraphOptions
    options: GraphOptions
    runner: GraphModelRunner

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._end_workers: Callable[[], object] = lambda: None
        try:
            super().__init__(model, device=device, dtype=dtype, seed=seed, **options)
        except BaseException:
            self._end_workers()
            raise

    def _engine(self) -> Engine:
        """The ring of stage E; with overlap, a step is launched before the tokens of the last one are fetched."""
        depth = 1 if self.options.overlap else 0
        return Engine(self._scheduler(), self.runner, depth=depth, trace=self.trace)

    def _build(self, seed: int) -> tuple[Runtime, GraphModelRunner]:
        if self.options.tensor_parallel_size > 1:
            return self._build_ranks(seed)
        patch = partial(choose_layers, fused=self.options.fused)
        runtime = load_runtime(self.source, self.options, self.device, self.dtype, seed, patch=patch)
        sampler = stage_e.make_sampler(runtime, self.options)
        kv_cache = runtime.make_pool(choose_num_blocks(runtime, self.options))
        return runtime, GraphModelRunner(runtime, kv_cache, sampler, self.options)

    def _build_ranks(self, seed: int) -> tuple[Runtime, GraphModelRunner]:
        from stage_f_graph_tp.rank_runner import Job, build_worker  # here: one rank needs no torch.distributed

        job = Job.of(self.source.name, self.device, self.dtype, seed, self.options)
        return self._start_ranks(job, build_worker)

    def _start_ranks(self, job: Job, build_worker: Build) -> tuple[Runtime, GraphModelRunner]:
        from stage_f_graph_tp.rank_runner import build_ranks

        runtime, runner = build_ranks(job, ModelConfig.from_hf(self.source.config), build_worker)
        self.device = runtime.device
        assert runner.workers is not None  # this is rank 0
        # Called by close(), and also when the engine is dropped or the program ends without it.
        self._end_workers = weakref.finalize(self, end_ranks, runner.workers, weakref.ref(runner))
        return runtime, runner

    def close(self) -> None:
        """End the workers, if there are any, and close the trace file. A second call does nothing."""
        super().close()
        self._end_workers()
        self.runner.release()


def end_ranks(workers: Workers, runner: weakref.ref[RankRunner]) -> None:
    """End the workers and release the graphs, in this order; a runner that has been collected has none."""
    workers.close()
    if (left := runner()) is not None:
        left.release()
