"""A loaded model with 8-bit weights, an 8-bit KV cache, or both, on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from beyond.quantization.attention import use_eight_bits
from beyond.quantization.checkpoint import Int8Tensors
from beyond.quantization.formats import FORMATS
from beyond.quantization.kv_cache import QuantizedRuntime
from beyond.quantization.layers import build_quantized_model
from beyond.quantization.options import QuantizationOptions
from stage_a_naive.checkpoints.loading import ModelSource
from stage_d_paged.attention import AttentionBackend
from stage_d_paged.config import ModelConfig
from stage_d_paged.fused_mlp import use_fused_mlp
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import Runtime, load_runtime
from stage_d_paged.weights import TensorSource
from stage_f_graph_tp.kernels import choose_layers

FP8_CAPABILITY = (8, 9)  # e4m3 is converted in hardware: Ada, Hopper and later


def load_quantized_runtime(
    source: ModelSource,
    options: QuantizationOptions,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    build: Callable[..., DecoderModel] = build_quantized_model,
) -> Runtime:
    """Stage D's `load_runtime`, with what the options ask for in 8 bits.

    Args:
        build: called as `build_quantized_model`, which is the default.

    Raises:
        ValueError: this GPU has no e4m3, or the attention backend cannot read an 8-bit cache.
    """
    _check_fp8(options, device)
    quantized_checkpoint = getattr(source.config, "quantization_config", None) is not None

    def build_model(
        config: ModelConfig,
        backend: AttentionBackend,
        max_model_len: int,
        tensors: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DecoderModel:
        if options.kv_cache_dtype != "auto":
            backend = use_eight_bits(backend, device, dtype, config.head_dim)
        if quantized_checkpoint:
            assert source.path is not None
            tensors = Int8Tensors(source.path)
        return build(config, backend, max_model_len, tensors, dtype, device, options)

    runtime = load_runtime(source, options, device, dtype, seed, build_model, _choose_layers)
    runtime = replace(runtime, notes=(*runtime.notes, *_notes(options)))
    if options.kv_cache_dtype == "auto":
        return runtime
    return QuantizedRuntime(**vars(runtime), kv_cache_dtype=FORMATS[options.kv_cache_dtype])


def _choose_layers(model: DecoderModel, options: QuantizationOptions, device: torch.device) -> str:
    """Replace layers by fused ones on a GPU; return a line that says what is used."""
    if not options.uses_eight_bits:
        return choose_layers(model, options, device, options.fused)
    if device.type != "cuda":
        if options.quantization is None:
            return use_fused_mlp(model, options, device)
        return "layers: PyTorch's; every product dequantises its matrix first"
    from beyond.quantization.fused_layers import fuse_layers, use_kernels  # here: only a GPU needs Triton

    use_kernels(model)
    if not options.fused:
        return "layers: stage D's, with our Triton products"
    fuse_layers(model, model.layers[0].self_attn.backend)
    return "layers: our Triton kernels, reading 8 bits"


def _notes(options: QuantizationOptions) -> list[str]:
    notes = []
    if options.quantization:
        per = "output feature"
        if options.quantization_group_size:
            per += f" and {options.quantization_group_size} inputs"
        notes.append(f"weights: {options.quantization}, a scale per {per}")
    if options.kv_cache_dtype != "auto":
        notes.append(f"KV cache: {options.kv_cache_dtype}, a scale per token and head")
    return notes


def _check_fp8(options: QuantizationOptions, device: torch.device) -> None:
    if device.type != "cuda" or "fp8" not in (options.quantization, options.kv_cache_dtype):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ValueError(f"fp8 needs compute capability {FP8_CAPABILITY}, this GPU has {capability}; use 'int8'")
