"""Choosing tokens for many rows at once: what each request asks for, filters, penalties, noise, log-probabilities.

What is computed is stage A's `sample`, row by row. `sampler.py` says which row asks for what, `reference.py` computes
it in PyTorch, `short_list_kernel.py`, `digit_kernel.py` and `kernels.py` on a GPU.
"""

from stage_e_batching.sampler.rules import LOGPROBS, RANDOM, REPLACED, SamplerInput
from stage_e_batching.sampler.sampler import Constraints, SampledTokens, Sampler

__all__ = ["LOGPROBS", "RANDOM", "REPLACED", "Constraints", "SampledTokens", "Sampler", "SamplerInput"]
