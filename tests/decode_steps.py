"""Models and steps for the tests of the megakernel, and the right results in float32."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from kernel_cases import relative_error

from stage_a_naive.contract.noise import mix32
from stage_d_paged.attention import AttentionMetadata, pick_backend
from stage_d_paged.config import LayerKind, ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.sampler.reference import sample_reference
from stage_d_paged.sampler.rules import WORDS
from stage_e_batching.sampler import SamplerInput
from stage_f_graph_tp.megakernel import Megakernel

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def config(hidden, inter, heads, kv_heads, head_dim, *, layers=2, vocab=1000, bias=False, qk_norm=False, tied=True):
    shape = (vocab, hidden, inter, (LayerKind(),) * layers, heads, kv_heads, head_dim)
    return ModelConfig(*shape, 1e-6, 8192, bias, qk_norm, tied)


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
    sizes = 2, shape.num_layers, sum(pages) + 1, block_size, shape.num_kv_heads, shape.head_dim
    pool = torch.randn(sizes, generator=generator, device=device).to(dtype)
    for row, context in enumerate(contexts):  # unwritten slots must not matter
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
    exact, pool, device = deepcopy(model).float(), step.pool.float(), step.pool.device
    for layer in exact.layers:
        layer.self_attn.backend = pick_backend("reference", device, torch.float32, model.config.head_dim)
    starts = torch.arange(len(step.positions) + 1, dtype=torch.int32, device=device)
    longest = int(step.context_lens.max())
    metadata = AttentionMetadata(starts, step.context_lens, step.slot_mapping, step.block_tables, 1, longest)
    hidden = exact(step.token_ids, step.positions, SimpleNamespace(layers=list(zip(*pool, strict=True))), metadata)
    return exact.compute_logits(hidden), pool.flatten(2, 3)[:, :, step.slot_mapping]


def sample(logits: torch.Tensor, step: Step) -> torch.Tensor:
    """The tokens that stage E's sampler takes."""
    if logits.is_cuda:
        from stage_e_batching.sampler.kernels import RowChooser  # only GPUs need Triton

        nothing = torch.zeros(len(logits), WORDS, dtype=torch.int32, device=logits.device)
        chooser = RowChooser(*logits.shape, counts=torch.empty(0, logits.shape[1], device=logits.device))
        return chooser(logits, SamplerInput(step.temperatures, step.noise_keys, nothing, nothing[:, 0]))[0]
    return sample_reference(logits, step.temperatures, step.noise_keys, mix32(torch.arange(logits.shape[1])))


def run(kernel: Megakernel, step: Step) -> torch.Tensor:
    """Return the step's logits; its tokens must equal those of stage E's sampler, on device and host."""
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


def assert_no_token_without_a_finite_maximum(kernel: Megakernel, step: Step) -> None:
    rows, weight = len(step.batch_slots), kernel.model.lm_head.weight
    for value in (math.nan, math.inf):  # the second is NaN too, times states of both signs
        before, weight[7] = weight[7].clone(), value
        arguments, result = step.arguments(), kernel.make_result(rows)
        kernel.step(*arguments, kernel.make_logits(rows), result)
        kernel.check()
        assert result.tolist() == [-2] * rows + [0]
        assert arguments[0].min() >= 0 and arguments[0].max() < len(weight), "the next step can run on them"
        weight[7] = before
    run(kernel, step)


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
