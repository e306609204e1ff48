"""An error or abort of one request ends only that request, and leaves nothing of its call behind."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interrupts import fail_at_token
from safetensors.torch import load_file, save_file

from contract.engines import GREEDY, NOTHING, PROMPTS, ask, finish, forward_calls, held, ids, sampler, waiting_call
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import GenerationOutput, SamplingParams
from stage_a_naive.checkpoints.tutor import TUTOR_PATH

READ_AS_IT_COMES = replace(GREEDY, stop="zzz")
BAD = 1  # the prompt of PROMPTS that fails
PARAMS = [replace(READ_AS_IT_COMES, seed=i) for i in range(len(PROMPTS))]


def choose_but_for_one(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Sample greedily; fail if one of the rows belongs to the bad prompt."""
    if BAD in [own.seed for own in params]:
        raise LookupError("no token")
    return logits.argmax(-1)


def raising_at_piece(number: int) -> Callable[[int, str], None]:
    """A callback that raises when it is told this piece of the bad prompt's text, and may not be told another."""
    told: Counter[int] = Counter()

    def listen(index: int, piece: str) -> None:
        told[index] += 1
        assert told[BAD] <= number, "it was told more after its error"
        if (index, told[BAD]) == (BAD, number):
            raise LookupError("stop here")

    return listen


@contextmanager
def raised() -> Iterator[list[GenerationOutput]]:
    """All outputs of the call in the block, which raises; filled in at the end of the block."""
    outputs: list[GenerationOutput] = []
    with pytest.raises((LookupError, UnicodeError)) as caught:
        yield outputs
    outputs += caught.value.outputs
    assert [output.get("error") for output in outputs].count(caught.value) == 1


def check_that_one_failed(outputs: list[GenerationOutput], expected: list[list[int]]) -> None:
    reasons = [output["finish_reason"] for output in outputs]
    assert reasons == ["length" if i != BAD else "error" for i in range(len(PROMPTS))]
    for i, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
        assert output["token_ids"] == (tokens[: len(output["token_ids"])] if i == BAD else tokens)
        assert output["prompt_token_ids"] == PROMPTS[i]
        assert min(output["metrics"][name] for name in ("prefill_time", "decode_time", "ttft", "tpot")) >= 0


def stopping(error: type[BaseException]) -> Callable[[int, str], None]:
    """A callback that raises `error`."""

    def stop(index: int, piece: str) -> None:
        raise error("stop here")

    return stop


def test_what_a_sampler_raises_for_one_prompt_costs_no_other_its_answer(llm, expected) -> None:
    with sampler(llm, choose_but_for_one), raised() as outputs:
        llm.generate(PROMPTS, PARAMS, False)
    check_that_one_failed(outputs, expected)
    assert outputs[BAD]["token_ids"] == [] and outputs[BAD]["text"] == ""
    assert ask(llm, PROMPTS) == expected


def test_what_a_callback_raises_for_one_prompt_costs_no_other_its_answer(llm, expected) -> None:
    pieces: Counter[int] = Counter()
    texts = [output["text"] for output in llm.generate(PROMPTS, PARAMS, False, lambda i, _: pieces.update([i]))]
    for number in (1, pieces[BAD]):  # the last one is told when all tokens are there
        with raised() as outputs:
            llm.generate(PROMPTS, PARAMS, False, raising_at_piece(number))
        check_that_one_failed(outputs, expected)
        assert [output["text"] for output in outputs[BAD + 1 :]] == texts[BAD + 1 :]
    assert outputs[BAD]["token_ids"] == expected[BAD]
    assert ask(llm, PROMPTS) == expected


def test_an_error_in_one_prompts_text_costs_no_other_its_answer(llm, expected, monkeypatch) -> None:
    others = {token for i, tokens in enumerate(expected) if i != BAD for token in tokens}
    at = next(i for i, token in enumerate(expected[BAD]) if token not in others and i > 2)
    fail_at_token(monkeypatch, expected[BAD][at])
    with raised() as outputs:
        llm.generate(PROMPTS, PARAMS, False)
    check_that_one_failed(outputs, expected)
    assert outputs[BAD]["token_ids"] == expected[BAD][: at + 1]
    assert outputs[BAD]["text"] == llm.tokenizer.decode(expected[BAD][:at])


@pytest.mark.needs("side by side")
def test_a_stream_goes_on_with_the_others_when_one_prompt_fails(llm, expected) -> None:
    told = [""] * len(PROMPTS)
    with sampler(llm, choose_but_for_one):
        stream = llm.stream(PROMPTS, PARAMS)
    with raised() as outputs:
        for index, piece in stream:
            told[index] += piece
    check_that_one_failed(outputs, expected)
    assert told == [output["text"] for output in outputs]


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_in_a_callback_leaves_nothing_of_its_call_behind(llm, expected, error: type) -> None:
    with pytest.raises(error, match="stop here"):
        ask(llm, PROMPTS, GREEDY, stopping(error))
    told: set[int] = set()
    assert ask(llm, PROMPTS[:2], GREEDY, lambda index, piece: told.add(index)) == expected[:2]
    assert told == {0, 1}


@pytest.mark.needs("pool")
def test_a_call_beside_added_requests_that_fails_takes_none_of_them_along(llm, expected) -> None:
    request = llm.add_request(PROMPTS[1], GREEDY)
    with pytest.raises(LookupError, match="stop here"):
        ask(llm, PROMPTS[2:4], GREEDY, stopping(LookupError))
    assert finish(llm) == {request: expected[1]}


@pytest.mark.needs("side by side")
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_in_a_callback_ends_its_own_call_alone(llm, expected, error: type) -> None:
    good = llm.stream([PROMPTS[1]], GREEDY)
    pieces = [next(good)[1]]
    with pytest.raises(error, match="stop here"):
        ask(llm, PROMPTS[2:4], GREEDY, stopping(error))
    assert "".join(pieces + [piece for _, piece in good]) == llm.tokenizer.decode(expected[1])


@pytest.mark.needs("pool")
def test_an_error_in_one_requests_text_drops_that_request_alone(llm, expected, monkeypatch) -> None:
    fail_at_token(monkeypatch, next(token for token in expected[1][3:] if token not in expected[0]))
    kept, _ = (llm.add_request(prompt, READ_AS_IT_COMES) for prompt in PROMPTS[:2])
    outputs, errors = {}, []
    while not llm.is_finished():
        try:
            outputs.update(llm.step()[0])
        except UnicodeError as error:
            errors.append(str(error))
    assert outputs == {kept: expected[0]}
    assert len(errors) == 1 and "has no text" in errors[0]


@pytest.mark.needs("side by side")
def test_an_error_in_one_streams_text_ends_that_stream_alone(llm, expected, monkeypatch) -> None:
    fail_at_token(monkeypatch, next(token for token in expected[2][3:] if token not in expected[1] + expected[3]))
    good = llm.stream([PROMPTS[1]], GREEDY)
    pieces = [next(good)[1]]
    with pytest.raises(UnicodeError, match="has no text"):
        list(llm.stream([PROMPTS[2]], GREEDY))  # runs the steps of both
    assert "".join(pieces + [piece for _, piece in good]) == llm.tokenizer.decode(expected[1])
    assert ask(llm, [PROMPTS[3]], GREEDY, lambda *_: None) == [expected[3]]


@pytest.mark.needs("pool", "one process")
@pytest.mark.parametrize(
    ("error", "num_prompts", "fails_at"),
    [(RuntimeError, 1, 1), (RuntimeError, 2, 2), (KeyboardInterrupt, 1, 2), (KeyboardInterrupt, 2, 1)],
)
def test_blocks_of_a_run_that_wrote_nothing_are_not_served_later(engine, error, num_prompts, fails_at) -> None:
    prompts = [[*range(10, 27), 100 + i] for i in range(num_prompts)]

    def fail(number: int) -> None:
        if number == fails_at:
            llm.kv_cache.tensor.fill_(7)  # overwrite the pool, so that old contents cannot pass for new ones
            raise error("wrote nothing")

    with engine.made(kvcache_block_size=4) as llm:
        with forward_calls(llm, fail), pytest.raises(error, match="wrote nothing") as caught:
            ask(llm, prompts)
        assert held(llm) == NOTHING, f"although {caught.value!r} keeps the frames of the call alive"
        outputs = llm.generate(prompts, GREEDY, False)
        assert outputs[0]["metrics"]["num_cached_tokens"] == 0
    with engine.made(kvcache_block_size=4) as fresh:
        assert ids(outputs) == ask(fresh, prompts)


@pytest.mark.needs("pool", "one process")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_requests_that_were_added_outlive_steps_that_break_off(engine, expected, error: type) -> None:
    def fail(number: int) -> None:
        if number in (1, 5):
            llm.kv_cache.tensor.fill_(7)  # the contents of the pool are unknown after a step that broke off
            raise error("stop here")

    outputs: dict[int, list[int]] = {}
    with engine.made(kvcache_block_size=4) as llm:
        added = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
        with forward_calls(llm, fail):
            while not llm.is_finished():
                with suppress(error):
                    outputs.update(llm.step()[0])
        assert [outputs[request] for request in added] == expected[:3]


@pytest.mark.needs("side by side")
def test_an_abort_from_another_thread_is_an_error_of_the_call_that_waits(llm, expected) -> None:
    with waiting_call(llm, PROMPTS[1]) as (call, go_on):
        [sequence] = llm.engine.scheduler.unfinished
        assert llm.calls.abort(sequence.request_id)
        go_on.set()
        with pytest.raises(RuntimeError, match=r"request \d+ was aborted by another call"):
            call.result(60)
    assert ask(llm, PROMPTS[:1]) == expected[:1]


@pytest.mark.needs("side by side")
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_request_that_was_added_and_aborted_is_no_error_of_the_steps_after(llm, expected, num_steps: int) -> None:
    aborted = llm.add_request(PROMPTS[0], replace(GREEDY, max_tokens=100))
    kept = llm.add_request(PROMPTS[1], GREEDY)
    outputs: dict[int, list[int]] = {}
    for _ in range(num_steps):
        outputs.update(llm.step()[0])
    assert llm.calls.abort(aborted) and not llm.calls.abort(aborted)
    assert outputs | finish(llm) == {kept: expected[1]}


OVERFLOWING = ["What is a KV cache?", "Why?", "What is prefill?", "用要点概述", "A block table"]
WAYS = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 2},
    {"top_p": 0.9, "seed": 3},
]
ASKED = (
    OVERFLOWING * len(WAYS),
    [SamplingParams(max_tokens=12, ignore_eos=True, **way) for way in WAYS for _ in OVERFLOWING],
)


def ends(llm: NaiveLLM, prompts: list[str], params: list[SamplingParams]) -> list[tuple[list[int], str]]:
    with pytest.raises(FloatingPointError, match="scores for the next token have no finite maximum") as caught:
        llm.generate(prompts, params, False)
    return [(output["token_ids"], output["finish_reason"]) for output in caught.value.outputs]


@pytest.fixture(scope="session")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[list[int], str]]]:
    """A model, and where stage A's answers end.

    Its weights are finite, and its logits infinite or NaN where one channel of its last norm is above 1.
    """
    folder = Path(shutil.copytree(TUTOR_PATH, tmp_path_factory.mktemp("overflowing") / "model"))
    [path] = folder.glob("*.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"][20] = 3e38
    save_file(weights, path, metadata={"format": "pt"})
    return folder, ends(NaiveLLM(folder, device="cpu"), *ASKED)


@pytest.mark.needs("exact")
def test_scores_without_a_finite_maximum_end_their_request_at_the_first_such_step(engine, overflowing: tuple) -> None:
    folder, expected = overflowing
    assert {len(token_ids) for token_ids, reason in expected if reason == "error"} >= {1, 5, 8}
    assert "length" in [reason for _, reason in expected]
    with engine.made(folder) as llm:
        assert ends(llm, *ASKED) == expected
        with sampler(llm, lambda logits, params: logits.nan_to_num(0, 0).argmax(-1)):
            assert "error" in [reason for _, reason in ends(llm, OVERFLOWING, ASKED[1][:5])]
