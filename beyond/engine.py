"""The engine with all parts.

    from beyond import LLM

    llm = LLM("Qwen/Qwen2.5-0.5B-Instruct", quantization="int8", kv_cache_dtype="int8", speculation="ngram")

Stage F's engine is composed of parts. Each package here has other parts, and the options choose among them:

    formats     how weights, keys and values are stored              quantization/parts.py
    drafts      what makes guesses, and how they are verified      speculation/drafts.py, ahead_drafts.py
    placement   which layers run on which device                     ranks.py, scale_out/pipeline_ranks.py
    constraints which tokens may come next                           structured/constraints.py
    pools       how far back each kind of layer keeps its tokens     windows/parts.py

Only this file knows all of them. `options.py` lists options that cannot be combined.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from beyond.options import Options
from beyond.quantization.checkpoint import options_of_checkpoint, resolve_quantized
from beyond.quantization.floor import QuantizedBytes
from beyond.quantization.parts import load_quantized_runtime
from beyond.scale_out.micro_batches import MicroBatches
from beyond.scale_out.pipeline_scheduler import PipelineScheduler
from beyond.scale_out.stages import check_stages
from beyond.speculation.ahead_drafts import DeviceDrafts, guess_of_table
from beyond.speculation.device_inputs import AheadBatch, TableTokens
from beyond.speculation.draft_model import ModelDrafter
from beyond.speculation.draft_runtime import find_draft, load_draft, make_drafter, make_pools
from beyond.speculation.drafts import HostDrafts, SpeculationCounters, draft_of
from beyond.speculation.host_inputs import DraftBatch, verification_graphs
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.rows import DraftRows, ShrinkingBlockManager
from beyond.speculation.sequence import guessing_sequence
from beyond.speculation.token_table import TokenTable
from beyond.structured.checks import check_structured_outputs
from beyond.structured.constraints import Constraints, constrained_sampler, constraints_of
from beyond.structured.grammars import Grammars, WhenCompiled
from beyond.windows.parts import block_manager_of, divide_pool, fit_options, hybrid_batch
from stage_a_naive.contract.outputs import Metrics
from stage_d_paged.config import ModelConfig
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime, choose_num_blocks
from stage_e_batching.engine import Engine
from stage_e_batching.sampler import Sampler
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import Counters
from stage_f_graph_tp import llm as stage_f
from stage_f_graph_tp.compose import compose_runner
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.megakernel import build_early
from stage_f_graph_tp.runner import StepRunner
from stage_f_graph_tp.step_input import TokenSource


class LLM(stage_f.LLM):
    """Stage F's engine with 8-bit formats, speculation and pipeline stages, in any combination but a few.

    In float32, drafts and stages change no token, even if tokens are sampled with a seed. In 16 bits a verification may
    round scores differently from a decode step: if the best two tokens are closer than that, the other one may win, as
    in a batch of another size.

    Under `torchrun` every process makes the same `LLM`. On rank 0 the call returns; the other processes work for rank 0
    and exit when it closes.

    Args:
        model, device, dtype, seed: as in stage A; `model` may also be a directory with an int8 checkpoint.
        options: see `Options`; passed by name.

    Raises:
        ModelError, TypeError, ValueError, MemoryError, OSError, WorkerError: as in stage F.
        ValueError: a combination of options that is not supported; the message says what to do instead.
    """

    options_class = Options
    options: Options
    resolve = staticmethod(resolve_quantized)
    grammars_class = Grammars

    @property
    def model_bytes(self) -> QuantizedBytes:
        """The bytes that a decode step reads."""
        return QuantizedBytes(super().model_bytes, self.options)

    def memory_line(self, metrics: Metrics) -> str:
        """Return a summary line: how many steps read the weights, and how many guesses were right, since the start."""
        if self.options.speculation == "off":
            return super().memory_line(metrics)
        found = self.calls.stats()
        return (
            f"{self.model_bytes.weight_bytes / 1e6:9.1f} MB of weights read per step; {found['num_steps']} steps for "
            f"{found['num_generated_tokens']} tokens, {found['num_accepted_tokens']} of {found['num_draft_tokens']} "
            "guesses right"
        )

    def _build(self, seed: int) -> tuple[Runtime, StepRunner]:
        options = options_of_checkpoint(self.source, self.options)
        options = self.options = fit_options(options, ModelConfig.from_hf(self.source.config))
        length, guesses = options.num_speculative_tokens, options.speculation
        rows = replace(options, max_num_seqs=options.max_rows)  # a batch slot for every row of a step
        ngram = self._drafter = NgramDrafter(length) if guesses == "ngram" else None
        if options.num_ranks > 1:
            return self._build_on_ranks(rows, seed)
        if options.uses("megakernel") and not options.uses_eight_bits:
            build_early(ModelConfig.from_hf(self.source.config), self.dtype, self.device)
        runtime = divide_pool(load_quantized_runtime(self.source, rows, self.device, self.dtype, seed), rows)
        drafting = self._load_draft(runtime, seed) if guesses == "model" else None
        guess = partial(guess_of_table, ngram) if ngram is not None and options.guesses_ahead else draft_of
        sampler = constrained_sampler(runtime, rows, self.source, guess)  # before the pools, as in stage E
        if options.uses_eight_bits and options.uses("megakernel") and self.device.type == "cuda":
            note = "persistent megakernel: not used (it reads 16-bit weights and a 16-bit KV cache)"
            runtime = replace(runtime, notes=(*runtime.notes, note))
            rows = replace(rows, without=(*rows.without, "megakernel"))
        limits = rows.max_num_seqs, runtime.max_model_len, runtime.block_size
        if options.guesses_ahead:
            table = TokenTable(rows.max_num_seqs, runtime.max_model_len, length, runtime.device)
            tokens = TableTokens(LastTokens(rows.max_num_seqs, runtime.device), table, runtime.block_size)
            kv_cache = runtime.make_pool(choose_num_blocks(runtime, rows))  # of what the token table leaves
            batch = hybrid_batch(rows, AheadBatch)(*limits, length, tokens, sampler)
            graphs = verification_graphs(batch, length, rows.max_num_seqs, TokenSource.TABLE)
            return runtime, compose_runner(runtime, kv_cache, sampler, rows, batch, tokens, [graphs])
        if drafting is not None:
            kv_cache, drafting_cache = make_pools(runtime, drafting, rows)
            self._drafter = self._make_drafter(drafting, drafting_cache, sampler)
        else:
            kv_cache = runtime.make_pool(choose_num_blocks(runtime, rows))
        if guesses == "off":
            return runtime, compose_runner(runtime, kv_cache, sampler, rows, hybrid_batch(rows)(*limits))
        batch = hybrid_batch(rows, DraftBatch)(*limits)
        graphs = verification_graphs(batch, length, rows.max_num_seqs, TokenSource.HOST)
        return runtime, compose_runner(runtime, kv_cache, sampler, rows, batch, graphs=[graphs])

    def _build_on_ranks(self, rows: Options, seed: int) -> tuple[Runtime, StepRunner]:
        """Build on several ranks. Only rank 0 knows about drafts; the others just run more rows."""
        from beyond.ranks import Job, build_worker  # here: one rank needs no torch.distributed

        check_stages(ModelConfig.from_hf(self.source.config), rows.pipeline_parallel_size)
        job = Job.of(self.source.name, self.device, self.dtype, seed, rows)
        runtime, runner = self._start_ranks(job, build_worker, InputBatch if rows.speculation == "off" else DraftBatch)
        if rows.speculation == "model":
            drafting = self._load_draft(runtime, seed)
            kv_cache = drafting.make_pool(runner.kv_cache.num_blocks)
            self._drafter = self._make_drafter(drafting, kv_cache, runner.sampler)
        return runtime, runner

    def _load_draft(self, runtime: Runtime, seed: int) -> Runtime:
        source = find_draft(self.options.draft_model, self.source.name, runtime, len(self.tokenizer))
        return load_draft(source, self.options, runtime, self.dtype, seed)

    def _make_drafter(self, drafting: Runtime, kv_cache: KVCache, sampler: Sampler) -> ModelDrafter:
        """Make the drafter with a small model, whose tokens are constrained by the same grammars."""
        slots, device = self.options.max_num_seqs, drafting.device
        constraints = Constraints(constraints_of(sampler).grammars, slots, device, draft_of)
        return make_drafter(drafting, kv_cache, self.options, constraints)

    def _engine(self) -> Engine:
        """Make the engine: its depth is 0, 1 or that of the micro-batches, and its drafts may wait for tokens."""
        options, scheduler = self.options, self._scheduler()
        drafts, counters = None, Counters()
        if self._drafter is not None:
            counters, rows = SpeculationCounters(), DraftRows(scheduler, options.max_rows)
            if options.guesses_ahead:
                drafts = DeviceDrafts(self._drafter, rows, counters, options.num_speculative_tokens)
            else:
                shorten = constraints_of(self.runner.sampler).shorten if options.speculation == "ngram" else None
                drafts = HostDrafts(self._drafter, rows, counters, shorten)
        depth = (
            MicroBatches(scheduler).next_depth if isinstance(scheduler, PipelineScheduler) else int(options.overlaps)
        )
        parts = {"drafts": drafts, "counters": counters, "trace": self.trace, "check": self._grammars.error_of}
        return Engine(scheduler, self.runner, depth=depth, **parts)

    def _scheduler(self) -> Scheduler:
        options, parts = self.options, {}
        if options.speculation != "off":
            parts = {"new_sequence": guessing_sequence, "block_manager_class": ShrinkingBlockManager}
        if (block_manager := block_manager_of(self.runner)) is not None:
            parts["block_manager_class"] = block_manager
        make = partial(Scheduler, **parts)
        if options.pipeline_parallel_size > 1:
            make = partial(PipelineScheduler, num_micro_batches=options.batches_in_flight, **parts)
        scheduler = super()._scheduler(make)
        scheduler.order = WhenCompiled(self._grammars)
        return scheduler

    @property
    def _grammars(self) -> Grammars:
        return constraints_of(self.runner.sampler).grammars

    def _check_structured_outputs(self, *given: Any) -> None:
        check_structured_outputs(self._grammars, *given)
