"""nano-vllm's way to drive an engine, beside calls of `generate`: `add_request`, then `step` until `is_finished`.

What was added runs in the batches of other calls too, and a call may come while it does: what ends there, the next
`step` returns or raises.
"""

from __future__ import annotations

from stage_d_paged.engine import StaticEngine
from stage_d_paged.sequence import Sequence


class Stepping:
    """The requests that were added, until `step` has returned them.

    Args:
        engine: runs them.
    """

    def __init__(self, engine: StaticEngine) -> None:
        self._engine = engine
        self._added: dict[Sequence, int] = {}  # with their ids
        self._num_added = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._added

    def add(self, sequence: Sequence) -> int:
        """Queue a sequence; returns its id."""
        self._num_added += 1
        self._engine.waiting.append(sequence)  # first: what is in `_added` is waited for
        self._added[sequence] = self._num_added
        return self._num_added

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step: see `LLM.step`."""
        num_tokens = self._engine.step()[1] if self._engine.unfinished else 0
        ended = {sequence: i for sequence, i in self._added.items() if sequence.is_finished}
        for sequence in ended:
            if sequence.error is not None:
                del self._added[sequence]
                raise sequence.error
        self._added = {sequence: i for sequence, i in self._added.items() if sequence not in ended}
        return [(i, sequence.completion.token_ids) for sequence, i in ended.items()], num_tokens

    def is_finished(self) -> bool:
        """Tell whether `step` has returned all requests that were added, or raised what ended them."""
        return not self._added
