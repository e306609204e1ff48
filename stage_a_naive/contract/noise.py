"""Random numbers that depend only on a seed, a step and a token.

A generator with internal state would give a request different tokens in a different batch. Here the noise is a hash of
(seed, step, token id), a counter-based generator in the sense of Salmon et al., "Parallel Random Numbers: As Easy as 1,
2, 3" (2011): a request gets the same noise alone or in any batch, before or after a preemption, on a CPU or on a GPU.
Every later stage keeps this definition.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
Bits = TypeVar("Bits", Tensor, np.ndarray, int)


def gumbel_noise(seed: int, step: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return Gumbel(0, 1) noise `[vocab]`, float32: a pure function of (seed, step, token id)."""
    ids = torch.arange(vocab_size, device=device)
    return gumbel_from_bits(mix32(mix32(ids) ^ noise_key(seed, step)))


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Turn random 32-bit integers into Gumbel(0, 1) noise, float32."""
    # 23 bits plus 0.5 fit a float32 exactly, so the uniform number is never 0 or 1 and the logarithms are finite.
    uniform = ((bits >> 9).float() + 0.5) * 2**-23
    return -torch.log(-torch.log(uniform))


def noise_key(seed: int, step: int) -> int:
    """Hash seed and step together: the 32-bit key of one sampled token."""
    key = mix32(mix32(mix32(seed & _MASK32) ^ (seed >> 32)) ^ (step & _MASK32))
    assert isinstance(key, int)
    return key


def mix32(x: Bits) -> Bits:
    """Hash 32-bit integers (Wellons' "lowbias32"): Python integers, arrays, and int64 tensors below 2**32."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
