"""Layers with windows or experts: every engine that runs them gives stage A's tokens, and others refuse by name."""

from __future__ import annotations

import pytest
from ranks import forked_ranks

from contract.engines import BATCHING, GREEDY, NOTHING, PROMPTS, ask, held, ids, one_by_one, right_of, row
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_a_naive.contract.errors import ModelError

WINDOWS = "random:gemma3-tiny"  # windows of 8 in two layers of three
EXPERTS = "random:qwen3-moe-tiny"  # 4 of 16 experts per token
OTHERS = ("random:qwen2-moe-tiny", "random:mixtral-tiny")
LONGER = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)  # three windows more
IN_PIECES = {"max_num_batched_tokens": 7, "max_num_seqs": 5}
FOR_TWO = {"num_kvcache_blocks": 20, "kvcache_block_size": 4}
OPTIONS = {
    WINDOWS: ({"kvcache_block_size": 2}, {"enable_prefix_caching": False}, IN_PIECES, FOR_TWO),
    EXPERTS: ({"kvcache_block_size": 4}, {"enforce_eager": True}, IN_PIECES, FOR_TWO),
}
GPU = {"device": "cuda", "dtype": "float32"}


def on(model: str, *values: object) -> object:
    """A test's parameters; only engines with experts get a model that has them."""
    return pytest.param(model, *values, marks=[pytest.mark.needs("experts")] * (model == EXPERTS))


@pytest.mark.parametrize("model", [on(WINDOWS), on(EXPERTS)])
def test_every_engine_gives_stage_as_tokens_with_and_without_a_cached_prefix(engine, model: str) -> None:
    with engine.made(model) as llm:
        expected = right_of(model, LONGER) if "exact" in engine.has else one_by_one(llm, LONGER)
        for _ in range(2):
            assert ask(llm, PROMPTS, LONGER) == expected
        outputs = llm.generate([PROMPTS[4]] * 3, LONGER, False)
        assert ids(outputs) == [expected[4]] * 3
        if "pool" in engine.has:
            assert [output["metrics"]["num_cached_tokens"] for output in outputs] == [40] * 3
            assert held(llm) == NOTHING


@pytest.mark.needs("pool", "one process", "exact")
@pytest.mark.parametrize(("model", "options"), [on(model, one) for model, own in OPTIONS.items() for one in own])
def test_no_option_of_memory_or_of_steps_changes_a_token(engine, model: str, options: dict) -> None:
    with engine.made(model, **options) as llm:
        for _ in range(2):
            assert ask(llm, PROMPTS, LONGER) == right_of(model, LONGER)
        if options is FOR_TWO and "side by side" in engine.has:
            assert llm.calls.stats()["num_preemptions"] > 0, "or the pool is not tight"
        assert held(llm) == NOTHING


@pytest.mark.needs("experts", "one process", "exact")
@pytest.mark.parametrize("model", OTHERS)
def test_the_other_families_give_stage_as_tokens_too(engine, model: str) -> None:
    with engine.made(model, seed=3) as llm:
        assert ask(llm, PROMPTS) == right_of(model, seed=3)


DIVIDED = [
    row(way, "beyond.experts", BATCHING, "exact", tensor_parallel_size=2, expert_parallel=way)
    for way in ("sum", "all_to_all")
]


@pytest.mark.parametrize("engine", DIVIDED, indirect=True, ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    ("model", "options"),
    [(EXPERTS, {}), *((model, IN_PIECES | {"num_kvcache_blocks": 20}) for model in (EXPERTS, *OTHERS))],
)
def test_two_ranks_with_whole_experts_give_stage_as_tokens(engine, model: str, options: dict) -> None:
    with forked_ranks(), engine.made(model, **options) as llm:
        for _ in range(2):
            assert ask(llm, PROMPTS) == right_of(model)
        assert held(llm) == NOTHING


def test_an_engine_without_experts_names_the_one_that_has_them(engine) -> None:
    if "experts" not in engine.has:
        with pytest.raises(ModelError, match="layers with experts .* beyond.experts"):
            engine.make(EXPERTS)


@pytest.mark.gpu
@pytest.mark.needs("pool", "one process", "exact")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_on_a_gpu_every_attention_backend_gives_stage_as_tokens(engine, backend: str) -> None:
    expected = one_by_one(NaiveLLM(WINDOWS, **GPU), LONGER)
    with engine.made(WINDOWS, **GPU, attention_backend=backend) as llm:
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


@pytest.mark.gpu
@pytest.mark.needs("experts", "pool", "one process", "exact")
@pytest.mark.parametrize("model", [EXPERTS, *OTHERS])
def test_on_a_gpu_every_engine_gives_stage_as_tokens(engine, model: str) -> None:
    expected = one_by_one(NaiveLLM(model, **GPU))
    with engine.made(model, **GPU) as llm:
        for _ in range(2):
            assert ask(llm, PROMPTS) == expected
        assert ask(llm, PROMPTS * 4, GREEDY) == expected * 4, "more tokens than few rows"
