"""Constrained decoding: masks against brute force, compiling in a thread, and the lesson's program."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import deque
from contextlib import closing
from functools import reduce
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from contract.engines import ids
from contract.test_structured import FORMS, PROMPT, SCHEMA, check_all, mixture
from serving import httpx, running
from stand_ins import EagerRecorder, forked_ranks
from transformers import AutoTokenizer

from beyond import LLM
from beyond.serving.engine_process import EngineProcess
from beyond.serving.remote_engine import RemoteLLM
from beyond.speculation.ahead_drafts import guess_of_table
from beyond.speculation.drafts import draft_of
from beyond.speculation.ngram import NgramDrafter
from beyond.structured import loop
from beyond.structured.checks import check_structured_outputs
from beyond.structured.constraints import Constraints, forbid
from beyond.structured.grammars import Grammars, Masks, Matcher, WhenCompiled
from beyond.structured.schemas import first_refused
from stage_a_naive import SamplingParams
from stage_a_naive.checkpoints.loading import resolve
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract.structured_outputs import GrammarError, StructuredOutputs, as_structured_outputs
from stage_a_naive.loop import encode
from stage_f_graph_tp.cuda_graph import capture_sizes
from stage_f_graph_tp.prefill_graphs import prefill_sizes

pytest.importorskip("llguidance")

MASKS = Masks(2)
PADDED = 4100  # a vocabulary with four ids of padding
EOS_IDS = [0, 2]
SPACES = "( |\n" + "( |)" * 8 + "|)"  # what may be between two tokens of JSON, as the lesson's program writes patterns
OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
PATTERNS = {  # of the lesson's program, by constraint
    "regex": (loop.PATTERN, {"regex": loop.PATTERN}),
    "branches": ("(a|ab)*c|[0-9][0-9]*", {"regex": "(a|ab)*c|[0-9][0-9]*"}),
    "choice": ("block|blocks of tokens|KV", {"choice": ["block", "blocks of tokens", "KV"]}),
    "json": (r"\{" + f'{SPACES}"a"{SPACES}:{SPACES}(true|false){SPACES}' + r"\}", {"json": OBJECT}),
    "grammar": ("x([0-9])*", {"grammar": 'root ::= "x" [0-9]*'}),
}


@pytest.fixture(scope="module")
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(TUTOR_PATH)


@pytest.fixture(scope="module")
def texts(tokenizer) -> tuple[str, ...]:
    return tuple("" if i in tokenizer.all_special_ids else tokenizer.decode([i]) for i in range(len(tokenizer)))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(resolve("tutor"), PADDED)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tutor", device="cpu")


def allowed(matcher: Matcher) -> np.ndarray:
    mask = np.zeros((1, -(-PADDED // 32)), np.int32)
    assert MASKS.fill([(matcher, 0, [])], mask) == {}
    return np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)


def is_forced(found: list[str]) -> bool:
    """Whether each text is a prefix of the next longer one: then only one continuation is possible."""
    ordered = sorted(found, key=len)
    return all(longer.startswith(shorter) for shorter, longer in zip(ordered, ordered[1:], strict=False))


@pytest.mark.parametrize("name", PATTERNS)
def test_masks_are_those_of_trying_every_token(grammars: Grammars, texts: tuple, name: str) -> None:
    """Where only one text can follow, the library allows one of its beginnings: the tokenizer's own first token."""
    pattern, form = PATTERNS[name]
    numbers, num_equal = random.Random(0), 0
    for _ in range(4):
        state, matcher = loop.parse(deque(pattern)), grammars.start(as_structured_outputs(form))
        for _ in range(12):
            found, right = allowed(matcher), loop.mask(state, texts, EOS_IDS[1]).numpy().copy()
            ends = bool(right[EOS_IDS[1]])
            assert found[EOS_IDS].tolist() == [ends, ends], "an end is allowed where an answer may end"
            assert not found[len(texts) :].any(), "padding is never allowed"
            right[EOS_IDS] = found[EOS_IDS] = False
            ids, right_ids = np.flatnonzero(found).tolist(), np.flatnonzero(right).tolist()
            num_equal += ids == right_ids
            if ids != right_ids:
                assert len(ids) == 1 and ids[0] in right_ids and is_forced([texts[i] for i in right_ids])
            if not ids:
                break
            token = int(numbers.choice(ids))
            state = reduce(loop.after, texts[token], state)
            matcher.accept([token])
    assert num_equal >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forbidden_tokens_have_the_lowest_score_and_the_others_keep_theirs(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 70).to(dtype)
    bits = np.zeros((2, 3), np.int32)
    for row, token in ((0, 0), (0, 31), (0, 69), (1, 32)):
        bits[row, token // 32] |= np.uint32(1 << token % 32).view(np.int32)
    masked = forbid(logits, torch.from_numpy(bits), 2 ** torch.arange(8, dtype=torch.uint8))
    assert (masked > -1e38).nonzero().tolist() == [[0, 0], [0, 31], [0, 69], [1, 32]]
    assert masked[0, 69] == logits[0, 69]


NOT = {"not": {}}
PLACES = {  # where a schema is refused, and the schema
    "": NOT,
    "/properties/a~1b/items": {"properties": {"c": {"type": "string"}, "a/b": {"type": "array", "items": NOT}}},
    "/$defs/x~0/anyOf/1": {
        "$defs": {"x~": {"anyOf": [{"type": "null"}, NOT]}},
        "properties": {"a": {"$ref": "#/$defs/x~0"}},
    },
    "/properties/a/additionalProperties": {"properties": {"a": {"type": "object", "additionalProperties": NOT}}},
    "/properties/a/allOf/0": {"properties": {"a": {"allOf": [NOT]}}},
}


@pytest.mark.fast
@pytest.mark.parametrize("pointer", PLACES)
def test_a_refused_schema_names_the_place(grammars: Grammars, pointer: str) -> None:
    found = first_refused(PLACES[pointer])
    assert found is not None and found.pointer == pointer and "not" in found.reason
    with pytest.raises(
        GrammarError, match=re.escape(f"the json{' at ' if pointer else ''}{pointer} cannot be compiled")
    ):
        grammars.start(as_structured_outputs({"json": PLACES[pointer]}))


@pytest.mark.fast
def test_a_schema_that_compiles_has_no_such_place() -> None:
    assert first_refused(SCHEMA) is None


def test_a_form_is_compiled_once(grammars: Grammars) -> None:
    forms = [as_structured_outputs({"json": SCHEMA}), as_structured_outputs({"json": dict(SCHEMA)})]
    assert grammars.compile(forms[0]) is grammars.compile(forms[1])


def test_an_answer_does_not_move_the_matcher_of_another(grammars: Grammars, tokenizer) -> None:
    form = StructuredOutputs("regex", "ab")
    first, second = grammars.start(form), grammars.start(form)
    first.accept(tokenizer.encode("a"))
    assert allowed(first).tolist() != allowed(second).tolist()


def test_a_request_waits_for_its_form_and_nobody_else_does(llm: LLM, monkeypatch) -> None:
    """The engine in another process gets requests whose constraints it has not compiled."""
    own, compiled = llm.engine.scheduler.order._grammars, threading.Event()
    compile_form = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *given: compiled.wait(60) and compile_form(*given))
    monkeypatch.setattr(llm, "_check_structured_outputs", lambda *given: None)
    assert isinstance(llm.engine.scheduler.order, WhenCompiled) and own is llm._grammars
    waits = llm.add_request(PROMPT, SamplingParams(structured_outputs={"regex": "yes|yes!"}))
    free = llm.add_request(PROMPT, SamplingParams(max_tokens=3, temperature=0))
    ended = []
    while free not in ended:
        ended += [number for number, _ in llm.step()[0]]
    assert waits not in ended
    compiled.set()
    while not llm.is_finished():
        ended += [number for number, _ in llm.step()[0]]
    assert waits in ended


@pytest.mark.parametrize(
    ("part", "place", "reason"),
    [
        ({"properties": {"b": {"not": {}}}}, "/properties/a/properties/b", 'Unimplemented keys: ["not"]'),
        ({"prefixItems": [{"type": "string"}, {"type": "text"}]}, "/properties/a/prefixItems/1/type", "no JSON schema"),
        ({"anyOf": [{"type": "string", "maxLength": "3"}]}, "/properties/a/anyOf/0/maxLength", "no JSON schema"),
        ({"$ref": "#/$defs/x~1y"}, "/$defs/x~1y", 'Unimplemented keys: ["contains"]'),
        ({"$ref": "#/$defs/z"}, "/properties/a", "Pointer '/$defs/z' does not exist"),
        ({"type": "string", "default": {"not": 1}, "pattern": "(?=a)"}, "/properties/a", "look-around"),
    ],
)
def test_a_schema_is_refused_with_the_place_of_what_is_not_supported(
    grammars: Grammars, part: dict, place: str, reason: str
) -> None:
    schema = {"type": "object", "properties": {"a": part, "not": {"type": "string"}}}
    schema["$defs"] = {"x/y": {"type": "array", "contains": {}}}
    with pytest.raises(GrammarError) as refused:
        grammars.start(as_structured_outputs({"json": schema}))
    assert f" at {place} cannot be compiled (" in str(refused.value) and reason in str(refused.value)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"json": {"type": "object", "properties": {f"key{i}": {} for i in range(900)}}}, "max is 2000"),
        ({"regex": "(a?){5000}a{5000}"}, "too many expressions"),
        ({"grammar": "root ::= word"}, "Rule 'word' not found"),
        ({"grammar": 'root ::= root "a"'}, "cannot be satisfied"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
    ],
)
def test_a_form_that_is_too_large_or_without_an_answer_is_named(grammars: Grammars, form: dict, reason: str) -> None:
    with pytest.raises(GrammarError, match=f"^structured_outputs: the {next(iter(form))} .*{reason}"):
        grammars.start(as_structured_outputs(form))


def test_a_form_that_takes_too_long_is_refused(grammars: Grammars, monkeypatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("beyond.structured.grammars.COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(Grammars, "_compile", lambda *given: go_on.wait(60))
    with pytest.raises(GrammarError, match="takes longer than"):
        check_structured_outputs(grammars, 0, SamplingParams(structured_outputs={"regex": "slow"}), None)
    go_on.set()


def test_the_answers_of_the_engine_are_texts_of_the_programs_automaton(llm: LLM, tokenizer) -> None:
    prompts = [encode(tokenizer, question) for question in loop.QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"regex": loop.PATTERN})
    for output in llm.generate(prompts, params, False):
        assert loop.may_end(reduce(loop.after, output["text"], loop.parse(deque(loop.PATTERN))))


REPEATS = {"regex": "(Stage [A-F] has a block table; ){6}(yes|no)"}  # so that guesses are right
SMALL = {"num_kvcache_blocks": 20, "kvcache_block_size": 8, "max_model_len": 150}  # a pool that preempts
SPECULATION = [
    {"speculation": "ngram"},
    {"speculation": "ngram", "without": "overlap"},
    {"speculation": "model"},
    {"speculation": "ngram", "num_speculative_tokens": 9, **SMALL},
    {"speculation": "model", **SMALL},
    {"speculation": "ngram", "tensor_parallel_size": 2},
    {"speculation": "model", "tensor_parallel_size": 2, "num_kvcache_blocks": 200},
]


@pytest.fixture(scope="module")
def mixed(llm: LLM) -> tuple[list[str], list[SamplingParams], list[list[int]]]:
    """Prompts with structured output and without, in every way to sample, and their answers."""
    repeating = SamplingParams(temperature=0, max_tokens=120, structured_outputs=REPEATS)
    params = [*mixture(), *[repeating] * 3]
    prompts = [PROMPT] * len(params)
    return prompts, params, ids(llm.generate(prompts, params, False))


@pytest.mark.parametrize("options", SPECULATION, ids=lambda options: "-".join(map(str, options.values())))
def test_drafts_change_no_token_of_a_mixture(mixed: tuple, options: dict) -> None:
    prompts, params, expected = mixed
    with forked_ranks(), closing(LLM("tutor", device="cpu", **options)) as guessing:
        outputs = guessing.generate(prompts, params, False)
        check_all(guessing, outputs, params)
        assert ids(outputs) == expected
        found = guessing.calls.stats()
    assert found["num_accepted_tokens"] > 0 and (found["num_preemptions"] > 0) == ("max_model_len" in options)


def test_a_draft_ends_where_its_grammar_forbids_it(grammars: Grammars, tokenizer) -> None:
    params = SamplingParams(structured_outputs={"regex": "a(bc|bd)x"})
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    sequence = SimpleNamespace(
        batch_slot=0, token_ids=[7, a], num_prompt_tokens=1, request=SimpleNamespace(params=params)
    )
    constraints = Constraints(grammars, 1, torch.device("cpu"), draft_of)
    draft = [b, c, c, b]
    constraints.shorten(sequence, draft)
    assert draft == [b, c, c, b], "a sequence without a form"
    assert constraints.admit(sequence)
    constraints.shorten(sequence, draft)
    assert draft == [b, c]


@pytest.mark.parametrize(("num_tokens", "guesses"), [(20, [3, 4, 1, 2]), (10, [3, 4]), (8, [])])
def test_the_host_looks_up_what_the_device_runs_and_no_more(num_tokens: int, guesses: list[int]) -> None:
    answer = SimpleNamespace(
        sequence=SimpleNamespace(max_total_tokens=num_tokens), token_ids=[9, 1, 2, 3, 4, 1, 2], guesses=None
    )
    assert guess_of_table(NgramDrafter(4, size=2), answer, 4) == guesses
    answer = SimpleNamespace(sequence=answer.sequence, token_ids=[1, 2, 5], guesses=None)
    assert guess_of_table(NgramDrafter(4, size=2), answer, 2) == [5, 5], "the last token again, where there is none"


def some_schema(chance: random.Random, depth: int = 2) -> dict:
    kind = chance.choice(["object", "array", "string", "integer", "enum", "boolean"][(depth == 0) * 2 :])
    if kind == "object":
        names = chance.sample(["block", "token", "a key", "stage", "KV"], chance.randint(1, 3))
        properties = {name: some_schema(chance, depth - 1) for name in names}
        return {"type": kind, "properties": properties, "required": names[:2], "additionalProperties": False}
    if kind == "array":
        return {"type": kind, "items": some_schema(chance, depth - 1), "minItems": 1, "maxItems": chance.randint(1, 3)}
    if kind == "enum":
        return {kind: chance.sample(["a", "ab", "b c", 1, 10, None, True], chance.randint(1, 4))}
    limits = {"string": {"maxLength": chance.randint(0, 8)}, "integer": {"minimum": -3, "maximum": 120}}
    return {"type": kind} | limits.get(kind, {})


def is_valid(value: object, schema: dict) -> bool:
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    if schema["type"] == "object":
        own = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(own)
            and all(is_valid(value[name], own[name]) for name in value)
        )
    if schema["type"] == "array":
        is_long = isinstance(value, list) and 1 <= len(value) <= schema["maxItems"]
        return is_long and all(is_valid(one, schema["items"]) for one in value)
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return type(value) is bool if schema["type"] == "boolean" else type(value) is int and -3 <= value <= 120


@pytest.mark.parametrize("options", [{}, *SPECULATION[3:5]], ids=lambda options: "-".join(map(str, options.values())))
def test_every_finished_answer_is_valid_for_its_schema(options: dict) -> None:
    chance = random.Random(len(options))
    schemas = [some_schema(chance) for _ in range(16)]
    ways = [{"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 3.0, "top_k": 20}]
    params = [SamplingParams(max_tokens=90, structured_outputs={"json": s}, **chance.choice(ways)) for s in schemas]
    free = [SamplingParams(max_tokens=40, temperature=0)] * 4
    outputs = LLM("tutor", device="cpu", **options).generate([PROMPT] * 20, [*params, *free], False)
    ended = [(o, s) for o, s in zip(outputs, schemas, strict=False) if o["finish_reason"] == "stop"]
    assert len(ended) > 10
    for output, schema in ended:
        assert is_valid(json.loads(output["text"]), schema), (output["text"], schema)


@pytest.mark.parametrize("options", SPECULATION[:3], ids=["device", "host", "model"])
def test_drafts_of_an_answer_with_a_form_are_right(llm: LLM, options: dict) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, structured_outputs=REPEATS) for n in (50, 51, 120)]
    expected = ids(llm.generate([PROMPT] * 3, params, False))
    guessing = LLM("tutor", device="cpu", **options)
    outputs = guessing.generate([PROMPT] * 3, params, False)
    found = guessing.calls.stats()
    assert ids(outputs) == expected
    assert found["num_accepted_tokens"] > found["num_verifications"], "more than one right guess per verification"
    assert [output["finish_reason"] for output in outputs] == ["length", "length", "stop"]


@pytest.mark.parametrize("without", ["", pytest.param("overlap", marks=pytest.mark.slow)])
def test_two_ranks_choose_the_tokens_of_one(mixed: tuple, without: str) -> None:
    prompts, params, expected = mixed
    with forked_ranks(), closing(LLM("tutor", device="cpu", tensor_parallel_size=2, without=without)) as ranks:
        outputs = ranks.generate(prompts, params, False)
    check_all(ranks, outputs, params)
    assert ids(outputs) == expected


def test_a_recorded_step_chooses_the_same_tokens(mixed: tuple) -> None:
    prompts, params, expected = mixed
    recorded = LLM("tutor", device="cpu", max_num_seqs=16)
    recorded.runner.capture(EagerRecorder(), capture_sizes(16), prefill_sizes(64))
    for _ in range(2):  # the second time the prefix is cached
        assert ids(recorded.generate(prompts, params, False)) == expected


def test_a_grammar_that_gets_stuck_ends_its_own_request_alone(llm: LLM, monkeypatch) -> None:
    fill = Masks.fill
    calls = []

    def fail_at_last(own: Masks, answers: list, masks: np.ndarray) -> dict[int, GrammarError]:
        calls.append(answers)
        stuck = {0: GrammarError("structured_outputs: the answer cannot go on")}
        return stuck if len(calls) == 3 else fill(own, answers, masks)

    monkeypatch.setattr(Masks, "fill", fail_at_last)
    free = llm.add_request(PROMPT, SamplingParams(max_tokens=10, temperature=0))
    llm.add_request(PROMPT, SamplingParams(structured_outputs=FORMS[0]))
    ended = []
    with pytest.raises(GrammarError, match="cannot go on"):
        while True:
            ended += [number for number, _ in llm.step()[0]]
    while not llm.is_finished():
        ended += [number for number, _ in llm.step()[0]]
    assert ended == [free]


def test_openais_parse_gets_an_object(llm: LLM) -> None:
    openai = pytest.importorskip("openai", reason="the client: pip install openai")
    from pydantic import BaseModel  # which that client needs, too

    class Stage(BaseModel):
        stage: Literal["A", "B", "C"]
        cached: bool

    chat = [{"role": "user", "content": PROMPT}]
    with running(llm) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(model="tutor", messages=chat, response_format=Stage, temperature=0)
        assert isinstance(answer.choices[0].message.parsed, Stage)
        with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as bad:
            form = {"json": {"not": {}}}
            client.completions.create(model="tutor", prompt=PROMPT, extra_body={"structured_outputs": form})
        assert bad.value.body["param"] == "structured_outputs"


def test_an_engine_in_another_process_takes_forms_and_its_front_refuses_them() -> None:
    process = EngineProcess("beyond.engine:LLM", {"model": "tutor", "device": "cpu", "dtype": "auto", "seed": 0})
    ask = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20}
    try:
        with running(RemoteLLM(process)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
            done = client.post("/v1/completions", json=ask | {"structured_outputs": {"choice": ["a block", "a token"]}})
            assert done.json()["choices"][0]["text"] in ("a block", "a token")
            refused = client.post("/v1/completions", json=ask | {"structured_outputs": {"regex": "(a"}})
            assert refused.status_code == 400 and "cannot be compiled" in refused.json()["error"]["message"]
    finally:
        process.close()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"without": "megakernel"}, {"without": "overlap"}, {"speculation": "ngram"}])
def test_a_gpu_gives_every_answer_its_form_and_leaves_the_others_alone(options: dict) -> None:
    llm = LLM("tutor", device="cuda", **options)
    params = mixture()
    outputs = llm.generate([PROMPT] * len(params), params, False)
    check_all(llm, outputs, params)
    free = [i for i, own in enumerate(params) if own.structured_outputs is None and own.temperature == 0]
    alone = [llm.generate(PROMPT, params[i], False)[0]["token_ids"] for i in free]
    assert alone == [outputs[i]["token_ids"] for i in free]
    llm.close()
