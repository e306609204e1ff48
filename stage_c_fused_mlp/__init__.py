"""Stage C: a custom kernel for the MLP block, from the formula to a model that uses it.

The C++ and CUDA sources are in `csrc/stage_c/`. `extension.py` builds them once, `fused_mlp.py` calls them, and
`patch.py` puts them into the model. `layernorm_mlp.py` is the small first kernel.
"""

from stage_a_naive.entrypoints.lazy import import_when_used

DEFINED_IN = {
    "LLM": "stage_c_fused_mlp.llm",
    "GenerationOutput": "stage_a_naive.contract.outputs",
    "SamplingParams": "stage_a_naive.contract.params",
    "FusedLayerNormMLP": "stage_c_fused_mlp.layernorm_mlp",
    "fused_ln_mlp": "stage_c_fused_mlp.layernorm_mlp",
    "fused_swiglu_mlp": "stage_c_fused_mlp.fused_mlp",
    "replace_mlp_in_qwen": "stage_c_fused_mlp.patch",
    "restore_mlp": "stage_c_fused_mlp.patch",
}
__all__ = list(DEFINED_IN)
__getattr__ = import_when_used(__name__, DEFINED_IN)
