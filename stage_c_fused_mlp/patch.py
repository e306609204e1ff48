"""Put the fused MLP block into a model of transformers, and remove it again.

A decoder layer of Qwen or Llama ends with `x + mlp(norm(x))`. The patch gives each layer a new `forward` that ends with
one call of `fused_swiglu_mlp` instead, if there are few enough rows for that kernel. A prefill has many rows and still
goes through the layer's original `forward` and cuBLAS.

The kernel needs gate and up in one matrix. Together they are two thirds of an MLP's weights, so there must not be a
second copy: the patch packs them, one layer at a time, and makes the old parameters views of the packed matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from stage_c_fused_mlp.fused_mlp import load_operators, most_rows

Layer = Any  # a decoder layer of transformers, or its MLP: the attributes of these modules have no static type


class PatchError(ValueError):
    """The kernel cannot compute the model's kind of MLP; the message names the layer and the difference."""


@dataclass(frozen=True)
class PatchReport:
    """The result of a patch.

    Attributes:
        layers: the number of patched layers.
        bytes_before, bytes_after: of the model's parameters; storage that two parameters share counts once.
    """

    layers: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        mega = 1e6
        return (
            f"{self.layers} MLP blocks replaced; weights {self.bytes_before / mega:.1f} MB before, "
            f"{self.bytes_after / mega:.1f} MB after"
        )


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of the storage of all parameters and buffers, counting each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def replace_mlp_in_qwen(model: nn.Module, kernel: str = "auto") -> PatchReport:
    """Replace the MLP block of every layer. Qwen2, Qwen3 and Llama models of transformers have the same block.

    All layers are checked before the first is changed.

    Args:
        model: a causal language model, float32, float16 or bfloat16, on one device. Inference only: no gradients.
        kernel: as in `fused_swiglu_mlp`.

    Raises:
        PatchError: an MLP block has no gate, or the model is patched already.
        ExtensionError: the extension cannot be built, or has no CUDA part and the model is on a GPU.
    """
    layers = list(_layers(model))
    for index, layer in enumerate(layers):
        _check(layer, index)
    device = next(model.parameters()).device
    load_operators(device)
    before = parameter_bytes(model)
    for layer in layers:
        _pack(layer.mlp)
        for weight in (layer.post_attention_layernorm.weight, layer.mlp.down_proj.weight):
            weight.data = aligned(weight.data)
        layer.mlp.kernel, layer.mlp.most_rows = kernel, most_rows(kernel, device)
        layer.forward = MethodType(_fused_forward, layer)
    return PatchReport(len(layers), before, parameter_bytes(model))


def restore_mlp(model: nn.Module) -> None:
    """Undo `replace_mlp_in_qwen`: restore every layer's original `forward` and separate gate and up weights.

    Raises:
        PatchError: the model is not patched.
    """
    layers = list(_layers(model))
    for index, layer in enumerate(layers):
        if not _is_patched(layer):
            raise PatchError(f"layer {index} is not patched, so there is nothing to restore")
    for layer in layers:
        del layer.forward  # uncovers the method of the class
        del layer.mlp.gate_up_proj, layer.mlp.kernel, layer.mlp.most_rows
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight.data = linear.weight.data.clone()


def _layers(model: nn.Module) -> Iterator[Layer]:
    layers = getattr(getattr(model, "model", model), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise PatchError(
            f"{type(model).__name__} has no list of decoder layers; Qwen2, Qwen3 and Llama models have one"
        )
    yield from layers


def _is_patched(layer: Layer) -> bool:
    return "forward" in vars(layer)


def _check(layer: Layer, index: int) -> None:
    """Raise a `PatchError` unless the layer ends with RMSNorm and down(silu(gate(x)) * up(x)), without biases."""

    def refuse(reason: str) -> None:
        raise PatchError(f"layer {index} ({type(layer).__name__}) cannot be patched: {reason}")

    if _is_patched(layer):
        refuse("it is patched already; call restore_mlp first")
    mlp, norm = getattr(layer, "mlp", None), getattr(layer, "post_attention_layernorm", None)
    linears: dict[str, Any] = {name: getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")}
    missing = [name for name, linear in linears.items() if not isinstance(linear, nn.Linear)]
    if missing:
        refuse(f"its MLP has no linear layer {', '.join(missing)}, so it is not the gated kind")
    biased = [name for name, linear in linears.items() if linear.bias is not None]
    if biased:
        refuse(f"{', '.join(biased)} has a bias")
    activation = getattr(mlp, "act_fn", None)
    probe = torch.linspace(-4, 4, 9)
    if activation is None or not torch.allclose(activation(probe), nn.functional.silu(probe)):
        refuse(f"its activation is {activation}, expected SiLU")
    if not hasattr(norm, "variance_epsilon") or getattr(norm, "bias", None) is not None:
        refuse(f"its norm before the MLP is {type(norm).__name__}, expected an RMSNorm without a bias")
    if not hasattr(layer, "self_attn") or not hasattr(layer, "input_layernorm"):
        refuse("it has no self_attn or no input_layernorm")
    inter, hidden = linears["gate_proj"].weight.shape
    if hidden % 8 or inter % 8:
        refuse(f"sizes {hidden} and {inter}, expected multiples of 8")


def _pack(mlp: Layer) -> None:
    """Give the MLP `gate_up_proj`, `[2 * intermediate, hidden]`; gate and up become its halves."""
    packed = torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = packed.chunk(2)
    # A buffer, so that torch.compile's CUDA graphs know that it stays; not in the state_dict, which has both halves.
    mlp.register_buffer("gate_up_proj", packed, persistent=False)


def aligned(weight: Tensor) -> Tensor:
    """Return the weight itself, or a copy if its memory does not start at a multiple of 16 bytes.

    The kernels read 16 bytes at a time. PyTorch allocates aligned memory, but on a CPU a weight from a safetensors file
    stays in the mapped file, where it may start at any byte.
    """
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def _fused_forward(layer: Layer, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a layer: unchanged attention, then the fused block. `[batch, tokens, hidden]` -> the same shape."""
    batch, tokens, hidden = hidden_states.shape
    if batch * tokens > layer.mlp.most_rows:
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    attended, _ = layer.self_attn(layer.input_layernorm(hidden_states), *args, **kwargs)
    rows = (hidden_states + attended).view(batch * tokens, hidden)
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    operator = torch.ops.six_engines.fused_swiglu_mlp
    out = operator(rows, norm.weight, mlp.gate_up_proj, mlp.down_proj.weight, rows, norm.variance_epsilon, mlp.kernel)
    return out.view(batch, tokens, hidden)
