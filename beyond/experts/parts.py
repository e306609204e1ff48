"""The parts of an engine for a model with experts, chosen from its config."""

from __future__ import annotations

from functools import partial

import torch

from beyond.experts.layers import Compute, expert_by_expert, make_sparse_mlp
from beyond.experts.parallel import WAYS
from beyond.options import Options
from stage_a_naive.checkpoints.experts import ExpertTensors
from stage_a_naive.checkpoints.loading import ModelSource
from stage_d_paged.config import ModelConfig
from stage_d_paged.runtime import Formats
from stage_d_paged.weights import TensorSource


def with_experts(formats: Formats, source: ModelSource, options: Options, device: torch.device) -> Formats:
    """Return formats that also make and load layers with experts, if the model has them.

    Raises:
        ValueError: a GPU, and an activation that the kernels do not compute.
    """
    config = ModelConfig.from_hf(source.config)
    if not config.has_experts:
        return formats
    compute: Compute = expert_by_expert
    if device.type == "cuda":
        if config.activation != "silu":
            raise ValueError(f"experts with the activation {config.activation} run on a CPU alone; use device='cpu'")
        from beyond.experts.fused_layers import triton_experts  # here: only a GPU needs Triton

        compute = partial(triton_experts, pdl=options.uses("pdl"))
    if options.expert_parallel != "off":
        compute = partial(WAYS[options.expert_parallel], compute)
    count = max(kind.experts.count for kind in config.layers if kind.experts)

    def open_tensors(*given: object) -> TensorSource:
        return ExpertTensors(formats.tensors(*given), count)

    return formats._replace(mlp=partial(make_sparse_mlp, compute), tensors=open_tensors)
