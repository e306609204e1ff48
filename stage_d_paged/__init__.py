"""Stage D: the model written from scratch on a paged KV cache, with a prefix cache and paged attention."""

from stage_a_naive.entrypoints.lazy import import_when_used

DEFINED_IN = {
    "LLM": "stage_d_paged.llm",
    "GenerationOutput": "stage_a_naive.contract.outputs",
    "SamplingParams": "stage_a_naive.contract.params",
}
__all__ = list(DEFINED_IN)
__getattr__ = import_when_used(__name__, DEFINED_IN)
