"""Sample tokens for the batch slots: kernels, CUDA graphs, log-probabilities, replaced samplers.

The results are those of stage D's batch sampler, which equals stage A's `sample` row by row. `sampler.py` adds the
batch slots; `short_list_kernel.py`, `candidate.py`, `digit_kernel.py` and `kernels.py` compute the same on
a GPU.
"""

from stage_d_paged.sampler import LOGPROBS, RANDOM, REPLACED, SamplerInput
from stage_e_batching.sampler.sampler import Constraints, SampledTokens, Sampler

__all__ = ["LOGPROBS", "RANDOM", "REPLACED", "Constraints", "SampledTokens", "Sampler", "SamplerInput"]
