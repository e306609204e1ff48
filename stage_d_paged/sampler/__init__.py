"""Choose tokens for a whole batch: stage A's `sample`, with as many operators for 256 rows as for one.

`rules.py` encodes a row's sampling parameters as numbers, `reference.py` computes with them in PyTorch, and
`batch_sampler.py` stores them for the rows of a batch.
"""

from stage_d_paged.sampler.batch_sampler import BatchSampler
from stage_d_paged.sampler.rules import LOGPROBS, RANDOM, REPLACED, SamplerInput

__all__ = ["LOGPROBS", "RANDOM", "REPLACED", "BatchSampler", "SamplerInput"]
