"""Break it, lab L: what a token gets depends on the other tokens of the step.

One request at a time gets right answers. With many, some tokens of some requests are wrong, and nothing crashes. The
broken engines compute the experts of a layer one after another, as the reference, and differ from it by one line. Write
a test that passes with the reference and fails with the broken ones.
"""

import torch
from torch import Tensor

from beyond.experts.layers import SparseMLP, make_sparse_mlp
from beyond.experts.layers import expert_by_expert as compute
from stage_a_naive.checkpoints.presets import preset_config
from stage_d_paged.config import ModelConfig
from stage_d_paged.layers import Linear


def make_layer() -> SparseMLP:
    """A layer with random weights and 16 experts, of which each token uses 4."""
    config = ModelConfig.from_hf(preset_config("qwen3-moe-tiny"))
    layer = make_sparse_mlp(compute, config, config.layers[0], torch.float32, torch.device("cpu"), Linear)
    numbers = torch.Generator().manual_seed(1)
    for matrix in (layer.gate, layer.gate_up_proj, layer.down_proj):
        matrix.weight.data = torch.randn(matrix.weight.shape, generator=numbers) / matrix.weight.shape[1] ** 0.5
    return layer


def random_rows(layer: SparseMLP, tokens: int) -> Tensor:
    """The rows of some tokens, `[tokens, hidden]`."""
    return torch.randn(tokens, layer.gate.weight.shape[1])


@torch.inference_mode()
def outputs(layer: SparseMLP, x: Tensor) -> Tensor:
    """What the layer computes for the rows of a step, `[tokens, hidden]`."""
    return layer(x, None)


def test_a_token_gets_the_same_whoever_is_in_the_step():
    """Rounding may differ: compare with `torch.testing.assert_close`."""
    layer = make_layer()
    for tokens in (2, 5, 6, 8, 10, 12, 100):
        x = random_rows(layer, tokens)
        alone = torch.cat([outputs(layer, row[None]) for row in x])
        torch.testing.assert_close(outputs(layer, x), alone, rtol=1e-4, atol=1e-4)
