"""Stage F's engine with speculative decoding.

    guess (ngram.py) -> schedule one row per guess -> verify all rows in one step -> keep what was right  (engine.py)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from beyond.speculation.engine import SpeculativeEngine
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.options import SpeculationOptions
from beyond.speculation.runner import DraftBatch, SpeculativeRunner
from beyond.speculation.scheduler import DraftScheduler
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_e_batching.engine import Engine
from stage_f_graph_tp import llm as stage_f
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.model_runner import GraphModelRunner


class LLM(stage_f.LLM):
    """Stage F's engine, which guesses tokens and verifies them.

    Answers are those of stage F, token for token, also where they are sampled with a seed.

    Args:
        model, device, dtype, seed: as in stage A.
        options: those of `SpeculationOptions`, by name.

    Raises:
        ModelError, TypeError, ValueError, MemoryError, OSError, WorkerError: as in stage F.
    """

    options_class = SpeculationOptions

    @property
    def engine_class(self) -> Callable[..., Engine]:
        options = self.options
        drafter = NgramDrafter(options.num_speculative_tokens) if options.speculation == "ngram" else None
        # Where prompts have steps of their own, decodes pause, and a step may mix tokens in flight with known ones.
        overlap = options.overlap and options.enable_chunked_prefill
        return partial(SpeculativeEngine, drafter=drafter, overlap=overlap)

    def _build(self, seed: int) -> tuple[Runtime, GraphModelRunner]:
        options = self.options.of_runner()
        if options.tensor_parallel_size > 1:
            return self._build_ranks(seed)
        patch = partial(choose_layers, fused=options.fused)
        runtime = load_runtime(self.source, options, self.device, self.dtype, seed, patch=patch)
        kv_cache = runtime.make_pool(choose_num_blocks(runtime, options))
        return runtime, SpeculativeRunner(runtime, kv_cache, options, self.options.num_speculative_tokens)

    def _build_ranks(self, seed: int) -> tuple[Runtime, GraphModelRunner]:
        """Stage F's ranks. Only rank 0 knows of drafts: the others are told to run more rows."""
        from stage_f_graph_tp.rank_runner import Job, build_worker  # here: as in stage F

        options = self.options.of_runner()
        job = Job.of(self.source.name, self.device, self.dtype, seed, options)
        runtime, runner = self._start_ranks(job, build_worker)
        runner.batch = DraftBatch(options.max_num_seqs, runtime.max_model_len, runtime.block_size)
        return runtime, runner

    def _scheduler(self) -> DraftScheduler:
        options = self.options
        return DraftScheduler(
            max_rows=options.max_rows,
            num_blocks=self.kv_cache.num_blocks,
            block_size=self.kv_cache.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_prefix_caching=options.enable_prefix_caching,
            enable_chunked_prefill=options.enable_chunked_prefill,
        )
