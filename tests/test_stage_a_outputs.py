"""Completions: when they end, what their text is, and that streamed pieces join to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_a_naive import LLM
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.outputs import Completion, Request
from stage_a_naive.sampling import SamplingParams

pytestmark = pytest.mark.fast
TOKENIZER = load_tokenizer(resolve("tutor"))
EOS = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def grow(token_ids: list[int], max_total_len: int = 10_000, **params: object) -> tuple[Completion, list[str]]:
    """Feed ids to a completion until it ends; returns it and the streamed pieces."""
    request = Request(0, [5, 6], SamplingParams(**{"max_tokens": 1000, **params}), seed=0)
    completion = Completion(request, TOKENIZER, frozenset({EOS}), max_total_len)
    pieces = []
    for token_id in token_ids:
        if completion.finish_reason is not None:
            break
        pieces.append(completion.append(token_id))
    return completion, pieces


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_the_second_request_of_a_call_counts_its_wait_in_the_ttft() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = LLM("random:qwen2-tiny", device="cpu").generate(["abc", "xyz"], greedy, use_tqdm=False)
    first, second = (output["metrics"] for output in outputs)
    assert second["ttft"] >= first["prefill_time"] + first["decode_time"] + second["prefill_time"]


def test_ignore_eos_goes_on_but_stop_token_ids_still_stop() -> None:
    completion, _ = grow([EOS, 9, 8], ignore_eos=True, stop_token_ids=[8])
    assert completion.token_ids == [EOS, 9, 8] and completion.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["KV cache", "cache", "e is a"])
def test_a_stop_string_across_tokens_cuts_the_text_before_it_and_is_never_streamed(stop: str) -> None:
    text = "The KV cache is a table."
    ids = [token for char in text for token in ids_of(char)]  # a token a character: every stop string spans several
    completion, pieces = grow(ids, stop=[stop])
    assert completion.text == text[: text.index(stop)]
    assert "".join(pieces) == completion.text
    assert completion.finish_reason == "stop"


def test_of_several_stop_strings_the_first_in_the_text_cuts_it() -> None:
    [first, *_] = ids_of(" cache")  # one token with both
    assert TOKENIZER.decode([first]) == " cache"
    completion, pieces = grow([first], stop=["he", "ac"])
    assert completion.text == "".join(pieces) == " c" and completion.finish_reason == "stop"


def test_a_stop_string_that_only_the_last_flush_completes_is_the_reason() -> None:
    broken = ids_of("龘")[:1]  # a part of a character: held back until the length ends the answer, then U+FFFD
    completion, _ = grow([*ids_of("ab"), *broken], stop=["\ufffd"], max_tokens=len(ids_of("ab")) + 1)
    assert (completion.text, completion.finish_reason) == ("ab", "stop")


def test_text_held_back_for_a_stop_string_that_does_not_come_is_released_at_the_end() -> None:
    completion, pieces = grow(ids_of("abc KV ca"), stop=["KV cache"], max_tokens=len(ids_of("abc KV ca")))
    assert "".join(pieces) == completion.text == "abc KV ca"
    assert completion.finish_reason == "length"


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=30), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_streamed_pieces_join_to_exactly_the_final_text(text: str, stop: list[str]) -> None:
    ids = ids_of(text)
    completion, pieces = grow([*ids, EOS], stop=stop)
    assert "".join(pieces) == completion.text
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    cuts = [whole.index(s) for s in stop if s in whole]
    assert completion.text == whole[: min(cuts)] if cuts else completion.text == whole


@settings(max_examples=60, deadline=None)
@given(token_ids=st.lists(st.integers(0, 4200), max_size=30), max_tokens=st.integers(1, 30))
def test_text_made_at_the_end_equals_text_made_on_the_way(token_ids: list[int], max_tokens: int) -> None:
    request = Request(0, [1], SamplingParams(max_tokens=max_tokens), seed=0)
    late, early = (Completion(request, TOKENIZER, frozenset({3}), 4096, text_at_end) for text_at_end in (True, False))
    for token_id in token_ids:
        if late.finish_reason is None:
            late.append(token_id)
            early.append(token_id)
            assert late.finish_reason == early.finish_reason
    for completion in (late, early):  # from outside, where it has not ended
        completion.finish("length")
    assert late.text == early.text
