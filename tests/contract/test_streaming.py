"""Pieces of text as they become known."""

from __future__ import annotations

from contract.engines import PROMPTS, SEEDED


def test_streamed_pieces_join_to_the_text(llm) -> None:
    pieces = [""] * len(PROMPTS)
    outputs = llm.generate(PROMPTS, SEEDED, False, lambda i, piece: pieces.__setitem__(i, pieces[i] + piece))
    assert pieces == [output["text"] for output in outputs]
