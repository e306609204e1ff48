"""Constrained decoding: masks against brute force, compiling beside the steps, and the program of the lesson."""

from __future__ import annotations

import random
import threading
from collections import deque
from functools import reduce
from typing import Literal

import numpy as np
import pytest
import torch
from contract.test_structured import FORMS, PROMPT, SCHEMA, check_all, mixture
from serving import httpx, running
from stand_ins import EagerRecorder
from transformers import AutoTokenizer

from beyond import LLM
from beyond.serving.engine_process import EngineProcess
from beyond.serving.remote_engine import RemoteLLM
from beyond.structured import loop
from beyond.structured.checks import check_structured_outputs
from beyond.structured.constraints import forbid
from beyond.structured.grammars import Grammars, Matcher, WhenCompiled
from stage_a_naive import SamplingParams
from stage_a_naive.checkpoints.loading import resolve
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract.structured_outputs import GrammarError, StructuredOutputs, as_structured_outputs
from stage_a_naive.loop import encode
from stage_f_graph_tp.cuda_graph import capture_sizes
from stage_f_graph_tp.prefill_graphs import prefill_sizes

pytest.importorskip("llguidance")

PADDED = 4100  # a vocabulary with four ids of padding
EOS_IDS = [0, 2]
SPACES = "( |\n" + "( |)" * 8 + "|)"  # what may be between two tokens of JSON, as the lesson's program writes patterns
OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
PATTERNS = {  # of the lesson's program, for a form
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
    mask = np.zeros(-(-PADDED // 32), np.int32)
    matcher.fill(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)


def is_forced(found: list[str]) -> bool:
    """Whether each text begins the next longer one: then there is one way to go on, of more or fewer tokens."""
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


def test_a_form_is_compiled_once(grammars: Grammars) -> None:
    forms = [as_structured_outputs({"json": SCHEMA}), as_structured_outputs({"json": dict(SCHEMA)})]
    assert grammars.compile(forms[0]) is grammars.compile(forms[1])


def test_an_answer_does_not_move_the_matcher_of_another(grammars: Grammars, tokenizer) -> None:
    form = StructuredOutputs("regex", "ab")
    first, second = grammars.start(form), grammars.start(form)
    first.accept(tokenizer.encode("a"))
    assert allowed(first).tolist() != allowed(second).tolist()


def test_a_request_waits_for_its_form_and_nobody_else_does(llm: LLM, monkeypatch) -> None:
    """The engine of another process is given requests whose forms it has not compiled."""
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


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "without": "overlap"}])
def test_two_ranks_choose_the_tokens_of_one(llm: LLM, options: dict) -> None:
    params = mixture()
    expected = llm.generate([PROMPT] * len(params), params, False)
    ranks = LLM("tutor", device="cpu", **options)
    try:
        outputs = ranks.generate([PROMPT] * len(params), params, False)
    finally:
        ranks.close()
    check_all(ranks, outputs, params)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]


def test_a_recorded_step_chooses_the_same_tokens(llm: LLM) -> None:
    params = mixture()
    expected = llm.generate([PROMPT] * len(params), params, False)
    recorded = LLM("tutor", device="cpu", max_num_seqs=16)
    recorded.runner.capture(EagerRecorder(), capture_sizes(16), prefill_sizes(64))
    outputs = recorded.generate([PROMPT] * len(params), params, False)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]


def test_a_grammar_that_gets_stuck_ends_its_own_request_alone(llm: LLM, monkeypatch) -> None:
    fill = Matcher.fill
    calls = []

    def fail_at_last(matcher: Matcher, mask: np.ndarray) -> None:
        calls.append(matcher)
        if len(calls) == 3:
            raise GrammarError("structured_outputs: the answer cannot go on")
        fill(matcher, mask)

    monkeypatch.setattr(Matcher, "fill", fail_at_last)
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
