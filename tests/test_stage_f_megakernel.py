"""The persistent megakernel: right against float32 layer by layer, in a graph, and no slot but its own written."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_e_batching.sampler import SMALLEST
from stage_f_graph_tp.megakernel import Megakernel
from stage_f_graph_tp.megakernel.kernel import why_unsupported

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
DEVICE = torch.device("cuda")
PLAIN_LAUNCH = 4  # kPlainLaunch in csrc/stage_f/decode_step.h: blocks start one by one, as room is found for them


def config(hidden, inter, heads, kv_heads, head_dim, *, layers=2, vocab=1000, bias=False, qk_norm=False, tied=True):
    shape = (vocab, hidden, inter, layers, heads, kv_heads, head_dim)
    return ModelConfig(*shape, 1e-6, 8192, 10000.0, None, bias, qk_norm, tied)


SHAPES = {
    "tiny": config(256, 768, 4, 2, 64, vocab=4096, bias=True),
    "uneven": config(160, 352, 6, 3, 64, vocab=777, layers=3, tied=False),
    "qwen2": config(896, 4864, 14, 2, 64, vocab=5000, bias=True),
    "qwen3": config(1024, 3072, 16, 8, 128, vocab=5000, qk_norm=True),
    "llama": config(2048, 8192, 32, 8, 64, vocab=5000, tied=False),
}


def make_model(shape: ModelConfig, dtype: torch.dtype, seed: int = 0) -> DecoderModel:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    model = DecoderModel(shape, None, 5000, dtype, DEVICE)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, device=DEVICE)
        if "norm" in name:  # one weight for all heads of a kind
            noise = noise[:1].expand_as(noise) if weight.dim() == 2 else noise
            weight.copy_(1 + 0.2 * noise)
        elif name.endswith("bias"):
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(noise * (1.0 if "embed" in name else weight.shape[-1] ** -0.5))
    return model


@dataclass
class Step:
    """Device inputs of one decode step over a shuffled pool of random keys and values."""

    last_tokens: torch.Tensor
    batch_slots: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    temperatures: torch.Tensor
    noise_keys: torch.Tensor
    pool: torch.Tensor

    def arguments(self):
        """Of a step that can be repeated: it leaves its tokens in a copy."""
        first, *others = vars(self).values()
        return first.clone(), *others

    @property
    def token_ids(self):
        return self.last_tokens[self.batch_slots]


def make_step(shape: ModelConfig, dtype: torch.dtype, contexts: list[int], block_size: int, seed: int = 0) -> Step:
    """`contexts` holds each row's keys, the new one included; 0 is a padding row."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    pages = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(pages) + 1, generator=generator, device=DEVICE).int()
    tables = torch.full((len(contexts), max(pages) + 1), -1, dtype=torch.int32, device=DEVICE)
    for row, own in enumerate(order[: sum(pages)].split(pages)):
        tables[row, : pages[row]] = own
    last = [max(0, context - 1) for context in contexts]
    slots = [int(tables[row, p // block_size]) * block_size + p % block_size if c else -1
             for row, (c, p) in enumerate(zip(contexts, last, strict=True))]  # fmt: skip
    pool = torch.randn(2, shape.num_layers, sum(pages) + 1, block_size, shape.num_kv_heads, shape.head_dim,
                       generator=generator, device=DEVICE).to(dtype)  # fmt: skip
    for row, context in enumerate(contexts):  # what has not been written yet must not matter
        for p in range(max(0, context - 1), pages[row] * block_size):
            pool[:, :, int(tables[row, p // block_size]), p % block_size] = float("nan")
    rows = len(contexts)
    tokens = torch.randint(shape.vocab_size, (rows + 3,), generator=generator, device=DEVICE)
    batch_slots = torch.randperm(rows + 3, generator=generator, device=DEVICE)[:rows]
    return Step(tokens, batch_slots, torch.tensor(last, device=DEVICE), torch.tensor(slots, device=DEVICE), tables,
                torch.tensor(contexts, dtype=torch.int32, device=DEVICE), torch.zeros(rows, device=DEVICE),
                torch.zeros(rows, dtype=torch.int32, device=DEVICE), pool)  # fmt: skip


def reference(model: DecoderModel, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 logits of the rows, and the new keys and values [2, layers, rows, kv_heads, head_dim]."""
    shape, rows = model.config, len(step.token_ids)
    d, kv_heads, group = shape.head_dim, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads

    def norm(x, weight):
        return F.rms_norm(x, weight.shape[-1:], None, shape.rms_norm_eps) * weight.float()

    cos, sin = model.rotary.cos[step.positions].float(), model.rotary.sin[step.positions].float()  # [rows, 2, d / 2]
    x = model.embed_tokens.weight[step.token_ids].float()
    fresh = torch.empty(2, shape.num_layers, rows, kv_heads, d, device=DEVICE)
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        bias = None if attention.qkv_proj.bias is None else attention.qkv_proj.bias.float()
        qkv = F.linear(norm(x, layer.input_layernorm.weight), attention.qkv_proj.weight.float(), bias).view(rows, -1, d)
        qk, value = qkv.split((shape.num_heads + kv_heads, kv_heads), dim=1)
        if attention.qk_norm is not None:
            qk = norm(qk, attention.qk_norm.weight)
        low, high = qk.chunk(2, dim=-1)
        qk = torch.cat((low, high), -1) * cos.flatten(1)[:, None] + torch.cat((high, low), -1) * sin.flatten(1)[:, None]
        query, key = qk.split((shape.num_heads, kv_heads), dim=1)
        fresh[0, index], fresh[1, index] = key, value
        attended = torch.zeros(rows, shape.num_heads, d, device=DEVICE)
        for row, context in enumerate(step.context_lens.tolist()):
            if context == 0:
                continue
            pages = step.block_tables[row].clamp(min=0).long()
            cached = step.pool[:, index, pages].flatten(1, 2)[:, : context - 1].float()  # [2, context - 1, kv_heads, d]
            kv = torch.cat((cached, torch.stack((key, value))[:, row : row + 1]), 1)
            k, v = kv.repeat_interleave(group, dim=2).transpose(1, 2)  # [heads, context, d] each
            attended[row] = F.scaled_dot_product_attention(query[row, :, None], k, v)[:, 0]
        x = x + attended.flatten(1) @ attention.o_proj.weight.float().T
        gate, up = (norm(x, layer.post_attention_layernorm.weight) @ mlp.gate_up_proj.weight.float().T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ mlp.down_proj.weight.float().T
    return norm(x, model.norm.weight) @ model.lm_head.weight.float().T, fresh


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert out.isfinite().all()
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def run(kernel: Megakernel, step: Step) -> torch.Tensor:
    """The step's logits; its tokens must be those of stage E's sampler, on the device and on the host."""
    from stage_e_batching.sampler_kernels import sample_rows  # only GPUs need Triton

    rows = len(step.batch_slots)
    arguments, result = step.arguments(), kernel.make_result(rows)
    logits = kernel.make_logits(rows).fill_(float("nan"))
    kernel.step(*arguments, logits, result)
    kernel.check()
    expected = step.last_tokens.clone()
    expected[step.batch_slots] = sample_rows(logits, step.temperatures, step.noise_keys)
    assert torch.equal(arguments[0], expected)
    assert result.tolist() == [*expected[step.batch_slots].tolist(), 0]
    return logits


def assert_step_is_right(kernel: Megakernel, step: Step, tolerance: float) -> None:
    expected, fresh = reference(kernel.model, step)
    before = step.pool.clone()
    logits = run(kernel, step)
    real = step.slot_mapping >= 0
    assert relative_error(logits[real], expected[real]) < tolerance
    slots = step.slot_mapping[real]
    assert relative_error(step.pool.flatten(2, 3)[:, :, slots], fresh[:, :, real]) < tolerance
    before.flatten(2, 3)[:, :, slots] = step.pool.flatten(2, 3)[:, :, slots]
    assert torch.equal(before.view(torch.int16), step.pool.view(torch.int16)), "a slot of another token was written"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SHAPES)
def test_one_row_matches_float32_at_every_context_length(name, dtype):
    kernel = Megakernel(make_model(SHAPES[name], dtype))
    for seed, context in enumerate((1, 2, 15, 16, 17, 18, 33, 64, 65, 257, 640, 1025, 4096)):
        step = make_step(SHAPES[name], dtype, [context], (16, 64, 256)[seed % 3], seed)
        assert_step_is_right(kernel, step, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_of_a_batch_matches_float32_and_padding_rows_touch_nothing(name):
    kernel = Megakernel(make_model(SHAPES[name], torch.bfloat16))
    for rows in range(2, 9):
        contexts = [0 if row % 3 == 2 else (1 + 97 * row * rows) % 1500 + 1 for row in range(rows)]
        step = make_step(SHAPES[name], torch.bfloat16, contexts, 64, rows)
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
def test_the_same_step_gives_the_same_bits():
    kernel = Megakernel(make_model(SHAPES["qwen2"], torch.bfloat16))
    step = make_step(SHAPES["qwen2"], torch.bfloat16, [640], 64)
    first = run(kernel, step)
    assert all(torch.equal(run(kernel, step), first) for _ in range(50))


@pytest.mark.gpu
def test_a_step_after_reset_is_right():
    kernel = Megakernel(make_model(SHAPES["tiny"], torch.bfloat16))
    step = make_step(SHAPES["tiny"], torch.bfloat16, [100], 64)
    run(kernel, step)
    kernel.reset()
    assert_step_is_right(kernel, step, TOLERANCE[torch.bfloat16])


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


def test_what_the_kernel_does_not_have_is_named():
    def reason(shape, dtype=torch.bfloat16, block_size=64, rows=1, capability=(9, 0)):
        return why_unsupported(shape, dtype, block_size, rows, capability)

    assert all(reason(shape, rows=8) == "" for shape in SHAPES.values())
    assert "float32" in reason(SHAPES["tiny"], dtype=torch.float32)
    assert "head_dim is 32" in reason(config(128, 320, 4, 2, 32))
    assert "16 heads share 1" in reason(config(1024, 3072, 16, 1, 64))
    assert "multiples of 32" in reason(config(256, 700, 4, 2, 64))
    assert "power of two" in reason(SHAPES["tiny"], block_size=8)
    assert "power of two" in reason(SHAPES["tiny"], block_size=48)
    assert "9 requests" in reason(SHAPES["tiny"], rows=9)
    assert "hidden size 3584 and MLP size 18944; it is faster for up to 2048" in reason(config(3584, 18944, 28, 4, 128))
    assert "compute capability 9.0, and this GPU has 8.6" in reason(SHAPES["tiny"], capability=(8, 6))
    assert "227 KB of shared memory per block, and GPUs of compute capability 12.0 have 99" in reason(
        SHAPES["tiny"], capability=(12, 0)
    )
    assert reason(SHAPES["tiny"], capability=(10, 0)) == ""
