"""An exception ends the call that it came from, and nothing of that call stays behind."""

from __future__ import annotations

import pytest

from contract.engines import GREEDY, PROMPTS, ids


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_in_a_callback_leaves_nothing_of_its_call_behind(llm, expected: list, error: type) -> None:
    def stop(index: int, piece: str) -> None:
        raise error("stop here")

    with pytest.raises(error, match="stop here"):
        llm.generate(PROMPTS, GREEDY, False, stop)
    told: set[int] = set()
    outputs = llm.generate(PROMPTS[:2], GREEDY, False, lambda index, piece: told.add(index))
    assert ids(outputs) == expected[:2] and told == {0, 1}
