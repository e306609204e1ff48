"""Stage B's own: a switch for every idea, late checks that are cut exactly, and work that is done once."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from contract.engines import GREEDY, MODEL, ask, sampler

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_b_decode_step import LLM
from stage_b_decode_step.token_log import TokenLog

LONG = replace(GREEDY, max_tokens=20)
PROMPT = [[5, 6, 7]]
PROMPTS = [[17], list(range(100, 130)), [7 * i % 4000 for i in range(290)]]  # one token; short; beyond 256
PARAMS = [
    LONG,
    SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=3, max_tokens=20),
    replace(LONG, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5),
]
SWITCHES = ["static_cache", "last_logits_only", "pinned", "buffers", "async_eos", "sdpa", "warmup"]


@pytest.fixture(scope="module")
def naive() -> NaiveLLM:
    return NaiveLLM(MODEL, device="cpu")


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With a chunk size that divides none of the lengths asked for."""
    return LLM(MODEL, device="cpu", sync_every=3)


@contextmanager
def counted_steps(llm: LLM) -> Iterator[list[int]]:
    """The decode steps that an engine runs while the block lasts, a 1 for each."""
    steps: list[int] = []
    hook = llm.decode_step.register_forward_pre_hook(lambda *_: steps.append(1))
    yield steps
    hook.remove()


@pytest.mark.parametrize(
    "options",
    [
        *({name: False} for name in SWITCHES),
        {"sync_every": 5},
        {"sync_every": 50},
        {"matmul_precision": "highest"},
        dict.fromkeys(SWITCHES, False) | {"matmul_precision": "highest"},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_idea_can_be_switched_off_alone_and_together(naive: NaiveLLM, options: dict[str, object]) -> None:
    assert ask(LLM(MODEL, device="cpu", **options), PROMPTS, PARAMS) == ask(naive, PROMPTS, PARAMS)


def test_few_steps_are_computed_in_vain_and_none_where_the_end_is_known(llm: LLM) -> None:
    [ids] = ask(llm, PROMPT, LONG)
    with counted_steps(llm) as steps:
        ask(llm, PROMPT, LONG)
    assert len(steps) == LONG.max_tokens - 1  # the first token is the prefill's
    end = next(i for i in range(4, 20) if ids.index(ids[i]) == i)
    with counted_steps(llm) as steps:
        ask(llm, PROMPT, replace(LONG, stop_token_ids=(ids[end],)))
    assert end <= len(steps) < end + 2 * llm.sync_every


class LateLog(TokenLog):
    """A log of which a chunk arrives only when it is waited for, as from a GPU that is busy."""

    def clear(self) -> None:
        super().clear()
        self.chunks: list[list[int]] = []

    def receive(self, max_in_flight: int) -> list[int]:
        if chunk := super().receive(0):
            self.chunks.append(chunk)
        return [token for _ in range(len(self.chunks) - max_in_flight) for token in self.chunks.pop(0)]


@pytest.mark.parametrize("buffers", [True, False])
def test_the_end_is_known_when_the_next_chunk_but_one_is_sent(monkeypatch: pytest.MonkeyPatch, buffers: bool) -> None:
    monkeypatch.setattr("stage_b_decode_step.llm.TokenLog", LateLog)
    llm = LLM(MODEL, device="cpu", buffers=buffers, sync_every=4)
    params = replace(GREEDY, max_tokens=60)
    [ids] = ask(llm, PROMPT, params)
    end = next(i for i in range(5, 40) if ids.index(ids[i]) == i)  # chosen in step `end`
    with counted_steps(llm) as steps:
        assert ask(llm, PROMPT, replace(params, stop_token_ids=(ids[end],))) == [ids[: end + 1]]
    assert len(steps) == 4 * math.ceil(end / 4) + 4  # the chunk may stay in flight until the next one is sent


def test_a_request_finds_nothing_of_the_one_before_in_the_cache(naive: NaiveLLM, llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=230)
    assert ask(llm, [PROMPTS[2], PROMPTS[1]], params)[1] == ask(naive, [PROMPTS[1]], params)[0]


def test_the_warm_up_of_a_prompt_that_nearly_fills_the_cache_stays_inside_it(naive: NaiveLLM) -> None:
    prompt, params = [[9] * 254], replace(GREEDY, max_tokens=2)
    assert ask(LLM(MODEL, device="cpu"), prompt, params) == ask(naive, prompt, params)


def test_a_sampler_may_keep_its_logits_although_a_graph_overwrites_them(llm: LLM) -> None:
    buffer, kept = torch.empty(1, 4096), []
    hook = llm.decode_step.register_forward_hook(lambda step, inputs, logits: buffer.copy_(logits))  # as a CUDA graph
    with sampler(llm, lambda logits, params: kept.append(logits) or logits.argmax(-1)):
        [ids] = ask(llm, "abc", LONG)
    hook.remove()
    assert [int(logits.argmax()) for logits in kept[: len(ids)]] == ids and len(set(ids)) > 1


def test_the_precision_of_matrices_is_the_engines_during_a_call_alone(llm: LLM) -> None:
    before, during = torch.get_float32_matmul_precision(), set()
    ask(llm, "abc", GREEDY, lambda *_: during.add(torch.get_float32_matmul_precision()))
    assert during == {"high"} and torch.get_float32_matmul_precision() == before != "high"


def test_warm_up_is_done_once_a_cache_size_and_counts_as_build_time() -> None:
    llm = LLM(MODEL, device="cpu")
    built = llm.build_time
    steps = []
    for prompts, max_tokens in (([[1, 2]], 1), ([[1, 2], [3, 4]], 20), ([[1, 2], [3, 4]], 20), ([[1] * 300], 20)):
        with counted_steps(llm) as counted:
            ask(llm, prompts, replace(GREEDY, max_tokens=max_tokens))
        steps.append(len(counted))
    assert steps == [0, 4 + 2 * 19, 2 * 19, 4 + 19], "one token needs no step, so none is compiled for it"
    assert llm.build_time > built


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sync_every": "4"}, "sync_every must be None or an integer, 1 or more, got '4'"),
        ({"compile": "no"}, "compile must be True or False, got 'no'"),
        ({"sdpa": "no"}, "sdpa must be None, True or False, got 'no'"),
        ({"warmup": 1}, "warmup must be True or False, got 1"),
        ({"matmul_precision": "low"}, "got 'low'"),
    ],
)
def test_options_of_a_wrong_kind_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM(MODEL, device="cpu", **options)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("options", "attention"),
    [
        ({}, "grouped_sdpa"),
        ({"compile": True}, "grouped_sdpa_for_prefill"),
        ({"compile": True, "sdpa": True}, "grouped_sdpa"),
        ({"compile": True, "sdpa": False}, None),
        ({"sdpa": False}, None),
    ],
)
def test_attention_is_a_fused_kernel_except_where_a_compiler_makes_its_own_or_it_is_switched_off(
    options: dict[str, bool], attention: str | None
) -> None:
    llm = LLM(MODEL, device="cpu", **options)
    called = []

    def note(frame, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name.startswith("grouped_sdpa"):
            called.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        ask(llm, [[1, 2, 3]], replace(GREEDY, max_tokens=1))  # a prefill alone, for which nothing is compiled
    finally:
        sys.setprofile(before)
    assert next(iter(called), None) == attention


def test_the_prefill_computes_the_logits_of_its_last_position_only_unless_told_otherwise() -> None:
    for last_only, rows in ((True, 1), (False, 30)):
        llm = LLM(MODEL, device="cpu", last_logits_only=last_only, warmup=False)
        computed: list[int] = []
        llm.model.lm_head.register_forward_hook(lambda head, inputs, out, seen=computed: seen.append(out.shape[1]))
        ask(llm, [list(range(30))], replace(GREEDY, max_tokens=2))
        assert computed == [rows, 1]
