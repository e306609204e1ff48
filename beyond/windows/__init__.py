"""Layers that forget: layers with a window keep the last blocks of a sequence, in a pool of their own."""

from stage_a_naive.entrypoints.lazy import import_when_used

DEFINED_IN = {
    "LLM": "beyond.engine",
    "GenerationOutput": "stage_a_naive.contract.outputs",
    "SamplingParams": "stage_a_naive.contract.params",
}
__all__ = list(DEFINED_IN)
__getattr__ = import_when_used(__name__, DEFINED_IN)
