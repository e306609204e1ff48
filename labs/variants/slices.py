"""The MLP in slices: only some of the neurons exist at a time between the two products.

A neuron of the MLP is a row of the gate, a row of the up and a column of the down projection, and the neurons' results
are added up. So they can be taken in slices, and only one slice's activations exist at any time: the idea of every
fused MLP kernel, in PyTorch. `python -m labs.variants.slices` prints the widest row between the products, both ways.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_b_decode_step.loop import Calls
from stage_c_fused_mlp.loop import unfused_mlp


def sliced_mlp(layer: nn.Module, x: Tensor, width: int) -> Tensor:
    """Compute `x + down(silu(gate(norm(x))) * up(norm(x)))`, `[tokens, hidden]`, by `width` neurons at a time.

    No intermediate tensor is larger than `[tokens, width]` or `[tokens, hidden]`. The last slice may be narrower.
    """
    mlp = layer.mlp
    normalised, out = layer.post_attention_layernorm(x), x
    for first in range(0, mlp.gate_proj.out_features, width):
        rows = slice(first, first + width)
        gate = F.silu(F.linear(normalised, mlp.gate_proj.weight[rows]))
        up = F.linear(normalised, mlp.up_proj.weight[rows])
        out = out + F.linear(gate * up, mlp.down_proj.weight[:, rows])
    return out


@torch.inference_mode()
def widest(layer: nn.Module, x: Tensor, width: int) -> int:
    """Return the columns of the widest intermediate tensor that is not as wide as x, with `width` neurons at a time."""
    results: list[Tensor] = []
    with Calls(lambda _, result: results.append(result)):
        sliced_mlp(layer, x, width)
    return max(r.shape[-1] for r in results if r.shape[:-1] == x.shape[:-1] and r.shape != x.shape)


@torch.inference_mode()
def main() -> None:
    layer = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval().model.layers[0]
    x = torch.randn(4, layer.mlp.gate_proj.in_features)
    torch.testing.assert_close(sliced_mlp(layer, x, 100), unfused_mlp(layer, x))
    print(f"columns of the widest tensor: {widest(layer, x, 10**6)} → {widest(layer, x, 100)}")


if __name__ == "__main__":
    main()
