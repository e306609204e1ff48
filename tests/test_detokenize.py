"""Text of any ids, for the kinds of tokenizers that the supported models have: never an error, and pieces that join."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.detokenize import IncrementalDecoder, placeholder
from stage_a_naive.contract.outputs import decode_all

pytestmark = pytest.mark.fast
SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = ["▁", "a", "b", "▁a", "ab", "▁▁", "▁b", "你", "\ufffd", "<0xZZZ>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def with_special_tokens(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), "你好"])  # ordinary tokens added later
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: what is not in the vocabulary is spelled in byte tokens; a text's first space is dropped."""
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
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_pieces_of_any_ids_join_to_what_the_tokenizer_decodes(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    special = st.integers(0, 2)  # often, to come between the bytes of a character
    utf8 = st.sampled_from("你é🙂").map(lambda c: [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in c.encode()])
    pieces = st.one_of(st.integers(0, len(tokenizer) - 1).map(lambda i: [i]), special.map(lambda i: [i]), utf8)
    ids = [i for piece in data.draw(st.lists(pieces, max_size=14)) for i in piece if i is not None]
    text = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer, ids)) == decode_all(tokenizer, ids) == text


def test_after_a_placeholder_a_text_begins_anew() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    word, unknown = tokenizer.convert_tokens_to_ids("▁a"), len(tokenizer)
    ids = [word, unknown, word, word]
    assert "".join(stream(tokenizer, ids)) == decode_all(tokenizer, ids) == f"a{placeholder(unknown)}a a"


@every_tokenizer
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ids_beyond_the_vocabulary_show_as_placeholders_in_the_same_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 200), max_size=12))
    text = "".join(stream(tokenizer, ids))
    assert text == decode_all(tokenizer, ids)
    assert all(placeholder(i) in text for i in ids if i >= len(tokenizer))


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
@settings(max_examples=80, deadline=None)
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
