"""The megakernel's own source on a CPU, with its blocks and its memory in any order: right against float32."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from decode_steps import (
    SHAPES,
    TOLERANCE,
    assert_no_token_without_a_finite_maximum,
    assert_step_is_right,
    config,
    make_model,
    make_step,
    run,
)
from emulated_megakernel import Launch, build, emulate

pytestmark = pytest.mark.compiler

# Between them: biases and norms of heads, heads of both sizes, slices that do not come out even, a tied LM head.
CASES = {
    "uneven": (SHAPES["uneven"], torch.bfloat16),
    "wide": (config(128, 256, 4, 2, 128, vocab=300, bias=True, qk_norm=True), torch.float16),
    "one KV head": (config(64, 128, 3, 1, 64, vocab=300), torch.float16),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return cache(lambda name: build(*CASES[name], tmp_path_factory.mktemp(name)))


@pytest.fixture
def case(libraries, monkeypatch):
    def make(name: str):
        (shape, dtype), library = CASES[name], libraries(name)
        launch = Launch(library)
        kernel = emulate(make_model(shape, dtype, device="cpu"), library, launch, monkeypatch)
        kernel.timeout_ms = 10**9
        return shape, dtype, kernel, launch

    return make


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("contexts", [[300], [5, 1, 0, 33, 90, 16]], ids=str)
def test_steps_in_any_order_of_blocks_and_stores_match_float32(case, name, contexts):
    shape, dtype, kernel, _ = case(name)
    step = make_step(shape, dtype, contexts, 16, sum(contexts), device="cpu")
    step.temperatures[-1] = 0.7
    assert_step_is_right(kernel, step, TOLERANCE[dtype])
    first = run(kernel, step)
    assert torch.equal(run(kernel, step), first), "another order gave other bits"


@pytest.mark.parametrize("context", [1346, 1600])  # a new token of its own piece, or not
def test_a_long_context_that_is_cut_into_pieces_matches_float32(case, context):
    shape, dtype, kernel, _ = case("one KV head")
    step = make_step(shape, dtype, [context], 64, context, device="cpu")
    assert_step_is_right(kernel, step, TOLERANCE[dtype])
    first = run(kernel, step)
    assert torch.equal(run(kernel, step), first), "another order gave other bits"


def test_a_row_without_a_finite_maximum_has_no_token(case):
    shape, dtype, kernel, _ = case("uneven")
    step = make_step(shape, dtype, [5, 33, 90], 16, device="cpu")
    step.temperatures[1] = 0.7
    assert_no_token_without_a_finite_maximum(kernel, step)


def test_a_step_takes_no_value_of_the_step_before(case):
    shape, dtype, kernel, _ = case("uneven")
    for seed in (1, 2):
        assert_step_is_right(kernel, make_step(shape, dtype, [20], 16, seed, device="cpu"), TOLERANCE[dtype])


def test_a_step_that_misses_a_block_gives_up_and_keeps_no_token(case):
    shape, dtype, kernel, launch = case("uneven")
    step = make_step(shape, dtype, [40], 16, device="cpu")
    logits = run(kernel, step)
    launch.held, kernel.timeout_ms = 3, 1
    arguments, result = step.arguments(), kernel.make_result(1)
    kernel.step(*arguments, torch.empty_like(logits), result)
    assert torch.equal(arguments[0], step.last_tokens), "a token of the step that gave up was kept"
    with pytest.raises(RuntimeError, match="waited longer than 1 ms in layer"):
        kernel.check(result[-1])
    launch.held, kernel.timeout_ms = -1, 10**9
    assert torch.equal(run(kernel, step), logits)
