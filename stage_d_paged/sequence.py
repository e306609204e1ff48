"""A running request: its tokens, and where their keys and values are stored.

Two counts describe a sequence's progress, in prefill and in decode:

* `len(token_ids)`: the known tokens (the prompt, then the generated ones);
* `num_computed_tokens`: how many of them already have their K and V in the pool.

The difference must still run: for a new sequence the whole prompt (minus the part from the prefix cache), in decode
exactly one token, the one just sampled. There is no "prefill" or "decode" state that could contradict these numbers.

The tokens are stored in the completion, and only the completion adds tokens. The class is plain Python, and a block is
a number. It owns no tensor, so the block manager and the scheduler can be tested without a model.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from stage_a_naive.contract.outputs import Completion, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state. `eq=False`: two sequences are equal only if they are the same object."""

    completion: Completion  # the request, and the answer so far: tokens, text, when it ends
    num_computed_tokens: int = 0  # tokens whose K and V are in the pool
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache had when the sequence was admitted
    block_table: list[int] = field(default_factory=list)  # the blocks of the sequence's positions, in order
    block_keys: list[tuple[int, bytes]] = field(default_factory=list)  # chained hash and tokens of each full block
    num_indexed_blocks: int = 0  # leading blocks of block_table that are in the prefix cache's index

    first_scheduled_time: float = 0.0  # seconds on the monotonic clock; 0.0 = not yet
    first_token_time: float = 0.0
    finish_time: float = 0.0

    @property
    def request(self) -> Request:
        return self.completion.request

    @property
    def token_ids(self) -> list[int]:
        """The prompt, then the generated tokens."""
        return self.completion.all_token_ids

    def __len__(self) -> int:
        return len(self.completion.all_token_ids)

    @property
    def times(self) -> tuple[float, float, float]:
        """When the computation began, and when the first and the last token were ready."""
        return self.first_scheduled_time, self.first_token_time, self.finish_time

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return self.completion.num_generated_tokens

    @property
    def max_total_tokens(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.completion.max_total_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to run before the next one can be sampled: the rest of a prefill, or 1 in decode."""
        return len(self) - self.num_computed_tokens

    @property
    def is_new(self) -> bool:
        """Whether nothing has run yet, so that cached blocks were computed by other sequences."""
        return self.num_generated_tokens == 0

    @property
    def is_finished(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def error(self) -> Exception | None:
        """The error that ended this sequence, if any."""
        return self.completion.error


def pack(token_ids: list[int]) -> bytes:
    """Return token ids as consecutive 32-bit integers: three times as fast as with `array` or numpy."""
    return struct.pack(f"{len(token_ids)}i", *token_ids)
