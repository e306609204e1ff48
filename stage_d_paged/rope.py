"""Rotary frequencies, and the ways to scale them for contexts longer than in the training.

Dimension pair `i` of a head turns by `position * theta^(-2i / head_dim)`: the first pairs turn fast, the last ones
hardly at all. For the slow pairs, a position beyond the training's is an angle that training has never seen. So every
scaling makes some pairs turn more slowly; the kinds differ in which pairs, and by how much. `dynamic` is not supported:
it scales only beyond `max_position_embeddings`, where these engines end a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Scaling(Protocol):
    """A way to scale frequencies."""

    @property
    def attention_factor(self) -> float:
        """Factor of cos and sin."""
        ...

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return the scaled (lower) frequencies `[head_dim / 2]` of base `theta`."""
        ...


@dataclass(frozen=True)
class LinearScaling:
    """Divides all frequencies by `factor` (position interpolation, Chen et al., 2023)."""

    factor: float
    attention_factor: float = 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones are kept, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    attention_factor: float = 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        # A pair that turns less than `low` times within the original context is slowed down by `factor`, a pair that
        # turns more than `high` times is kept, and pairs between get a mix of both.
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): like Llama 3's, but with the ramp over the pairs' indices, and larger scores."""

    factor: float
    original_max_positions: int
    beta_fast: float  # pairs that turn more often than this within the original context are kept,
    beta_slow: float  # those that turn less often are slowed down by `factor`
    truncate: bool  # whether the ramp begins and ends at whole pairs
    attention_factor: float

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        pairs = len(frequencies)

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_max_positions / (times * 2 * math.pi)) / math.log(theta)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        ramp = (torch.arange(pairs, dtype=torch.float32) - first) / (last - first or 0.001)
        slowed = ramp.clamp(0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)


@dataclass(frozen=True)
class Rope:
    """How a layer rotates its heads: base and scaling."""

    theta: float = 10000.0
    scaling: Scaling | None = None

    @property
    def attention_factor(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def frequencies(self, head_dim: int) -> Tensor:
        """Return the angle per position of every dimension pair, `[head_dim / 2]`, float32."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling.stretch(frequencies, self.theta)


def _llama3(rope: dict[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )


def _yarn(rope: dict[str, Any]) -> YarnScaling:
    factor, mscale, mscale_all = float(rope["factor"]), rope.get("mscale"), rope.get("mscale_all_dim")

    def sharpness(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = sharpness(mscale) / sharpness(mscale_all) if mscale and mscale_all else sharpness(1)
    return YarnScaling(
        factor,
        int(rope["original_max_position_embeddings"]),
        float(rope.get("beta_fast") or 32),
        float(rope.get("beta_slow") or 1),
        bool(rope.get("truncate", True)),
        float(attention_factor),
    )


# `rope_type` of a Hugging Face config -> a function from its numbers to the scaling.
SCALINGS: dict[str, Callable[[dict[str, Any]], Scaling | None]] = {
    "default": lambda rope: None,
    "linear": lambda rope: LinearScaling(float(rope["factor"])),
    "dynamic": lambda rope: None,
    "yarn": _yarn,
    "llama3": _llama3,
}
