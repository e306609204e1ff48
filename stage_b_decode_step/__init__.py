"""Stage B: one decode step as a separate function, and the optimisations that this makes possible.

Static KV cache, buffers allocated once, pinned copies, end of sequence found late, warm-up, `torch.compile`: each idea
has its switch.
"""

from stage_a_naive.entrypoints.lazy import import_when_used

DEFINED_IN = {
    "LLM": "stage_b_decode_step.llm",
    "GenerationOutput": "stage_a_naive.contract.outputs",
    "SamplingParams": "stage_a_naive.contract.params",
}
__all__ = list(DEFINED_IN)
__getattr__ = import_when_used(__name__, DEFINED_IN)
