"""The compiled decode step: the same tokens, one program a cache length, and a clear word where it cannot work."""

from __future__ import annotations

import os
import shutil
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_b_decode_step import LLM
from stage_b_decode_step.decode_step import check_compiler

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


@needs_compiler
def test_a_compiled_step_gives_the_same_tokens_and_compiles_once_a_cache_length() -> None:
    torch._dynamo.reset()
    counters.clear()
    naive = NaiveLLM("random:qwen2-tiny", device="cpu")
    llm = LLM("random:qwen2-tiny", device="cpu", compile=True)
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    prompts = [[5], [6] * 30, [7] * 200]
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=1, max_tokens=12)):
        expected = [o["token_ids"] for o in naive.generate(prompts, params, use_tqdm=False)]
        assert [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert counters["stats"]["unique_graphs"] == 1


def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.compile` trace programs, and guard them, but run them operation by operation."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def test_cache_lengths_may_be_more_than_pytorchs_limit_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    traced_only(monkeypatch)
    llm = LLM("random:qwen2-tiny", device="cpu", compile=True)
    ends_at_once = tuple(range(llm.vocab_size))  # what is compiled is the step of the warm-up
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (256, 512, 768):
            params = SamplingParams(temperature=0, max_tokens=length - 1, stop_token_ids=ends_at_once)
            assert len(llm.generate([[1]], params, use_tqdm=False)[0]["token_ids"]) == 1
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("warmup", [True, False])
def test_with_the_warm_up_compiling_is_over_when_the_first_request_starts(
    monkeypatch: pytest.MonkeyPatch, warmup: bool
) -> None:
    traced_only(monkeypatch)
    llm = LLM("random:qwen2-tiny", device="cpu", compile=True, warmup=warmup)
    answer, before = llm._generate_one, []

    def count_first(*args: object) -> object:
        before.append(counters["stats"]["unique_graphs"])
        return answer(*args)

    monkeypatch.setattr(llm, "_generate_one", count_first)
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert before == [1 if warmup else 0] and counters["stats"]["unique_graphs"] == 1


def test_a_compiled_step_records_nothing_for_autograd_and_its_logits_are_no_tensors_of_inference_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced_only(monkeypatch)
    llm = LLM("random:qwen2-tiny", device="cpu", compile=True)
    seen = []
    llm.sampling_fn = lambda logits, params: (seen.append(logits), logits.argmax(-1))[1]
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert len(seen) == GREEDY.max_tokens
    assert not any(logits.requires_grad or logits.is_inference() for logits in seen)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler.*looked for g\+\+"):
        LLM("random:qwen2-tiny", device="cpu", compile=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match="needs a C compiler.*gcc, clang, cc"):
        check_compiler(torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Triton"):
        check_compiler(torch.device("cuda"))


@pytest.mark.parametrize(("kind", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_a_compiler_that_does_not_start_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, kind: str, variable: str
) -> None:
    monkeypatch.setenv(variable, "/bin/false")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match=rf"'/bin/false' does not start .*; set {variable} to one that does") as caught:
        check_compiler(torch.device(kind))
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_on_a_gpu_every_switch_gives_the_tutors_tokens() -> None:
    question = [{"role": "user", "content": "What is a KV cache?"}]
    params = SamplingParams(0.0, max_tokens=128)
    expected = NaiveLLM("tutor", device="cpu").chat(question, params, use_tqdm=False)[0]
    for options in (
        {},
        {"static_cache": False},
        {"last_logits_only": False},
        {"pinned": False},
        {"buffers": False},
        {"async_eos": False},
        {"sync_every": 3},
        {"sdpa": False},
        {"warmup": False},
        {"dtype": "float32"},
    ):
        [output] = LLM("tutor", device="cuda", **options).chat(question, params, use_tqdm=False)
        assert (output["token_ids"], output["text"]) == (expected["token_ids"], expected["text"]), options


@pytest.mark.gpu
def test_on_a_gpu_a_compiled_step_is_recorded_once_a_cache_length_and_gives_the_tutors_tokens() -> None:
    questions = [[{"role": "user", "content": q}] for q in ("What is a KV cache?", "What is prefill?")]
    llm = LLM("tutor", device="cuda", compile=True)
    torch._dynamo.reset()
    counters.clear()
    naive = NaiveLLM("tutor", device="cuda")
    for params in (SamplingParams(0.0, max_tokens=100), SamplingParams(0.0, max_tokens=40, logprobs=2)):
        expected = naive.chat(questions, params, use_tqdm=False)
        outputs = llm.chat(questions, params, use_tqdm=False)
        assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in expected]
    lengths = len(llm._work)
    assert counters["stats"]["unique_graphs"] == lengths
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
def test_on_a_gpu_sampling_waits_for_nothing() -> None:
    llm = LLM("random:qwen2-tiny", device="cuda")
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=3, max_tokens=8)
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
    choose = llm._choose

    def refused_to_wait(*args: object, **kwargs: object) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return choose(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    llm._choose = refused_to_wait
    [output] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output["token_ids"]) <= 8
