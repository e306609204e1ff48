"""Find and load the small model that guesses, and allocate memory for its keys and values."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch

from beyond.options import Options
from beyond.speculation.draft_model import FollowingBatch, ModelDrafter
from beyond.structured.constraints import Constraints
from stage_a_naive.checkpoints.loading import ModelSource, resolve
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_d_paged.attention import BackendUnavailable
from stage_d_paged.config import ModelConfig
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_e_batching.llm import make_sampler
from stage_f_graph_tp.compose import compose_runner
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.options import GraphOptions

TUTOR_DRAFT = TUTOR_PATH.parent / "tutor_draft"


def find_draft(name: str | None, model: str, runtime: Runtime, num_tokens: int) -> ModelSource:
    """Find the draft model called `name`, or the tutor's.

    Args:
        model: the large model's name.
        runtime: the large model.
        num_tokens: of the large model's tokenizer.

    Raises:
        ValueError: there is none, or its vocabulary or number of positions does not fit the large model.
    """
    found = name or (TUTOR_DRAFT if model == "tutor" else None)
    if found is None:
        raise ValueError("speculation='model' needs draft_model=: a small model of the same tokenizer")
    source = resolve(found)
    config = ModelConfig.from_hf(source.config)
    # A vocabulary may be padded beyond the tokenizer's tokens, by different amounts in models of different sizes.
    most, positions = runtime.config.vocab_size, runtime.max_model_len
    least = min(num_tokens, most)
    if not least <= config.vocab_size <= most:
        allowed = f"{least} to {most}" if least < most else most
        raise ValueError(
            f"draft_model={str(found)!r} has {config.vocab_size} tokens in its vocabulary, and the model needs "
            f"{allowed}; choose another"
        )
    if config.max_position_embeddings < positions:
        raise ValueError(
            f"draft_model={str(found)!r} has {config.max_position_embeddings} positions, and the model {positions}; "
            "choose another, or lower max_model_len"
        )
    return source


def load_draft(source: ModelSource, options: Options, runtime: Runtime, dtype: torch.dtype, seed: int) -> Runtime:
    """Load the small model, whole and in 16 bits, on the large model's device or its first rank's.

    If the large model's attention backend does not support its head size, it uses another backend.
    """
    plain = options.stage_f(kvcache_block_size=runtime.block_size, tensor_parallel_size=1)
    load = partial(load_runtime, source, device=runtime.device, dtype=dtype, seed=seed, patch=choose_layers)
    try:
        return load(plain)
    except BackendUnavailable as error:
        drafting = load(replace(plain, attention_backend="auto"))
        print(f"draft model: {error}; it runs with {drafting.backend.name!r}", file=sys.stderr)
        return drafting


def make_drafter(drafting: Runtime, kv_cache: KVCache, options: Options, constraints: Constraints) -> ModelDrafter:
    """Make the drafter for a loaded small model; `constraints` are for the small model's tokens."""
    plain = options.stage_f(tensor_parallel_size=1, max_num_penalty_seqs=1)  # it samples only guesses
    limits = plain.max_num_seqs, drafting.max_model_len, drafting.block_size
    batch = FollowingBatch(drafting.config.vocab_size, *limits)
    runner = compose_runner(drafting, kv_cache, make_sampler(drafting, plain, constraints), plain, batch)
    return ModelDrafter(runner, options, constraints.rewind)


def make_pools(runtime: Runtime, drafting: Runtime, options: GraphOptions) -> tuple[KVCache, KVCache]:
    """Make two pools with the same number of blocks, in the memory for one."""
    num_blocks = choose_num_blocks(runtime, options)
    if options.num_kvcache_blocks == -1:
        both = runtime.bytes_per_token + drafting.bytes_per_token
        num_blocks = max(1, num_blocks * runtime.bytes_per_token // both)
    return runtime.make_pool(num_blocks), drafting.make_pool(num_blocks)
