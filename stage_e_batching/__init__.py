"""Stage E: continuous batching: a scheduler, chunked prefill, preemption, batched sampling, streaming."""

from stage_a_naive.entrypoints.lazy import import_when_used

DEFINED_IN = {
    "LLM": "stage_e_batching.llm",
    "GenerationOutput": "stage_a_naive.contract.outputs",
    "SamplingParams": "stage_a_naive.contract.params",
}
__all__ = list(DEFINED_IN)
__getattr__ = import_when_used(__name__, DEFINED_IN)
