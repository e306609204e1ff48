"""Encode a row's sampling parameters as numbers that fit into a step's input.

A row has its temperature, the key of its noise, and eight 32-bit words, its *rules*. They are copied to the device with
the rest of the step's input, so that choosing a token needs nothing else from the host.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from stage_a_naive.contract import filters
from stage_a_naive.contract.params import SamplingParams

# What a row needs, the word FLAGS; 0 is greedy.
RANDOM, FILTERED, PENALISED, LOGPROBS, REPLACED = 1, 2, 4, 8, 16

WORDS = 8
FLAGS, TOP_K, TOP_P, FARTHEST, REPETITION, PRESENCE, FREQUENCY, TABLE_ROW = range(WORDS)
FLOATS = TOP_P, REPETITION, PRESENCE, FREQUENCY  # these words hold the bits of a float32, the others an int32

Array = TypeVar("Array", np.ndarray, Tensor)


class SamplerInput(NamedTuple, Generic[Array]):
    """The sampling parameters of a step's rows: numpy arrays on the host, tensors on the device."""

    temperatures: Array  # float32 [rows]
    noise_keys: Array  # int32 [rows], the bits of `noise_key(seed, step)`
    rules: Array  # int32 [rows, WORDS]
    asking: Array  # int32 [rows]: the rows with logprobs; only the first entries count

    def first(self, count: int) -> SamplerInput[Array]:
        """Return the parameters of the first `count` rows."""
        return SamplerInput(*(array[:count] for array in self))

    def at(self: SamplerInput[Tensor], places: Tensor) -> SamplerInput[Tensor]:
        """Return the parameters of the rows `places`, int64, on the device."""
        return SamplerInput(*(column.index_select(0, places) for column in self))

    def without_penalties(self: SamplerInput[Tensor]) -> SamplerInput[Tensor]:
        """Return the same parameters without penalties, for scores that already include them."""
        rules = self.rules.clone()
        rules[:, FLAGS] &= ~PENALISED
        return self._replace(rules=rules)

    @classmethod
    def empty(cls, rows: int) -> SamplerInput[np.ndarray]:
        """Return empty arrays on the host, to be filled in."""
        asking = np.empty(rows, np.int32)
        return SamplerInput(
            np.empty(rows, np.float32), np.empty(rows, np.int32), np.empty((rows, WORDS), np.int32), asking
        )


def rules_of(params: SamplingParams, replaced: bool, vocab_size: int, table_row: int) -> np.ndarray:
    """Return the rules of a request, int32 `[WORDS]`.

    Args:
        replaced: whether its tokens are chosen again after the step, e.g. by a `sampling_fn`.
        table_row: its row in the table of counts, which only penalties read.
    """
    random = params.temperature > 0
    flags = (
        RANDOM * random
        | FILTERED * (random and params.filters(vocab_size))
        | PENALISED * params.needs_penalties
        | LOGPROBS * (params.logprobs is not None)
        | REPLACED * replaced
    )
    rules = np.zeros(WORDS, np.int32)
    farthest = filters.farthest_for(params.min_p) if params.min_p else filters.FARTHEST
    rules[[FLAGS, FARTHEST, TABLE_ROW]] = flags, farthest, table_row
    rules[TOP_K] = params.top_k if params.top_k < vocab_size else 0
    numbers = params.top_p, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, as in stage A
        rules.view(np.float32)[list(FLOATS)] = numbers
    return rules
