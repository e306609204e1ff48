"""Choose the parts that hold and read 8 bits, for stage D's `load_runtime`."""

from __future__ import annotations

from functools import partial

import torch

from beyond.experts.parts import with_experts
from beyond.options import Options
from beyond.quantization.attention import pick_quantized_backend
from beyond.quantization.checkpoint import open_tensors
from beyond.quantization.formats import FORMATS
from beyond.quantization.kv_cache import QuantizedPool
from beyond.quantization.layers import QuantizedEmbedding, QuantizedLinear, Scheme
from stage_a_naive.checkpoints.loading import ModelSource
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import MODEL_DTYPE, BuildModel, Formats, Runtime, build_model, load_runtime
from stage_f_graph_tp import kernels

FP8_CAPABILITY = (8, 9)  # e4m3 is converted in hardware: Ada, Hopper and later


def make_formats(options: Options, device: torch.device) -> Formats:
    """Choose the functions that make the matrices and the pool.

    Raises:
        ValueError: this GPU does not support e4m3.
    """
    _check_fp8(options, device)
    formats = MODEL_DTYPE
    if options.quantization is not None:
        scheme = Scheme(FORMATS[options.quantization], options.quantization_group_size)
        if device.type == "cuda":
            from beyond.quantization.fused_layers import QuantizedProducts  # here: only a GPU needs Triton

            scheme = scheme._replace(product=QuantizedProducts(device, pdl=options.uses("pdl")))
        formats = formats._replace(linear=partial(QuantizedLinear, scheme), tensors=open_tensors)
        if options.quantize_lm_head:
            formats = formats._replace(lm_head=partial(QuantizedEmbedding, scheme))
    if options.kv_cache_dtype != "auto":
        pool = QuantizedPool(FORMATS[options.kv_cache_dtype])
        formats = formats._replace(pool=pool, backend=pick_quantized_backend)
    return formats


def load_quantized_runtime(
    source: ModelSource,
    options: Options,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    build: BuildModel = build_model,
) -> Runtime:
    """Load a model as stage D's `load_runtime` does, in the formats that the options ask for."""
    formats = with_experts(make_formats(options, device), source, options, device)
    return load_runtime(source, options, device, dtype, seed, build, choose_layers, formats)


def choose_layers(model: DecoderModel, options: Options, device: torch.device) -> str:
    """As stage F's `choose_layers`, for any format; return a line about the layers in use."""
    return "; ".join([_choose_layers(model, options, device), *_notes(options)])


def _choose_layers(model: DecoderModel, options: Options, device: torch.device) -> str:
    if model.config.has_experts and device.type == "cuda":
        from beyond.experts.fused_layers import choose_layers as choose_expert_layers  # here: only a GPU needs Triton

        return choose_expert_layers(model, options)
    if options.quantization is not None and device.type != "cuda":
        return "layers: PyTorch's; every product dequantises its matrix first"
    fused = options.uses("fused_layers") or options.uses("skinny_gemm")
    if options.quantization is not None and not fused:
        return "layers: stage D's, with our Triton products"
    if options.quantization is not None and model.config.beyond_kernels:
        return f"layers: stage D's, with our Triton products (fused ones do not compute {model.config.beyond_kernels})"
    if options.uses_eight_bits and fused and device.type == "cuda" and not model.config.beyond_kernels:
        from beyond.quantization.fused_layers import fuse_layers

        fuse_layers(model, options)
        return "layers: our Triton kernels, reading 8 bits"
    return kernels.choose_layers(model, options, device)


def _notes(options: Options) -> list[str]:
    notes = []
    if options.quantization:
        per = "output feature"
        if options.quantization_group_size:
            per += f" and {options.quantization_group_size} inputs"
        notes.append(f"weights: {options.quantization}, a scale per {per}")
    if options.kv_cache_dtype != "auto":
        notes.append(f"KV cache: {options.kv_cache_dtype}, a scale per token and head")
    return notes


def _check_fp8(options: Options, device: torch.device) -> None:
    if device.type != "cuda" or "fp8" not in (options.quantization, options.kv_cache_dtype):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ValueError(f"fp8 needs compute capability {FP8_CAPABILITY}, this GPU has {capability}; use 'int8'")
