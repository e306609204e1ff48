"""Rules about single tokens, the same in every engine: forbidden tokens, and the only allowed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.engines import CHATS, GREEDY, PROMPTS, SEEDED, SHORT_CHAT, ask
from stage_a_naive import SamplingParams

CHAT = SamplingParams(temperature=0, max_tokens=36)


def first_words(llm) -> tuple[list[int], list[str]]:
    """The tutor's greedy answer, and texts of three tokens each that it has, cut the same way by the tokenizer."""
    answer = llm.chat(CHATS[0], CHAT, False)[0]["token_ids"]
    found: dict[str, None] = {}
    for at in range(len(answer) - 3):
        text = llm.tokenizer.decode(answer[at : at + 3])
        spelled = llm.tokenizer.encode(text, add_special_tokens=False)
        if spelled == answer[at : at + 3] and text.strip() == text.lstrip() != "" and len(found) < 3:
            found[text] = None
    assert len(found) == 3
    return answer, list(found)


def has(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


def test_no_answer_has_the_tokens_of_a_bad_word_and_others_keep_theirs(tutor) -> None:
    answer, words = first_words(tutor)
    params = [CHAT, *(replace(CHAT, bad_words=[word]) for word in words), replace(CHAT, bad_words=words)]
    free, *others, none = (o["token_ids"] for o in tutor.chat([CHATS[0]] * len(params), params, False))
    assert free == answer
    spelled = [tutor.tokenizer.encode(word, add_special_tokens=False) for word in words]
    for ids, part in zip(others, spelled, strict=True):
        assert has(answer, part) and not has(ids, part)
        at = next(at for at in range(len(answer)) if answer[at : at + 3] == part)
        assert ids[: at + 2] == answer[: at + 2], "only the last of its tokens is forbidden"
    assert not any(has(none, part) for part in spelled)


def test_a_bad_word_is_forbidden_behind_a_space_too(tutor) -> None:
    word = "cache"
    spelled = [tutor.tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]
    for begin in spelled:  # the model would go on with it
        wanted = dict.fromkeys(begin, 100)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias=wanted)
        free, without = ask(tutor, ["The"] * 2, [params, replace(params, bad_words=word)])
        assert has(free, begin[-1:]) and not any(has(without, part) for part in spelled)


def test_only_allowed_tokens_are_chosen(llm, expected) -> None:
    allowed = [expected[1][0], 7, 8, 4095]
    params = [GREEDY, replace(GREEDY, allowed_token_ids=allowed), replace(SEEDED[1], allowed_token_ids=allowed[1:])]
    params += [replace(GREEDY, allowed_token_ids=[9], logit_bias={9: -100, 10: 100})]
    greedy, few, fewer, one = ask(llm, PROMPTS[:1] + PROMPTS[1:2] * 3, params)
    assert greedy == expected[0] and few[0] == expected[1][0] and set(few) <= set(allowed)
    assert set(fewer) <= set(allowed[1:]) and set(one) == {9}


def test_nothing_ends_an_answer_before_min_tokens(tutor) -> None:
    [free] = tutor.chat(SHORT_CHAT, CHAT, False)
    ids = free["token_ids"]
    assert free["finish_reason"] == "stop" and len(ids) > 4
    leasts = [len(ids) - 1 + extra for extra in (0, 1, 9)]
    longer = [replace(CHAT, min_tokens=least, max_tokens=least + 4) for least in leasts]
    sooner = replace(CHAT, min_tokens=6, stop_token_ids=ids[:4])
    outputs = tutor.chat([SHORT_CHAT] * 5, [*longer, CHAT, sooner], False)
    *found, again, stopped = (output["token_ids"] for output in outputs)
    for least, tokens in zip(leasts, found, strict=True):
        assert len(tokens) > least and tokens[: len(ids) - 1] == ids[:-1]
        assert not tutor.eos_token_ids.intersection(tokens[:least])
    assert again == found[0] == ids
    assert not set(ids[:4]).intersection(stopped[:6]) and len(stopped) > 6


def test_a_stop_string_is_looked_for_behind_min_tokens(tutor) -> None:
    [free] = tutor.chat(CHATS[0], CHAT, False)
    letter = next(c for c in free["text"] if free["text"].count(c) > 6 and c.isalpha())
    [found] = tutor.chat(CHATS[0], replace(CHAT, stop=letter, min_tokens=6), False)
    assert found["finish_reason"] == "stop" and len(found["token_ids"]) > 6
    assert found["token_ids"] == free["token_ids"][: len(found["token_ids"])]
    early = tutor.tokenizer.decode(found["token_ids"][:6])
    assert found["text"].startswith(early) and letter not in found["text"][len(early) :]


@pytest.mark.gpu
@pytest.mark.needs("one process")
def test_rules_are_the_same_on_cpu_and_gpu(engine) -> None:
    with engine.made("tutor", dtype="float32") as on_cpu, engine.made("tutor", device="cuda", dtype="float32") as llm:
        answer, words = first_words(on_cpu)
        params = [
            CHAT,
            replace(CHAT, bad_words=words),
            replace(CHAT, min_tokens=len(answer) + 5, max_tokens=len(answer) + 9),
            replace(CHAT, allowed_token_ids=sorted({*answer, 70, 71})[::2], max_tokens=40),
            SamplingParams(seed=1, top_k=20, top_p=0.9, allowed_token_ids=answer[:5], repetition_penalty=1.1),
        ]
        right, found = ([o["token_ids"] for o in one.chat([CHATS[0]] * 5, params, False)] for one in (on_cpu, llm))
        assert found == right
