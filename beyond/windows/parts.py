"""The parts of an engine with a pool per kind of layer, from the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from beyond.options import Options
from beyond.windows.blocks import HybridBlockManager, WindowBlocks
from beyond.windows.pools import HybridKVCache, HybridPool, Limits
from beyond.windows.tables import HybridBatch, use_own_tables
from stage_d_paged.config import ModelConfig
from stage_d_paged.runtime import Runtime
from stage_e_batching.runner import ModelRunner
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.runner import StepRunner


def windowed_layers(config: ModelConfig, options: Options) -> tuple[int, ...]:
    """Return the window of each layer; 0 if the layer sees all tokens."""
    longest = min(options.max_model_len, config.max_position_embeddings)
    return tuple(kind.window if kind.window < longest else 0 for kind in config.layers)


def fit_options(options: Options, config: ModelConfig) -> Options:
    """Lower the tokens of a step to `max_model_len`, because the windowed pool must hold all of them for a step.

    If no layer has a window, the option is switched off.
    """
    if not options.hybrid_kv_cache:
        return options
    if not any(windowed_layers(config, options)):
        return replace(options, hybrid_kv_cache=False)
    most = max(options.max_rows, options.max_model_len)
    return replace(options, max_num_batched_tokens=min(options.max_num_batched_tokens, most))


def divide_pool(runtime: Runtime, options: Options) -> Runtime:
    """Divide a runtime's pool by kinds of layers, and let each layer read the block table of its kind."""
    if not options.hybrid_kv_cache:
        return runtime
    windows = windowed_layers(runtime.config, options)
    is_windowed = tuple(map(bool, windows))
    limits = Limits(
        max(windows),
        runtime.max_model_len,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.num_speculative_tokens if options.speculation != "off" else 0,
    )
    use_own_tables(runtime.model, is_windowed, runtime.block_size)
    notes = [note for note in runtime.notes if not note.startswith("KV cache: ")]  # of one pool
    notes.append(
        f"KV cache: {sum(is_windowed)} of {len(windows)} layers keep only the last {max(windows)} tokens, in a pool of "
        f"their own; a step has at most {options.max_num_batched_tokens} tokens"
    )
    return replace(runtime, pool=HybridPool(runtime.pool, is_windowed, limits), notes=tuple(notes))


def hybrid_batch(options: Options, batch: Callable[..., InputBatch] = InputBatch) -> Callable[..., InputBatch]:
    """Wrap a factory of input builders so that the builders serve both kinds of layers."""
    if not options.hybrid_kv_cache:
        return batch
    return cast("Callable[..., InputBatch]", lambda *limits: HybridBatch(batch(*limits)))


def block_manager_of(runner: StepRunner | ModelRunner) -> partial[HybridBlockManager] | None:
    """Return the factory of the block manager for a runner with two pools, and connect its input builder; else None."""
    if not isinstance(runner.kv_cache, HybridKVCache):
        return None
    windows = WindowBlocks(runner.kv_cache)
    cast("HybridBatch", cast("StepRunner", runner).batch).windows = windows
    return partial(HybridBlockManager, windows)
