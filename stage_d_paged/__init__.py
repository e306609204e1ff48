"""Stage D: the model written from scratch on a paged KV cache, with a prefix cache and paged attention."""

from stage_a_naive.outputs import GenerationOutput
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.llm import LLM

__all__ = ["LLM", "GenerationOutput", "SamplingParams"]
