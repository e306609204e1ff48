"""What a step sends to the device: one copy of its input, whatever its requests ask of the sampler."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp.step_input import StepBuffers

KINDS = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "chat": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "logprobs": {"temperature": 0, "logprobs": 20},
}
PROMPTS = [[7 * i + 1, 3 * i + 2, 5] * (1 + i) for i in range(12)]


def params_of(kind: str, count: int) -> list[SamplingParams]:
    """Of requests of one kind, or of all kinds in turn, that end one after another."""
    kinds = list(KINDS.values()) if kind == "mixture" else [KINDS[kind]]
    return [SamplingParams(max_tokens=4 + 2 * i, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("kind", [*KINDS, "mixture"])
def test_a_step_makes_one_copy_of_what_is_on_the_host(kind: str) -> None:
    llm = stage_f_graph_tp.LLM("random:qwen2-tiny", device="cpu", max_num_seqs=6, num_kvcache_blocks=64)
    launch, send = type(llm.runner).launch.__code__, StepBuffers.send.__code__
    from_the_host = (torch.tensor, torch.from_numpy, torch.as_tensor)  # from Python's or numpy's numbers to a tensor
    made: Counter[str] = Counter()
    steps: list[tuple[int, dict[str, int]]] = []

    def note(frame, event: str, called: object) -> None:
        if event == "call" and frame.f_code is launch:
            made.clear()
        elif event == "call" and frame.f_code is send:
            made["input"] += 1
        elif event == "c_call" and any(called is function for function in from_the_host):
            made[called.__name__] += 1
        elif event == "return" and frame.f_code is launch:
            steps.append((len(frame.f_locals["step"]), dict(made)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        llm.generate(PROMPTS, params_of(kind, len(PROMPTS)), False)
    finally:
        sys.setprofile(before)
    assert len(steps) > 15, "requests are admitted while others run"
    for sequences, copies in steps:
        assert copies == ({"input": 1} if sequences else {})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "mixture"])
@pytest.mark.parametrize(
    "options", [{}, {"without": "fused_layers,skinny_gemm,megakernel"}, {"enforce_eager": True}], ids=str
)
def test_no_step_waits_for_the_gpu_or_copies_from_pageable_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict
) -> None:
    llm = stage_f_graph_tp.LLM("tutor", device="cuda", gpu_memory_utilization=0.1, max_num_seqs=12, **options)
    llm.generate(PROMPTS, params_of(kind, len(PROMPTS)), False)  # what runs for the first time may wait
    inside = False

    def refused_if_pageable(source: object) -> None:
        if inside and isinstance(source, torch.Tensor) and source.device.type == "cpu":
            assert source.is_pinned() or source.dim() == 0, f"a copy of {tuple(source.shape)} from pageable memory"

    def guarded(function: Callable, source_at: int) -> Callable:
        def call(*args, **kwargs):
            refused_if_pageable(args[source_at] if len(args) > source_at else None)
            return function(*args, **kwargs)

        return call

    for name, source_at in (("to", 0), ("cuda", 0), ("copy_", 1)):
        monkeypatch.setattr(torch.Tensor, name, guarded(getattr(torch.Tensor, name), source_at))
    launch, steps = llm.runner.launch, 0

    def launch_and_look(step):
        nonlocal inside, steps
        inside, steps = True, steps + 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            inside = False

    monkeypatch.setattr(llm.runner, "launch", launch_and_look)
    llm.generate(PROMPTS, params_of(kind, len(PROMPTS)), False)
    assert steps > 20
