"""Stage B: one decode step as a function of its own, and everything that can be done once it is one.

Static KV cache, buffers allocated once, pinned copies, end of sequence found late, warm-up, `torch.compile`: each idea
has a switch of its own.
"""

from stage_a_naive.outputs import GenerationOutput
from stage_a_naive.sampling import SamplingParams
from stage_b_decode_step.llm import LLM

__all__ = ["LLM", "GenerationOutput", "SamplingParams"]
