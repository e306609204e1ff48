"""A closed engine."""

from __future__ import annotations

import pytest


@pytest.mark.needs("one process")
def test_a_closed_engine_refuses_in_the_same_words_and_closes_twice(engine) -> None:
    llm = engine.make()
    llm.close()
    llm.close()
    for call in (llm.generate, llm.chat, *(getattr(llm, name, llm.chat) for name in ("stream", "add_request"))):
        with pytest.raises(RuntimeError, match="^this engine is closed; make a new LLM$"):
            call("abc")
