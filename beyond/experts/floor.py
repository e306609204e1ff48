"""The floor with experts: how many of them a step touches decides how many bytes it reads.

A dense model's step reads all weights, whatever the batch. With experts, a request reads `per_token` of `count` experts
in every layer, and two requests read up to twice as many. If the router chose all experts equally often and
independently, an expert would be missed by one token with probability `1 - per_token / count`.
"""

from __future__ import annotations

from stage_a_naive.checkpoints.experts import experts_of_layers
from stage_a_naive.floor import ModelBytes


def expected_touched(count: int, per_token: int, tokens: int) -> float:
    """Return the different experts that `tokens` tokens touch in a layer, on average, under a uniform router."""
    return count * (1 - (1 - per_token / count) ** tokens)


def weight_bytes(model: ModelBytes, touched: float) -> float:
    """Return the bytes of weights that a step reads whose tokens touch `touched` experts in every layer."""
    more = sum(3 * e.size * (touched - e.per_token) for e in experts_of_layers(model.config) if e is not None)
    return model.weight_bytes + more * model.config.hidden_size * model.bytes_per_number
