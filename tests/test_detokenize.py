"""Text of any ids, for the kinds of tokenizers that the supported models have: never an error, and pieces that join."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stage_a_naive import LLM, SamplingParams
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.detokenize import IncrementalDecoder, placeholder
from stage_a_naive.contract.outputs import Completion, Request, decode_all

pytestmark = pytest.mark.fast
SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = ["▁", "a", "b", "▁a", "ab", "▁▁", "▁b", "你", "\ufffd", "<0xZZZ>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def with_special_tokens(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), "你好"])  # ordinary tokens added later
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: text outside the vocabulary is spelled in byte tokens; a text's first space is dropped."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *BYTES, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return with_special_tokens(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """As a SentencePiece model that was converted: the decoder drops the first token's space."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return with_special_tokens(tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    """As Qwen and Llama 3: every token is a string of bytes."""
    first_bytes = "ä½"  # of "你"
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), first_bytes]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [("ä", "½")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_special_tokens(tokenizer)


TOKENIZERS = {
    "byte fallback": byte_fallback(),
    "metaspace": metaspace(),
    "byte level": byte_level(),
    "tutor": load_tokenizer(resolve("tutor")),
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def stream(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.append(i) for i in ids] + [decoder.flush()]


@every_tokenizer
@examples(40)
@given(data=st.data())
def test_pieces_of_any_ids_join_to_what_the_tokenizer_decodes(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    special = st.integers(0, 2)  # often, to come between the bytes of a character
    utf8 = st.sampled_from("你é🙂").map(lambda c: [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in c.encode()])
    pieces = st.one_of(st.integers(0, len(tokenizer) - 1).map(lambda i: [i]), special.map(lambda i: [i]), utf8)
    ids = [i for piece in data.draw(st.lists(pieces, max_size=14)) for i in piece if i is not None]
    text = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer, ids)) == decode_all(tokenizer, ids) == text


@every_tokenizer
@examples(27)
@given(data=st.data())
def test_an_answer_is_decoded_behind_the_prompts_last_token(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=8))
    before = [tokenizer.convert_tokens_to_ids("a"), *data.draw(st.lists(st.sampled_from([0, 1, 2, len(tokenizer)])))]
    decoder = IncrementalDecoder(tokenizer, before)
    text = "".join([*map(decoder.append, ids), decoder.flush()])
    assert "a" + text == tokenizer.backend_tokenizer.decode([before[0], *ids], skip_special_tokens=True)
    assert text == decode_all(tokenizer, ids, before)


@pytest.mark.parametrize("name", ["byte fallback", "metaspace"])
@pytest.mark.parametrize("stop", [(), " b", "</s>"], ids=["whole", "a stop string", "a special token"])
@pytest.mark.parametrize("text_at_end", [False, True])
def test_an_answer_keeps_its_first_space_whatever_the_decoder_drops(name: str, stop: object, text_at_end: bool) -> None:
    tokenizer = TOKENIZERS[name]
    word, space_a, space_b, end = tokenizer.convert_tokens_to_ids(["a", "▁a", "▁b", "</s>"])
    completion = Completion(
        Request(0, [1, word, 2], SamplingParams(stop=stop, max_tokens=4), seed=0),
        tokenizer,
        frozenset(),
        99,
        text_at_end,
    )
    pieces = [completion.append(i) for i in (space_a, space_a, end, space_b)]
    assert completion.text == {(): " a a b"}.get(stop, " a a")
    assert "".join(pieces) == completion.text
    assert completion.finish_reason == ("stop" if stop else "length")


def test_after_a_placeholder_a_text_begins_anew() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    word, unknown = tokenizer.convert_tokens_to_ids("▁a"), len(tokenizer)
    ids = [word, unknown, word, word]
    assert "".join(stream(tokenizer, ids)) == decode_all(tokenizer, ids) == f"a{placeholder(unknown)}a a"


@every_tokenizer
@examples(20)
@given(data=st.data())
def test_ids_beyond_the_vocabulary_show_as_placeholders_in_the_same_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 200), max_size=12))
    text = "".join(stream(tokenizer, ids))
    assert text == decode_all(tokenizer, ids)
    assert all(placeholder(i) in text for i in ids if i >= len(tokenizer))


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
@examples(27)
@given(text=st.text(max_size=12))
def test_encoded_text_comes_back_in_pieces(make: Callable[[], PreTrainedTokenizerFast], text: str) -> None:
    tokenizer = TOKENIZERS[make.__name__.replace("_", " ")]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == decode_all(tokenizer, ids)


def test_a_character_is_streamed_as_soon_as_no_later_token_can_change_it() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("a你b", add_special_tokens=False)
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == ["a", "ä½", "ł", "b"]
    assert stream(tokenizer, ids) == ["a", "", "你", "b", ""]
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("▁a", "<0xE4>", "<0xBD>", "<0xA0>", "<s>", "b")]
    assert stream(tokenizer, ids) == ["a", "", "", "", "", "你b", ""]


def test_a_gap_in_the_vocabulary_shows_as_a_placeholder() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert "".join(stream(fast, [0, 3, 7])) == decode_all(fast, [0, 3, 7]) == f"a{placeholder(3)}b"


# ---- completions: when they end, what their text is, and that streamed pieces join to it -----------------------------

TUTOR = TOKENIZERS["tutor"]
EOS = TUTOR.convert_tokens_to_ids("<|im_end|>")


def grow(token_ids: list[int], max_total_len: int = 10_000, **params: object) -> tuple[Completion, list[str]]:
    """Feed ids to a completion until it ends; returns it and the streamed pieces."""
    request = Request(0, [5, 6], SamplingParams(**{"max_tokens": 1000, **params}), seed=0)
    completion = Completion(request, TUTOR, frozenset({EOS}), max_total_len)
    pieces = []
    for token_id in token_ids:
        if completion.finish_reason is not None:
            break
        pieces.append(completion.append(token_id))
    return completion, pieces


def ids_of(text: str) -> list[int]:
    return TUTOR.encode(text, add_special_tokens=False)


def test_the_second_request_of_a_call_counts_its_wait_in_the_ttft() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = LLM("random:qwen2-tiny", device="cpu").generate(["abc", "xyz"], greedy, use_tqdm=False)
    first, second = (output["metrics"] for output in outputs)
    assert second["ttft"] >= first["prefill_time"] + first["decode_time"] + second["prefill_time"]


def test_ignore_eos_goes_on_but_stop_token_ids_still_stop() -> None:
    completion, _ = grow([EOS, 9, 8], ignore_eos=True, stop_token_ids=[8])
    assert completion.token_ids == [EOS, 9, 8] and completion.finish_reason == "stop"


@pytest.mark.parametrize("text_at_end", [False, True])
def test_a_stop_string_that_is_a_special_token_is_its_id(text_at_end: bool) -> None:
    tokenizer = TOKENIZERS["byte level"]
    a, start, end, call = tokenizer.convert_tokens_to_ids(["a", "<s>", "</s>", "<tool call>"])
    params = SamplingParams(stop=["<s>", "<tool call>"], ignore_eos=True, max_tokens=99)
    for token_id in (start, call):  # the second is no special token: its text is seen
        completion = Completion(Request(0, [a], params, seed=0), tokenizer, frozenset({end}), 9999, text_at_end)
        for i in (a, end, token_id):
            completion.append(i)
        assert (completion.text, completion.finish_reason, completion.token_ids[-1]) == ("a", "stop", token_id)


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
    assert TUTOR.decode([first]) == " cache"
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


@examples(27)
@given(text=st.text(max_size=30), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_streamed_pieces_join_to_exactly_the_final_text(text: str, stop: list[str]) -> None:
    ids = ids_of(text)
    completion, pieces = grow([*ids, EOS], stop=stop)
    assert "".join(pieces) == completion.text
    whole = TUTOR.decode(ids, skip_special_tokens=True)
    cuts = [whole.index(s) for s in stop if s in whole]
    assert completion.text == whole[: min(cuts)] if cuts else completion.text == whole


@examples(20)
@given(token_ids=st.lists(st.integers(0, 4200), max_size=30), max_tokens=st.integers(1, 30))
def test_text_made_at_the_end_equals_text_made_on_the_way(token_ids: list[int], max_tokens: int) -> None:
    request = Request(0, [1], SamplingParams(max_tokens=max_tokens), seed=0)
    late, early = (Completion(request, TUTOR, frozenset({3}), 4096, text_at_end) for text_at_end in (True, False))
    for token_id in token_ids:
        if late.finish_reason is None:
            late.append(token_id)
            early.append(token_id)
            assert late.finish_reason == early.finish_reason
    for completion in (late, early):  # from outside, where it has not ended
        completion.finish("length")
    assert late.text == early.text


def test_nothing_is_held_back_of_a_stop_string_that_stays_in_the_text():
    ids = ids_of("a cache. b")
    kept, pieces = grow(ids[:-1], stop="cache. c", include_stop_str_in_output=True)
    assert "".join(pieces) == kept.text == "a cache."
    held, pieces = grow(ids[:-1], stop="cache. c")
    assert "".join(pieces) == "a " and held.text == "a cache."


def test_a_stop_string_that_ended_before_min_tokens_is_not_found_later():
    ids = [token for letter in "a.b.c" for token in ids_of(letter)]
    completion, pieces = grow(ids, stop=".", min_tokens=2)
    assert "".join(pieces) == completion.text == "a.b" and completion.finish_reason == "stop"
    completion, pieces = grow(ids, stop="a.b", min_tokens=2)
    assert "".join(pieces) == completion.text == "", "it ends in the third token"
    completion, _ = grow(ids, stop="a.", min_tokens=2)
    assert completion.text == "a.b.c" and completion.finish_reason is None
