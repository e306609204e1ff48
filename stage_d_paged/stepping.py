"""nano-vllm's way to drive an engine, beside calls of `generate`: `add_request`, then `step` until `is_finished`.

What was added runs in the batches of other calls too, and a call may come while it does. So an error that ends only
requests that were added is not the call's: it is kept for the next `step` to raise.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from stage_d_paged.engine import News, StaticEngine
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
        self._error: Exception | None = None  # what ended some of them beside another call

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
        num_tokens = 0
        try:
            if self._error is not None:
                raise self._error
            if self._engine.unfinished:
                num_tokens = self._engine.step()[1]
        except Exception:
            self._error = None
            self._forget_dropped()
            raise
        finished = {sequence: i for sequence, i in self._added.items() if sequence.is_finished}
        outputs = [(i, sequence.completion.token_ids) for sequence, i in finished.items()]
        self._added = {sequence: i for sequence, i in self._added.items() if sequence not in finished}
        return outputs, num_tokens

    def is_finished(self) -> bool:
        """Tell whether `step` has returned all requests that were added, or raised what ended them."""
        return not self._added and self._error is None

    def step_for(self, sequences: Sequences[Sequence]) -> News:
        """Run a step for a call's sequences. What ends only requests that were added is left to `step` to raise."""
        try:
            return self._engine.step()[0]
        except Exception as error:
            dropped = self._forget_dropped()
            if not dropped or not set(self._engine.unfinished).issuperset(s for s in sequences if not s.is_finished):
                raise
            self._error = error
            return []

    def _forget_dropped(self) -> bool:
        """Forget the requests that were added and that a failed step has dropped; returns whether there are any."""
        known = {*self._engine.unfinished, *(sequence for sequence in self._added if sequence.is_finished)}
        num_added = len(self._added)
        self._added = {sequence: i for sequence, i in self._added.items() if sequence in known}
        return len(self._added) < num_added
