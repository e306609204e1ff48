"""Every stage samples the same tokens, whatever mixture of parameters its requests bring, and however many may run."""

from __future__ import annotations

import importlib
import random

import pytest

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams

MODEL = "random:qwen2-tiny"
POOL = {"num_kvcache_blocks": 256, "kvcache_block_size": 8, "max_model_len": 200}
OTHERS = {
    "stage_b_decode_step": {},
    "stage_c_fused_mlp": {},
    "stage_d_paged": POOL,
    "stage_e_batching": POOL,
    "stage_f_graph_tp": POOL,
}
REQUESTS = 14


def mixture(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts in which tokens come again, and what each of them asks for."""
    numbers = random.Random(seed)

    def some(*values: float | None) -> float | None:
        return numbers.choice(values)

    prompts = [numbers.choices(range(1, 30), k=numbers.randint(1, 25)) for _ in range(REQUESTS)]
    params = [
        SamplingParams(
            temperature=some(0.0, 0.3, 0.7, 1.0, 1.7, 1e300, 5e-324),
            top_k=some(0, 0, 1, 5, 20, 400, 4095, 10**6),
            top_p=some(1.0, 1.0, 0.95, 0.8, 0.3, 1e-6, 0.99999999),
            min_p=some(0.0, 0.0, 0.02, 0.3, 1.0),
            repetition_penalty=some(1.0, 1.0, 1.05, 1.3, 0.8),
            presence_penalty=some(0.0, 0.0, 0.5, -0.3),
            frequency_penalty=some(0.0, 0.0, 0.4, -0.2),
            logprobs=some(None, None, 0, 3, 20),
            seed=numbers.getrandbits(64),
            max_tokens=numbers.randint(1, 10),
            ignore_eos=True,
        )
        for _ in range(REQUESTS)
    ]
    return prompts, params


MIXTURES = [mixture(seed) for seed in range(4)]


def tokens(outputs: list) -> list[tuple]:
    """The tokens of each answer, and those whose log-probabilities are reported."""
    return [(o["token_ids"], [list(step) for step in o.get("logprobs", [])]) for o in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[tuple]]:
    naive = NaiveLLM(MODEL, device="cpu")
    return [tokens(naive.generate(prompts, params, False)) for prompts, params in MIXTURES]


def check(llm, expected: list[list[tuple]]) -> None:
    for (prompts, params), right in zip(MIXTURES, expected, strict=True):
        found = tokens(llm.generate(prompts, params, False))
        assert [p for p, a, b in zip(params, found, right, strict=True) if a != b] == []


@pytest.mark.parametrize(
    "stage", [pytest.param(s, marks=pytest.mark.compiler) if "_c_" in s else s for s in OTHERS], ids=str
)
def test_requests_of_any_mixture_get_stage_as_tokens(stage: str, expected: list[list[tuple]]) -> None:
    llm = importlib.import_module(stage).LLM(MODEL, device="cpu", **OTHERS[stage])
    check(llm, expected)
    llm.close()


@pytest.mark.parametrize("stage", ["stage_e_batching", "stage_f_graph_tp"])
@pytest.mark.parametrize("most", [1, 3])
def test_requests_that_wait_for_a_row_of_counts_get_the_same_tokens(stage, most, expected) -> None:
    llm = importlib.import_module(stage).LLM(
        MODEL, device="cpu", max_num_penalty_seqs=most, max_num_seqs=6, **OTHERS[stage]
    )
    running, schedule = [], llm.engine.scheduler.schedule

    def schedule_and_count():
        step = schedule()
        running.append(sum(s.request.params.needs_penalties for s in step.sequences))
        return step

    llm.engine.scheduler.schedule = schedule_and_count
    check(llm, expected)
    assert max(running) == most, "no more than have a row, and never fewer without need"
    llm.close()
