"""Qwen3's own tokenizer: text of its ids, its chat template, and thinking; where `make real-model` has built it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from beyond.serving.reasoning import ReasoningSplit
from beyond.structured.tokens import library_tokens
from stage_a_naive.chat import render_chat
from stage_a_naive.contract.detokenize import IncrementalDecoder, placeholder

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "build" / "models" / "qwen3-tokenizer"
pytestmark = pytest.mark.skipif(
    not TOKENIZER.is_dir(), reason=f"no {TOKENIZER.relative_to(ROOT)}: `make real-model` builds it"
)
TOKENS, ROWS = 151_669, 151_936  # of the tokenizer; of the models' embeddings
TEXTS = [
    "什么是 KV cache？分页注意力把它切成块 👩‍👩‍👧‍👦🇩🇪",
    "def f(x):\n\treturn x  # é, ß, Ж, ñ, \u202e\n",
    "﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ＦＵＬＬ \u200b\u0301 fi",
]
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def streamed(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> tuple[list[str], str]:
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.append(i) for i in ids], decoder.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_text_join_to_it_and_no_piece_ends_inside_a_character(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    assert len(tokenizer) == TOKENS
    pieces, rest = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text)) and not rest
    assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_of_any_ids_join_to_the_text_of_all(tokenizer: PreTrainedTokenizerFast) -> None:
    chance = random.Random(0)
    for _ in range(50):
        ids = [chance.randrange(TOKENS) for _ in range(40)]
        pieces, rest = streamed(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True)


def test_ids_of_the_padded_embedding_show_as_placeholders(tokenizer: PreTrainedTokenizerFast) -> None:
    assert streamed(tokenizer, [TOKENS, ROWS - 1])[0] == [placeholder(TOKENS), placeholder(ROWS - 1)]


def test_its_template_opens_the_answer_and_the_switch_closes_the_thinking(tokenizer: PreTrainedTokenizerFast) -> None:
    opened = "<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(tokenizer, QUESTION) == render_chat(tokenizer, QUESTION, {"enable_thinking": True}) == opened
    assert render_chat(tokenizer, QUESTION, {"enable_thinking": False}) == f"{opened}<think>\n\n</think>\n\n"
    assert tokenizer.encode("<think></think><|im_end|>") == [151_667, 151_668, 151_645]


def test_what_was_thought_before_is_left_out_of_the_next_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    answer = {"role": "assistant", "content": "<think>\nkeys, values\n</think>\n\nStored keys and values."}
    prompt = render_chat(tokenizer, [*QUESTION, answer, {"role": "user", "content": "Why?"}])
    assert "Stored keys and values." in prompt and "keys, values\n" not in prompt


def test_thoughts_that_come_token_by_token_are_told_from_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    decoder, parser = IncrementalDecoder(tokenizer), ReasoningSplit(render_chat(tokenizer, QUESTION))
    ids = tokenizer.encode("<think>\n先想一想\n</think>\n\n键和值。")
    told = [parser.feed(decoder.append(token), at == len(ids)) for at, token in enumerate(ids, 1)]
    thoughts, answer = ("".join(parts) for parts in zip(*told, strict=True))
    assert (thoughts.strip(), answer.strip()) == ("先想一想", "键和值。")


def test_a_form_may_use_all_its_tokens_and_none_of_the_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = library_tokens(tokenizer, ROWS, [tokenizer.eos_token_id])
    assert tokens.vocab_size == ROWS
    assert tokens.tokenize_str('{"a": 1}') == tokenizer.encode('{"a": 1}')
