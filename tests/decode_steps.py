"""Models and steps for the tests of the megakernel, and what is right for them, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stage_a_naive.contract.noise import mix32
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_e_batching.sampler import SamplerInput
from stage_e_batching.sampler.reference import sample_reference
from stage_e_batching.sampler.rules import WORDS
from stage_f_graph_tp.megakernel import Megakernel

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


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


def make_model(shape: ModelConfig, dtype: torch.dtype, seed: int = 0, device: str = "cuda") -> DecoderModel:
    generator = torch.Generator(device).manual_seed(seed)
    model = DecoderModel(shape, None, 5000, dtype, torch.device(device))
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, device=device)
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


def make_step(
    shape: ModelConfig, dtype: torch.dtype, contexts: list[int], block_size: int, seed: int = 0, device: str = "cuda"
) -> Step:
    """`contexts` holds each row's keys, the new one included; 0 is a padding row."""
    generator = torch.Generator(device).manual_seed(seed)
    pages = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(pages) + 1, generator=generator, device=device).int()
    tables = torch.full((len(contexts), max(pages) + 1), -1, dtype=torch.int32, device=device)
    for row, own in enumerate(order[: sum(pages)].split(pages)):
        tables[row, : pages[row]] = own
    last = [max(0, context - 1) for context in contexts]
    slots = [
        int(tables[row, p // block_size]) * block_size + p % block_size if c else -1
        for row, (c, p) in enumerate(zip(contexts, last, strict=True))
    ]
    pool = torch.randn(
        2,
        shape.num_layers,
        sum(pages) + 1,
        block_size,
        shape.num_kv_heads,
        shape.head_dim,
        generator=generator,
        device=device,
    ).to(dtype)
    for row, context in enumerate(contexts):  # what has not been written yet must not matter
        for p in range(max(0, context - 1), pages[row] * block_size):
            pool[:, :, int(tables[row, p // block_size]), p % block_size] = float("nan")
    rows = len(contexts)
    tokens = torch.randint(shape.vocab_size, (rows + 3,), generator=generator, device=device)
    batch_slots = torch.randperm(rows + 3, generator=generator, device=device)[:rows]
    return Step(
        tokens,
        batch_slots,
        torch.tensor(last, device=device),
        torch.tensor(slots, device=device),
        tables,
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.zeros(rows, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
        pool,
    )


def reference(model: DecoderModel, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 logits of the rows, and the new keys and values [2, layers, rows, kv_heads, head_dim]."""
    shape, rows = model.config, len(step.token_ids)
    d, kv_heads, group = shape.head_dim, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads

    def norm(x, weight):
        return F.rms_norm(x, weight.shape[-1:], None, shape.rms_norm_eps) * weight.float()

    cos, sin = model.rotary.cos[step.positions].float(), model.rotary.sin[step.positions].float()  # [rows, 2, d / 2]
    x = model.embed_tokens.weight[step.token_ids].float()
    fresh = torch.empty(2, shape.num_layers, rows, kv_heads, d, device=x.device)
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
        attended = torch.zeros(rows, shape.num_heads, d, device=x.device)
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


def sample(logits: torch.Tensor, step: Step) -> torch.Tensor:
    """The tokens that stage E's sampler takes."""
    if logits.is_cuda:
        from stage_e_batching.sampler.kernels import RowChooser  # only GPUs need Triton

        nothing = torch.zeros(len(logits), WORDS, dtype=torch.int32, device=logits.device)
        chooser = RowChooser(*logits.shape, counts=torch.empty(0, logits.shape[1], device=logits.device))
        return chooser(logits, SamplerInput(step.temperatures, step.noise_keys, nothing, nothing[:, 0]))
    return sample_reference(logits, step.temperatures, step.noise_keys, mix32(torch.arange(logits.shape[1])))


def run(kernel: Megakernel, step: Step) -> torch.Tensor:
    """The step's logits; its tokens must be those of stage E's sampler, on the device and on the host."""
    rows = len(step.batch_slots)
    arguments, result = step.arguments(), kernel.make_result(rows)
    logits = kernel.make_logits(rows).fill_(float("nan"))
    kernel.step(*arguments, logits, result)
    kernel.check()
    expected = step.last_tokens.clone()
    expected[step.batch_slots] = sample(logits, step)
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
