"""The persistent megakernel: right against float32 layer by layer, in a graph, and no slot but its own written."""

from __future__ import annotations

import math
import time
from functools import partial

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
    reference,
    relative_error,
    run,
)

from stage_a_naive.contract.filters import SMALLEST
from stage_f_graph_tp.megakernel import Megakernel

DEVICE = torch.device("cuda")
PLAIN_LAUNCH = 4  # kPlainLaunch in csrc/stage_f/decode_step.h: blocks start one by one, as room is found for them


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SHAPES)
def test_one_row_matches_float32_at_every_context_length(name, dtype):
    kernel = Megakernel(make_model(SHAPES[name], dtype))
    for seed, context in enumerate((1, 2, 15, 16, 17, 18, 33, 64, 65, 257, 640, 1025, 1345, 2050, 4096)):
        step = make_step(SHAPES[name], dtype, [context], (16, 64, 256)[seed % 3], seed)
        assert_step_is_right(kernel, step, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_of_a_batch_matches_float32_and_padding_rows_touch_nothing(name):
    kernel = Megakernel(make_model(SHAPES[name], torch.bfloat16))
    for rows in range(2, 9):
        contexts = [0 if row % 3 == 2 else (1 + 97 * row * rows) % 1500 + 1 for row in range(rows)]
        for lengths in (contexts, [4096 // (1 + row) for row in range(rows)]):  # short ones, and some cut into pieces
            step = make_step(SHAPES[name], torch.bfloat16, lengths, 64, rows)
            assert_step_is_right(kernel, step, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_a_kernel_with_a_trace_computes_the_same():
    shape = SHAPES["tiny"]
    model, step = make_model(shape, torch.bfloat16), make_step(shape, torch.bfloat16, [100], 64)
    kernel, plain = Megakernel(model, trace=True), Megakernel(model)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    trace = torch.zeros(multiprocessors, 17 * shape.num_layers + 7, dtype=torch.int64, device=DEVICE)
    logits = kernel.make_logits(1)
    kernel.step(*step.arguments(), logits, kernel.make_result(1), trace)
    kernel.check()
    assert relative_error(logits, run(plain, step)) < 1e-3
    assert (trace[:, 1:-1].diff(dim=1) > 0).all() and (trace[:, -1] > trace[:, 0]).all()
    with pytest.raises(ValueError, match="compiled without a trace"):
        plain.step(*step.arguments(), logits, plain.make_result(1), trace)


@pytest.mark.gpu
def test_one_captured_graph_serves_steps_of_any_length():
    shape = SHAPES["tiny"]
    kernel = Megakernel(make_model(shape, torch.bfloat16))
    static = make_step(shape, torch.bfloat16, [4096], 64)
    logits, result = kernel.make_logits(1), kernel.make_result(1)
    launch = partial(kernel.step, *vars(static).values(), logits, result)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for seed, context in enumerate((1, 700, 64, 4000, 65)):
        step = make_step(shape, torch.bfloat16, [context], 64, seed)
        expected, _ = reference(kernel.model, step)
        static.block_tables.fill_(-1)
        static.block_tables[:, : step.block_tables.shape[1]] = step.block_tables
        static.pool[:, :, : step.pool.shape[2]] = step.pool
        for name in ("last_tokens", "batch_slots", "positions", "slot_mapping", "context_lens"):
            getattr(static, name).copy_(getattr(step, name))
        graph.replay()
        kernel.check()
        assert relative_error(logits, expected) < TOLERANCE[torch.bfloat16]
        assert result.tolist() == [static.token_ids.item(), 0] == [logits.argmax().item(), 0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "uneven", "qwen3"])
def test_tokens_at_any_temperature_are_the_samplers(name):
    kernel = Megakernel(make_model(SHAPES[name], torch.bfloat16))
    step = make_step(SHAPES[name], torch.bfloat16, [100, 7, 33, 250, 1, 64, 2, 90], 64)
    generator = torch.Generator(DEVICE).manual_seed(1)
    step.temperatures = torch.tensor([0.7, 1.0, 0.0, 0.1, 3.0, SMALLEST, 1e30, math.inf], device=DEVICE)
    for _ in range(50):
        step.noise_keys = torch.randint(-(2**31), 2**31, (8,), generator=generator, device=DEVICE).int()
        run(kernel, step)


@pytest.mark.gpu
def test_of_equal_logits_the_smallest_id_is_the_token():
    kernel = Megakernel(make_model(SHAPES["llama"], torch.bfloat16))
    step = make_step(SHAPES["llama"], torch.bfloat16, [100, 7, 33], 64)
    weight = kernel.model.lm_head.weight
    weight[2500:] = weight[:2500]
    logits = run(kernel, step)
    assert torch.equal(logits[:, :2500], logits[:, 2500:])
    weight.zero_()
    assert not run(kernel, step).any()


@pytest.mark.gpu
def test_a_row_without_a_finite_maximum_has_no_token():
    step = make_step(SHAPES["tiny"], torch.bfloat16, [5, 33, 90], 64)
    step.temperatures[1] = 0.7
    assert_no_token_without_a_finite_maximum(Megakernel(make_model(SHAPES["tiny"], torch.bfloat16)), step)


@pytest.mark.gpu
def test_the_same_step_gives_the_same_bits():
    kernel = Megakernel(make_model(SHAPES["qwen2"], torch.bfloat16))
    step = make_step(SHAPES["qwen2"], torch.bfloat16, [640], 64)
    first = run(kernel, step)
    assert all(torch.equal(run(kernel, step), first) for _ in range(50))


@pytest.mark.gpu
@pytest.mark.parametrize("behind", [0, 1, 5])
def test_a_step_after_one_that_gave_up_is_right(behind):
    """A kernel that sleeps keeps one multiprocessor from a step whose blocks are not launched together."""
    kernel = Megakernel(make_model(config(256, 768, 4, 2, 128, vocab=4096), torch.bfloat16))  # takes all registers
    step = make_step(kernel.config, torch.bfloat16, [100], 64)
    logits = run(kernel, step)
    kernel.flags, kernel.timeout_ms = PLAIN_LAUNCH, 20
    sleeping = torch.cuda.Stream()
    with torch.cuda.stream(sleeping):
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second
    time.sleep(0.1)  # until it sleeps: a step that came first would have all multiprocessors
    results = [kernel.make_result(1) for _ in range(1 + behind)]
    arguments = step.arguments()
    kernel.step(*arguments, torch.empty_like(logits), results[0])
    kernel.flags, kernel.timeout_ms = Megakernel.flags, Megakernel.timeout_ms
    for result in results[1:]:  # launched before the host knows
        kernel.step(*arguments, torch.empty_like(logits), result)
    ended = torch.cuda.Event()
    ended.record()
    ended.synchronize()
    assert behind or torch.equal(arguments[0], step.last_tokens), "a token of the step that gave up was kept"
    assert all(result[-1] == results[0][-1] for result in results)
    with pytest.raises(RuntimeError, match="waited longer than .* ms in layer"):
        kernel.check(results[0][-1])
    assert sleeping.query(), "the device was not waited for"
    assert all(torch.equal(run(kernel, step), logits) for _ in range(20))
    assert_step_is_right(kernel, step, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_a_wrong_shape_is_refused_before_the_launch():
    kernel = Megakernel(make_model(SHAPES["tiny"], torch.bfloat16))
    step = make_step(SHAPES["tiny"], torch.bfloat16, [5], 64)
    step.context_lens = step.context_lens.long()
    with pytest.raises(TypeError, match="context_lens is Long, expected Int"):
        run(kernel, step)
