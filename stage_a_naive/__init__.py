"""Stage A: a Hugging Face model behind a hand-written prefill and decode loop.

The words that every stage shares live here: sampling parameters, outputs, model loading, the chat prompt, the front end
and the command line.
"""

from stage_a_naive.llm import LLM
from stage_a_naive.outputs import GenerationOutput
from stage_a_naive.sampling import SamplingParams

__all__ = ["LLM", "GenerationOutput", "SamplingParams"]
