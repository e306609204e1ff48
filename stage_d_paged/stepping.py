"""Run an engine step by step, as in nano-vllm: `add_request`, then `step` until `is_finished`.

Added requests also run in the batches of `generate` calls. If an added request ends during such a call, the next `step`
returns it or raises its error.
"""

from __future__ import annotations

from stage_d_paged.engine import StaticEngine
from stage_d_paged.sequence import Sequence


class Stepping:
    """The added requests, until `step` has returned them.

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
        """Queue a sequence and return its id."""
        self._num_added += 1
        self._engine.waiting.append(sequence)  # first, because `step` waits for everything in `_added`
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
        finished = [(i, sequence.completion.token_ids) for sequence, i in ended.items()]
        # Not earlier: if an interrupt ends this call, the next one returns them.
        self._added = {sequence: i for sequence, i in self._added.items() if sequence not in ended}
        return finished, num_tokens

    def is_finished(self) -> bool:
        """Return whether `step` has returned all added requests, or raised the errors that ended them."""
        return not self._added
