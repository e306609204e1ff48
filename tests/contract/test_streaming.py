"""Pieces of text as they become known: of callbacks in every engine, of `stream` where calls run side by side."""

from __future__ import annotations

import pytest

from contract.engines import CHATS, GREEDY, NOTHING, PROMPTS, QUESTIONS, SEEDED, held, ids, listener
from stage_a_naive import SamplingParams


def test_pieces_told_to_a_callback_join_to_the_text(llm, tutor) -> None:
    heard, listen = listener(len(PROMPTS))
    outputs = llm.generate(PROMPTS, SEEDED, False, listen)
    assert heard == [output["text"] for output in outputs]
    pieces = []
    [output] = tutor.chat(CHATS[0], SamplingParams(temperature=0, max_tokens=16), False, lambda _, p: pieces.append(p))
    assert "".join(pieces) == output["text"] and len(pieces) > 5, "as it becomes known, not at the end"


@pytest.mark.needs("side by side")
def test_a_streams_pieces_join_to_the_text(tutor) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    expected = [output["text"] for output in tutor.generate(QUESTIONS, params, False)]
    pieces = list(tutor.stream(QUESTIONS[0], params))
    assert "".join(pieces) == expected[0] and len(pieces) > 3
    joined, listen = listener(2)
    for index, piece in tutor.stream(QUESTIONS, params):
        listen(index, piece)
    assert joined == expected


@pytest.mark.needs("side by side")
def test_a_stream_tells_every_token_with_its_logprobs_also_before_its_text_is_certain(tutor) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, stop="Value!")
    [request] = tutor.requests(["什么是 KV cache？"], params)
    mailbox = tutor.calls.new_mailbox()
    tutor.calls.add_request(request, mailbox)
    events = []
    while not events or events[-1].output is None:
        tutor.calls.advance(mailbox)
        events += mailbox.take()
    tokens = [token for event in events for token in event.tokens]
    output = events[-1].output
    assert [token.token_id for token in tokens] == output["token_ids"]
    assert [token.logprobs for token in tokens] == output["logprobs"]
    assert "".join(token.text for token in tokens) == output["text"]
    assert any(not token.text for token in tokens)


@pytest.mark.needs("side by side")
def test_a_stream_that_is_not_read_to_its_end_leaves_nothing(llm) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    assert held(llm) != NOTHING
    stream.close()
    assert held(llm) == NOTHING


@pytest.mark.needs("pool")
def test_a_call_is_told_nothing_of_a_request_that_was_added(llm, expected) -> None:
    request = llm.add_request(PROMPTS[1], GREEDY)
    pieces: list[str] = []
    [output] = llm.generate([PROMPTS[0]], GREEDY, False, lambda index, piece: pieces.append(piece))
    assert "".join(pieces) == output["text"] and ids([output]) == expected[:1]
    found = []
    while not llm.is_finished():
        found += llm.step()[0]
    assert found == [(request, expected[1])]
    assert llm.tokenizer.decode(expected[1]), "there was something to tell"


@pytest.mark.needs("side by side")
def test_a_stream_is_refused_at_the_call_not_at_its_first_piece(llm) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.stream([[4096]], GREEDY)
