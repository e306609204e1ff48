"""Stage F's engine with its layers spread over stages, one after another: pipeline parallelism.

    from beyond.scale_out import LLM

    llm = LLM("Qwen/Qwen2.5-0.5B-Instruct", pipeline_parallel_size=2)

Stage 0 has the scheduler, the embedding, the LM head and the sampler. A step's hidden states travel around a ring:

    stage 0  embedding, layers 0 … k-1 ──► stage 1  layers k … ──► … ──► stage 0  LM head, sampler

What is built of it: which layers a stage has (`stages.py`), how they send to one another (`links.py`), what a stage
does with a step (`stage_head.py`), and several batches in flight (`pipeline_scheduler.py`, `micro_batches.py`).
"""

from __future__ import annotations

from functools import partial

from beyond.scale_out.micro_batches import MicroBatches
from beyond.scale_out.options import ScaleOutOptions
from beyond.scale_out.pipeline_scheduler import PipelineScheduler
from beyond.scale_out.stages import check_stages
from stage_d_paged.config import ModelConfig
from stage_d_paged.runtime import Runtime
from stage_e_batching.engine import Engine
from stage_e_batching.scheduler import Scheduler
from stage_f_graph_tp import llm as stage_f
from stage_f_graph_tp.runner import StepRunner


class LLM(stage_f.LLM):
    """Stage F's engine on `pipeline_parallel_size` stages of `tensor_parallel_size` ranks each.

    With one stage it is stage F's engine. Under `torchrun` the ranks may be on several machines.

    Args:
        model, device, dtype, seed: as in stage A.
        options: those of `ScaleOutOptions`, by name.

    Raises:
        ModelError, TypeError, ValueError, MemoryError, OSError, WorkerError: as in stage F.
        ValueError: more stages than layers, or a combination of options that is not supported.
    """

    options_class = ScaleOutOptions
    options: ScaleOutOptions

    def _engine(self) -> Engine:
        if self.options.pipeline_parallel_size == 1:
            return super()._engine()
        scheduler = self._scheduler()
        return Engine(scheduler, self.runner, pace=MicroBatches(scheduler), trace=self.trace)

    def _build(self, seed: int) -> tuple[Runtime, StepRunner]:
        if self.options.num_ranks == 1:
            return super()._build(seed)
        check_stages(ModelConfig.from_hf(self.source.config), self.options.pipeline_parallel_size)
        from beyond.scale_out.pipeline_ranks import PipelineJob, build_stage_worker  # here: as in stage F

        job = PipelineJob.of(self.source.name, self.device, self.dtype, seed, self.options)
        return self._start_ranks(job, build_stage_worker)

    def _scheduler(self) -> Scheduler:
        options = self.options
        if options.pipeline_parallel_size == 1:
            return super()._scheduler()
        return super()._scheduler(partial(PipelineScheduler, num_micro_batches=options.batches_in_flight))
