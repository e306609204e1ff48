"""Layers that see only the last tokens: every engine's tokens are stage A's, for prompts longer than two windows."""

from __future__ import annotations

import pytest

from contract.engines import NOTHING, PROMPTS, ask, held, ids, one_by_one
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams

MODEL = "random:gemma3-tiny"  # windows of 8 in two layers of three
LONGER = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)  # three windows more


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    return one_by_one(NaiveLLM(MODEL, device="cpu"), LONGER)


def test_every_engine_gives_stage_as_tokens_with_and_without_a_cached_prefix(engine, right) -> None:
    with engine.made(MODEL) as llm:
        expected = right if "exact" in engine.has else one_by_one(llm, LONGER)
        for _ in range(2):
            assert ask(llm, PROMPTS, LONGER) == expected
        outputs = llm.generate([PROMPTS[4]] * 3, LONGER, False)
        assert ids(outputs) == [expected[4]] * 3
        if "pool" in engine.has:
            assert [output["metrics"]["num_cached_tokens"] for output in outputs] == [40] * 3
            assert held(llm) == NOTHING


@pytest.mark.gpu
@pytest.mark.needs("pool", "one process", "exact")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_on_a_gpu_every_attention_backend_gives_stage_as_tokens(engine, backend: str) -> None:
    gpu = {"device": "cuda", "dtype": "float32"}
    expected = one_by_one(NaiveLLM(MODEL, **gpu), LONGER)
    with engine.made(MODEL, **gpu, attention_backend=backend) as llm:
        for _ in range(2):
            assert ask(llm, PROMPTS, LONGER) == expected


@pytest.mark.gpu
@pytest.mark.needs("pool", "one process", "exact")
def test_on_a_gpu_the_real_shape_runs_and_one_line_says_what_is_passed_over(engine, capfd) -> None:
    options = {"kvcache_block_size": None, "num_kvcache_blocks": 64, "max_model_len": 1500}
    prompts = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (1200, 3, 600)]
    with engine.made("random:gemma-3-270m", device="cuda", dtype="bfloat16", **options) as llm:
        assert [len(tokens) for tokens in ask(llm, prompts, LONGER)] == [30] * 3
    if engine.package == "stage_f_graph_tp":
        assert "our Triton kernels do not compute four norms per layer" in capfd.readouterr().err
