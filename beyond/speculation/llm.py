"""Stage F's engine with speculative decoding.

    guess -> schedule one row per guess -> run all rows in one step -> keep what was right    (drafts.py)

Guesses come from earlier text (ngram.py) or from a small model (draft_model.py). Those from earlier text are made and
checked on the device, a step ahead of the host (ahead_drafts.py, token_table.py).
"""

from __future__ import annotations

from functools import partial

from beyond.speculation.ahead_drafts import DeviceDrafts
from beyond.speculation.device_drafts import AheadBatch, TableTokens
from beyond.speculation.draft_model import FollowingBatch, ModelDrafter
from beyond.speculation.drafts import HostDrafts, SpeculationCounters
from beyond.speculation.host_drafts import DraftBatch, verification_graphs
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.options import SpeculationOptions
from beyond.speculation.rows import DraftRows, ShrinkingBlockManager
from beyond.speculation.sequence import SpeculativeSequence
from beyond.speculation.token_table import TokenTable
from stage_a_naive.checkpoints.loading import ModelSource, resolve
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract.outputs import Metrics
from stage_d_paged.config import ModelConfig
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_e_batching.engine import Engine
from stage_e_batching.llm import make_sampler
from stage_e_batching.scheduler import Scheduler
from stage_f_graph_tp import llm as stage_f
from stage_f_graph_tp.compose import compose_runner
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.runner import StepRunner
from stage_f_graph_tp.step_input import TokenSource

TUTOR_DRAFT = TUTOR_PATH.parent / "tutor_draft"


def make_pools(runtime: Runtime, drafting: Runtime, options: GraphOptions) -> tuple[KVCache, KVCache]:
    """Two pools of as many blocks, in the memory that there is for one."""
    num_blocks = choose_num_blocks(runtime, options)
    if options.num_kvcache_blocks == -1:
        both = runtime.bytes_per_token + drafting.bytes_per_token
        num_blocks = max(1, num_blocks * runtime.bytes_per_token // both)
    return runtime.make_pool(num_blocks), drafting.make_pool(num_blocks)


class LLM(stage_f.LLM):
    """Stage F's engine, which guesses tokens and verifies them.

    In float32, answers are those of stage F, token for token, also where they are sampled with a seed. In 16 bits a
    verification may round scores in another way than a decode step: where the best two tokens are closer than that,
    the other one may be taken, as also in a batch of another size.

    Args:
        model, device, dtype, seed: as in stage A.
        options: those of `SpeculationOptions`, by name.

    Raises:
        ModelError, TypeError, ValueError, MemoryError, OSError, WorkerError: as in stage F.
    """

    options_class = SpeculationOptions
    options: SpeculationOptions
    table_class = TokenTable

    def _engine(self) -> Engine:
        scheduler, counters = self._scheduler(), SpeculationCounters()
        rows = DraftRows(scheduler, self.options.max_rows)
        drafts = None
        if self._guesses_ahead:
            drafts = DeviceDrafts(self._drafter, rows, counters, self.options.num_speculative_tokens)
        elif self._drafter is not None:
            drafts = HostDrafts(self._drafter, rows, counters)
        depth = 1 if self._overlaps else 0
        return Engine(scheduler, self.runner, depth=depth, drafts=drafts, counters=counters, trace=self.trace)

    @property
    def _overlaps(self) -> bool:
        # Where prompts have steps of their own, decodes pause, and a step may mix tokens in flight with known ones.
        return self.options.overlap and self.options.enable_chunked_prefill

    @property
    def _guesses_ahead(self) -> bool:
        """Whether the device guesses, so that no step waits for the one before."""
        options = self.options
        return self._overlaps and options.speculation == "ngram" and options.tensor_parallel_size == 1

    def memory_line(self, metrics: Metrics) -> str:
        """Say for a summary how many steps read the weights, and how many guesses were right, since the start."""
        if self.options.speculation == "off":
            return super().memory_line(metrics)
        found = self.calls.stats()
        return (
            f"{self.model_bytes.weight_bytes / 1e6:9.1f} MB of weights read per step; {found['num_steps']} steps for "
            f"{found['num_generated_tokens']} tokens, {found['num_accepted_tokens']} of {found['num_draft_tokens']} "
            "guesses right"
        )

    def _build(self, seed: int) -> tuple[Runtime, StepRunner]:
        options, length = self.options, self.options.num_speculative_tokens
        rows = options.stage_f(max_num_seqs=options.max_rows)  # a batch slot for every row of a step
        self._drafter = NgramDrafter(length) if options.speculation == "ngram" else None
        if options.tensor_parallel_size > 1:
            return self._build_ranks(rows, seed)
        patch = partial(choose_layers, fused=options.fused)
        runtime = load_runtime(self.source, rows, self.device, self.dtype, seed, patch=patch)
        drafting = self._load_draft(runtime, seed) if options.speculation == "model" else None
        sampler = make_sampler(runtime, rows)  # before the pools, as in stage E
        limits = rows.max_num_seqs, runtime.max_model_len, runtime.block_size
        if self._guesses_ahead:
            table = self.table_class(rows.max_num_seqs, runtime.max_model_len, length, runtime.device)
            tokens = TableTokens(LastTokens(rows.max_num_seqs, runtime.device), table, runtime.block_size)
            kv_cache = runtime.make_pool(choose_num_blocks(runtime, rows))  # of the memory that the table leaves
            batch = AheadBatch(*limits, length, tokens, sampler)
            graphs = verification_graphs(batch, length, rows.max_num_seqs, TokenSource.TABLE)
            return runtime, compose_runner(runtime, kv_cache, sampler, rows, batch, tokens, [graphs])
        if drafting is not None:
            kv_cache, drafting_cache = make_pools(runtime, drafting, rows)
            self._draft_with(drafting, drafting_cache)
        else:
            kv_cache = runtime.make_pool(choose_num_blocks(runtime, rows))
        if options.speculation == "off":
            return runtime, compose_runner(runtime, kv_cache, sampler, rows)
        batch = DraftBatch(*limits)
        graphs = verification_graphs(batch, length, rows.max_num_seqs, TokenSource.HOST)
        return runtime, compose_runner(runtime, kv_cache, sampler, rows, batch, graphs=[graphs])

    def _load_draft(self, runtime: Runtime, seed: int) -> Runtime:
        """Load the small model, whole, on the device of the large one or of its first rank."""
        options = self.options.stage_f(kvcache_block_size=runtime.block_size, tensor_parallel_size=1)
        patch = partial(choose_layers, fused=options.fused)
        return load_runtime(self._draft_source(runtime), options, runtime.device, self.dtype, seed, patch=patch)

    def _draft_with(self, drafting: Runtime, kv_cache: KVCache) -> None:
        options = self.options.stage_f(tensor_parallel_size=1, max_num_penalty_seqs=1)  # what it samples are guesses
        limits = options.max_num_seqs, drafting.max_model_len, drafting.block_size
        batch = FollowingBatch(drafting.config.vocab_size, *limits)
        runner = compose_runner(drafting, kv_cache, make_sampler(drafting, options), options, batch)
        self._drafter = ModelDrafter(runner, self.options)

    def _draft_source(self, runtime: Runtime) -> ModelSource:
        """Find the draft model that was asked for, or the tutor's.

        Raises:
            ValueError: there is none, or its tokens or positions are not those of the model.
        """
        name = self.options.draft_model or (self.source.name == "tutor" and TUTOR_DRAFT)
        if not name:
            raise ValueError("speculation='model' needs draft_model=: a small model of the same tokenizer")
        source = resolve(name)
        config = ModelConfig.from_hf(source.config)
        # A vocabulary may be padded to more tokens than the tokenizer has, in each size of a model to others.
        most, positions = runtime.config.vocab_size, runtime.max_model_len
        least = min(len(self.tokenizer), most)
        if not least <= config.vocab_size <= most:
            allowed = f"{least} to {most}" if least < most else most
            raise ValueError(
                f"draft_model={str(name)!r} has {config.vocab_size} tokens in its vocabulary, and the model needs "
                f"{allowed}; choose another"
            )
        if config.max_position_embeddings < positions:
            raise ValueError(
                f"draft_model={str(name)!r} has {config.max_position_embeddings} positions, and the model {positions}; "
                "choose another, or lower max_model_len"
            )
        return source

    def _build_ranks(self, options: GraphOptions, seed: int) -> tuple[Runtime, StepRunner]:
        """Stage F's ranks. Only rank 0 knows of drafts: the others are told to run more rows."""
        from stage_f_graph_tp.ranks import Job, build_worker  # here: as in stage F

        job = Job.of(self.source.name, self.device, self.dtype, seed, options)
        runtime, runner = self._start_ranks(job, build_worker, DraftBatch)
        if self.options.speculation == "model":
            drafting = self._load_draft(runtime, seed)
            self._draft_with(drafting, drafting.make_pool(runner.kv_cache.num_blocks))
        return runtime, runner

    def _scheduler(self) -> Scheduler:
        parts = {"sequence_class": SpeculativeSequence, "block_manager_class": ShrinkingBlockManager}
        return super()._scheduler(partial(Scheduler, **parts))
