"""Load a model and make its pool: everything that must be on a device before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from stage_a_naive.checkpoints.loading import ModelSource
from stage_a_naive.checkpoints.memory import check_room
from stage_d_paged.attention import AttentionBackend, pick_backend
from stage_d_paged.batch import largest_step
from stage_d_paged.config import ModelConfig
from stage_d_paged.fused_mlp import use_fused_mlp
from stage_d_paged.kv_cache import KVCache, cpu_num_blocks, cuda_num_blocks
from stage_d_paged.layers import Embedding, Linear
from stage_d_paged.model import DecoderModel, MakeEmbedding, MakeLinear, MakeMLP, make_mlp
from stage_d_paged.options import EngineOptions
from stage_d_paged.weights import TensorSource, WeightLoader, tensor_source


class Formats(NamedTuple):
    """How weights, and cached keys and values, are stored: what makes the parts that hold them, and reads them.

    Each is called as its default, which stores numbers in the model's dtype.
    """

    linear: MakeLinear = Linear
    lm_head: MakeEmbedding = Embedding
    mlp: MakeMLP = make_mlp
    tensors: Callable[..., TensorSource] = tensor_source
    pool: Any = KVCache  # has `bytes_per_token` too
    backend: Callable[..., AttentionBackend] = pick_backend


MODEL_DTYPE = Formats()


@dataclass(frozen=True)
class Runtime:
    """What a step runs on."""

    config: ModelConfig  # of the whole model; `model.config` describes this device's share
    backend: AttentionBackend
    model: DecoderModel
    max_model_len: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    notes: tuple[str, ...]  # choices and their reasons, one line each
    pool: Any = KVCache  # makes the pool: `Formats.pool`

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V on this device."""
        config = self.model.config
        return self.pool.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype)

    def make_pool(self, num_blocks: int) -> KVCache:
        config = self.model.config
        return self.pool(
            config.num_layers,
            num_blocks,
            self.block_size,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            self.device,
        )


def empty_model(
    config: ModelConfig,
    backend: AttentionBackend,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    formats: Formats,
) -> DecoderModel:
    """Make a model with uninitialised weights; `MemoryError` if they do not fit on the device."""
    parts = {"linear": formats.linear, "lm_head": formats.lm_head, "mlp": formats.mlp}
    make = partial(DecoderModel, config, backend, max_model_len, dtype, **parts)
    check_room(make(device=torch.device("meta")), device)
    return make(device=device)


def build_model(
    config: ModelConfig,
    backend: AttentionBackend,
    max_model_len: int,
    tensors: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    formats: Formats = MODEL_DTYPE,
) -> DecoderModel:
    """Make a model and fill in its weights."""
    model = empty_model(config, backend, max_model_len, dtype, device, formats)
    model.load(WeightLoader(tensors))
    return model


def load_runtime(
    source: ModelSource,
    options: EngineOptions,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    build: Callable[..., DecoderModel] = build_model,
    patch: Callable[[DecoderModel, Any, torch.device], str] = use_fused_mlp,
    formats: Formats = MODEL_DTYPE,
) -> Runtime:
    """Pick the attention backend, build the model on the device and fill in its weights.

    `build` is called as `build_model`, which is the default. `patch` replaces what the options and the device allow
    by something faster, and returns a line that says what it did.
    """
    config = ModelConfig.from_hf(source.config)
    has_windows = any(kind.window for kind in config.layers)
    backend = formats.backend(options.attention_backend, device, dtype, config.head_dim, has_windows)
    block_size = options.kvcache_block_size or backend.preferred_block_size
    if block_size % backend.block_size_multiple:
        raise ValueError(
            f"kvcache_block_size={block_size}: attention_backend={backend.name!r} takes multiples of "
            f"{backend.block_size_multiple}; leave kvcache_block_size away, or set attention_backend='triton'"
        )
    max_model_len = min(options.max_model_len, config.max_position_embeddings)
    tensors = formats.tensors(source, seed, dtype, device)
    model = build(config, backend, max_model_len, tensors, dtype, device, formats)
    notes = [f"attention: {backend.name} ({backend.reason})", patch(model, options, device)]
    if max_model_len < options.max_model_len:
        notes.append(f"max_model_len={options.max_model_len} is lowered to {max_model_len}, the model's positions")
    if windows := [kind.window for kind in config.layers if 0 < kind.window < max_model_len]:
        notes.append(
            f"KV cache: {len(windows)} of {config.num_layers} layers see only the last {max(windows)} tokens; "
            f"one pool serves all layers, so these keep up to {max_model_len} tokens of a request too"
        )
    model.eval()
    return Runtime(config, backend, model, max_model_len, block_size, dtype, device, tuple(notes), formats.pool)


def choose_num_blocks(runtime: Runtime, options: EngineOptions) -> int:
    """Return the number of blocks in the pool: from the option, or as many as fit."""
    if options.num_kvcache_blocks != -1:
        return options.num_kvcache_blocks
    block_bytes = runtime.bytes_per_token * runtime.block_size
    if runtime.device.type == "cpu":
        return cpu_num_blocks(block_bytes, runtime.block_size, runtime.max_model_len)

    @torch.inference_mode()
    def run_largest_step() -> None:
        length = min(runtime.max_model_len, options.max_num_batched_tokens)
        step = largest_step(options.max_num_batched_tokens, length, runtime.block_size, runtime.device)
        hidden = runtime.model(step.input_ids, step.positions, runtime.make_pool(1), step.metadata)
        rows = min(options.max_num_seqs, options.max_num_batched_tokens)
        runtime.model.compute_logits(hidden[:rows]).float()

    return cuda_num_blocks(block_bytes, options.gpu_memory_utilization, runtime.device, run_largest_step)
