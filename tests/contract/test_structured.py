"""Structured output: every finished answer satisfies its constraint, and other requests are not affected."""

from __future__ import annotations

import json
import re

import pytest

from contract.engines import ask, sampler
from stage_a_naive import SamplingParams
from stage_a_naive.contract.structured_outputs import GrammarError

pytest.importorskip("llguidance")

from beyond.structured.constraints import Constraints
from stage_e_batching.step import BatchSequence

SCHEMA = {
    "type": "object",
    "properties": {"stage": {"enum": [*"ABCDEF"]}, "cached": {"type": "boolean"}, "blocks": {"enum": [1, 16, 256]}},
    "required": ["stage", "cached", "blocks"],
    "additionalProperties": False,
}
FORMS = [{"json": SCHEMA}, {"regex": "[A-F]: (yes|no)"}, {"choice": ["a block table", 'a "KV" cache']}, None]
WAYS = [
    {"temperature": 0},
    {"temperature": 0, "logit_bias": {37: 100, 7: -100}},
    {"seed": 1, "top_p": 0.9},
    {"seed": 2, "repetition_penalty": 1.2, "logprobs": 3},
]
PROMPT = "What is a KV cache?"
BAD = {
    "cannot be compiled": {"regex": "(a"},
    "Unimplemented": {"json": {"not": {"type": "string"}}},
    "cannot be satisfied": {"json": {"$ref": "#"}},
    "minimum": {"json": {"type": "integer", "minimum": 2, "maximum": 1}},
    "too many expressions": {"regex": "a{1000000}"},
    "at most 65536": {"json": {"description": "x" * 70_000}},
    "no answer but an empty one": {"regex": "()"},
    "exactly one of": {"regex": "a", "choice": ["b"]},
}


def mixture(max_tokens: int = 90) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, structured_outputs=form, **way) for form in FORMS for way in WAYS]


def check(output: dict, params: SamplingParams, eos_ids: frozenset[int]) -> None:
    """The answer matches its constraint and ends where the constraint ends."""
    assert output["finish_reason"] == "stop", output["text"]
    assert output["token_ids"][-1] in eos_ids
    kind, form = params.structured_outputs
    if kind == "json":
        answer = json.loads(output["text"])
        assert list(answer) == ["stage", "cached", "blocks"]
        assert answer["stage"] in "ABCDEF" and isinstance(answer["cached"], bool) and answer["blocks"] in (1, 16, 256)
    elif kind == "regex":
        assert re.fullmatch(form, output["text"])
    else:
        assert output["text"] in json.loads(form)


def check_all(llm, outputs: list[dict], params: list[SamplingParams]) -> None:
    for output, own in zip(outputs, params, strict=True):
        if own.structured_outputs is not None:
            check(output, own, llm.eos_token_ids)


@pytest.mark.needs("structured")
def test_answers_of_a_mixture_have_their_forms_and_the_others_are_as_alone(tutor) -> None:
    params = mixture()
    outputs = tutor.generate([PROMPT] * len(params), params, False)
    check_all(tutor, outputs, params)
    for output, own in zip(outputs, params, strict=True):
        if own.structured_outputs is None:
            assert [output["token_ids"]] == ask(tutor, [PROMPT], own)


@pytest.mark.needs("structured")
def test_answers_have_their_forms_after_preemptions(engine) -> None:
    params = mixture()
    with engine.made("tutor", num_kvcache_blocks=20, kvcache_block_size=8, max_model_len=150) as llm:
        check_all(llm, llm.generate([PROMPT] * len(params), params, False), params)
        assert llm.calls.stats()["num_preemptions"] > 0


@pytest.mark.needs("structured")
def test_an_answer_that_ends_inside_its_form_says_so(tutor) -> None:
    [output] = tutor.generate(PROMPT, SamplingParams(max_tokens=3, structured_outputs={"json": SCHEMA}), False)
    assert output["finish_reason"] == "length" and len(output["token_ids"]) == 3


@pytest.mark.needs("structured")
@pytest.mark.parametrize("message", BAD)
def test_a_form_that_cannot_be_had_is_refused_by_name(tutor, message: str) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs.*{message}"):
        ask(tutor, PROMPT, SamplingParams(structured_outputs=BAD[message]))


@pytest.mark.needs("structured")
def test_what_cannot_be_combined_with_a_form_is_refused_with_advice(tutor) -> None:
    with pytest.raises(ValueError, match="ignore_eos=True: structured output decides where"):
        ask(tutor, PROMPT, SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"}))
    for given in ({"min_tokens": 1}, {"bad_words": ["a"]}, {"allowed_token_ids": [7]}):
        [name] = given
        with pytest.raises(ValueError, match=f"combined with {name}: it may forbid the tokens"):
            ask(tutor, PROMPT, SamplingParams(structured_outputs={"regex": "a"}, **given))
    with sampler(tutor, lambda logits, params: logits.argmax(-1)), pytest.raises(ValueError, match="sampling_fn"):
        ask(tutor, PROMPT, SamplingParams(structured_outputs={"regex": "a"}))


@pytest.mark.needs("structured")
def test_a_form_that_gets_stuck_costs_no_other_prompt_its_answer(tutor, monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Constraints.admit

    def stuck(self: Constraints, sequence: BatchSequence) -> bool:
        wants_form, form = admit(self, sequence), sequence.request.params.structured_outputs
        if form is not None and form.kind == "regex":
            self._answers[sequence.batch_slot].matcher = GrammarError("structured_outputs: no text has this form")
        return wants_form

    params = [SamplingParams(max_tokens=90, structured_outputs=form) for form in FORMS]
    monkeypatch.setattr(Constraints, "admit", stuck)
    with pytest.raises(GrammarError, match="no text has this form") as caught:
        tutor.generate([PROMPT] * len(params), params, False)
    outputs = caught.value.outputs
    assert [output["finish_reason"] == "error" for output in outputs] == [False, True, False, False]
    assert outputs[1]["error"] is caught.value
    for i in (0, 2):
        check(outputs[i], params[i], tutor.eos_token_ids)


def test_an_engine_without_constrained_decoding_names_one_with_it(engine, llm) -> None:
    if "structured" in engine.has:
        pytest.skip("it has it")
    with pytest.raises(ValueError, match="from beyond import LLM"):
        ask(llm, "a", SamplingParams(structured_outputs={"regex": "a"}))
