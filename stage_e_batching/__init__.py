"""Stage E: continuous batching: a scheduler, chunked prefill, preemption, batched sampling, streaming."""

from stage_a_naive.outputs import GenerationOutput
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.llm import LLM

__all__ = ["LLM", "GenerationOutput", "SamplingParams"]
