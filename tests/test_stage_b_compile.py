"""The compiled decode step: the same tokens, one program per cache length, and a clear error where it cannot work."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_model import completion_of
from tiny_checkpoints import save_tiny
from torch._dynamo import config as compiler
from torch._dynamo.utils import counters

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_a_naive.sampling import choose_tokens
from stage_b_decode_step import LLM
from stage_b_decode_step.decode_step import check_compiler
from stage_b_decode_step.static_cache import cache_length

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


@needs_compiler
def test_a_compiled_step_gives_the_same_tokens_and_compiles_once_a_cache_length(tmp_path: Path) -> None:
    torch.compiler.reset()
    counters.clear()
    model = save_tiny(tmp_path, "qwen2-tiny", num_hidden_layers=1, layer_types=["full_attention"])  # half of the C++
    naive = NaiveLLM(model, device="cpu")
    llm = LLM(model, device="cpu", compile=True)
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    prompts = [[5], [6] * 30, [7] * 200]
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=1, max_tokens=12)):
        expected = [o["token_ids"] for o in naive.generate(prompts, params, use_tqdm=False)]
        assert [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert counters["stats"]["unique_graphs"] == 1


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.compile` trace programs, and guard them, but run them operation by operation."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_cache_lengths_may_be_more_than_pytorchs_limit_of_programs() -> None:
    llm = LLM("random:qwen2-tiny", device="cpu", compile=True)
    ends_at_once = tuple(range(llm.vocab_size))  # what is compiled is the step of the warm-up
    with compiler.patch(recompile_limit=2):
        for length in (256, 512, 768):
            params = SamplingParams(temperature=0, max_tokens=length - 1, stop_token_ids=ends_at_once)
            assert len(llm.generate([[1]], params, use_tqdm=False)[0]["token_ids"]) == 1
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("warmup", [True, False])
def test_with_the_warm_up_compiling_is_over_when_the_first_request_starts_and_logits_are_plain_tensors(
    warmup: bool,
) -> None:
    llm, compiled = LLM("random:qwen2-tiny", device="cpu", compile=True, warmup=warmup), []

    def note(logits: torch.Tensor, _: object) -> torch.Tensor:
        assert not logits.requires_grad and not logits.is_inference()
        compiled.append(counters["stats"]["unique_graphs"])
        return logits.argmax(-1)

    llm.sampling_fn = note
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert compiled[0] == (1 if warmup else 0) and compiled[-1] == 1 and len(compiled) == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("device", "environment", "message"),
    [
        ("cpu", {"PATH": ""}, r"needs a C\+\+ compiler .*looked for g\+\+"),
        ("cuda", {"PATH": ""}, "needs a C compiler .*gcc, clang, cc"),
        ("cpu", {"CXX": "/bin/false"}, "'/bin/false' does not start .*; set CXX to one that does"),
        ("cuda", {"CC": "/bin/false"}, "'/bin/false' does not start .*; set CC to one that does"),
        ("cuda without Triton", {}, "needs Triton"),
    ],
)
def test_what_compiling_lacks_is_one_line_that_says_what_to_do(device, environment, message, monkeypatch) -> None:
    triton = ModuleType("triton")
    triton.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    device, *without = device.split(" without ")
    monkeypatch.setitem(sys.modules, "triton", None if without else triton)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) as caught:
        if device == "cpu":
            LLM("random:qwen2-tiny", device="cpu", compile=True)
        else:
            check_compiler(torch.device("cuda"))
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_on_a_gpu_every_switch_gives_the_tutors_tokens() -> None:
    question = [{"role": "user", "content": "What is a KV cache?"}]
    params = SamplingParams(0.0, max_tokens=128)
    expected = NaiveLLM("tutor", device="cpu").chat(question, params, use_tqdm=False)[0]
    off = ("static_cache", "last_logits_only", "pinned", "buffers", "async_eos", "sdpa", "warmup")
    for options in ({}, *({name: False} for name in off), {"sync_every": 3}, {"dtype": "float32"}):
        [output] = LLM("tutor", device="cuda", **options).chat(question, params, use_tqdm=False)
        assert (output["token_ids"], output["text"]) == (expected["token_ids"], expected["text"]), options


@pytest.mark.gpu
def test_on_a_gpu_a_compiled_step_is_recorded_once_a_cache_length_and_gives_the_tutors_tokens() -> None:
    questions = [[{"role": "user", "content": q}] for q in ("What is a KV cache?", "What is prefill?")]
    llm = LLM("tutor", device="cuda", compile=True)
    torch.compiler.reset()
    counters.clear()
    naive, lengths = NaiveLLM("tutor", device="cuda"), set()
    for params in (SamplingParams(0.0, max_tokens=100), SamplingParams(0.0, max_tokens=40, logprobs=2)):
        expected = naive.chat(questions, params, use_tqdm=False)
        outputs = llm.chat(questions, params, use_tqdm=False)
        assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in expected]
        lengths |= {cache_length(len(o["prompt_token_ids"]) + params.max_tokens) for o in outputs}
    assert counters["stats"]["unique_graphs"] == len(lengths)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
def test_on_a_gpu_sampling_waits_for_nothing() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=3)
    logits, completion = torch.randn(1, 4096, device="cuda"), completion_of([1, 2, 3], params)
    expected = choose_tokens(logits, [completion], [0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = choose_tokens(logits, [completion], [0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
