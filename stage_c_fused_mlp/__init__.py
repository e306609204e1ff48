"""Stage C: a kernel of our own for the MLP block, from the formula to a model that runs on it.

C++ and CUDA sources in `csrc/`, built once by `extension.py`, called through `fused_mlp.py`, put into the model by
`patch.py`.
"""

from stage_a_naive.outputs import GenerationOutput
from stage_a_naive.sampling import SamplingParams
from stage_c_fused_mlp.fused_mlp import FusedLayerNormMLP, fused_ln_mlp, fused_swiglu_mlp
from stage_c_fused_mlp.llm import LLM
from stage_c_fused_mlp.patch import replace_mlp_in_qwen, restore_mlp

__all__ = [
    "LLM",
    "FusedLayerNormMLP",
    "GenerationOutput",
    "SamplingParams",
    "fused_ln_mlp",
    "fused_swiglu_mlp",
    "replace_mlp_in_qwen",
    "restore_mlp",
]
