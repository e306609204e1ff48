"""The decoder from scratch computes what transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_model import completion_of
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from stage_a_naive.checkpoints.loading import ModelSource, load_hf_model, resolve
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.contract.errors import ModelError
from stage_d_paged.batch import Chunk, flat_batch, upload
from stage_d_paged.block_manager import BlockManager
from stage_d_paged.config import ModelConfig
from stage_d_paged.layers import RMSNorm, RotaryEmbedding
from stage_d_paged.options import EngineOptions
from stage_d_paged.runtime import load_runtime
from stage_d_paged.sequence import Sequence

CPU = torch.device("cpu")
FAMILIES = ["qwen2-tiny", "qwen3-tiny", "llama-tiny", "gemma3-tiny"]
REAL = ["qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b", "gemma-3-270m"]


def load_both(path: Path, model: str, dtype: torch.dtype = torch.float32, **options: object):
    """A model as transformers has it and as stage D does: the tutor, or random weights as transformers saves them."""
    source = resolve("tutor")
    if model != "tutor":
        config = preset_config(model)
        if model in REAL:  # one layer of it, and few tokens
            config.num_hidden_layers, config.vocab_size, config.layer_types = 1, 128, ["full_attention"]
        load_hf_model(ModelSource(model, config, None, path), CPU, torch.float32, 3).save_pretrained(path)
        source = ModelSource(model, config, path, path)
    runtime = load_runtime(source, EngineOptions(max_model_len=256, **options), CPU, dtype)
    return load_hf_model(source, CPU, dtype), runtime


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_travel_to_the_device_in_one_copy_each_at_a_multiple_of_16_bytes(device: str):
    matrix = np.arange(12, dtype=np.int32).reshape(4, 3)
    arrays = [np.arange(3), np.arange(5, dtype=np.int32), np.empty(0, np.int64), np.array([0.5], np.float32)]
    arrays += [matrix, matrix[:, ::2]]
    tensors = upload(arrays, torch.device(device))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.data_ptr() % 16 == 0
        found = tensor.cpu().numpy()
        assert np.array_equal(found, array) and found.dtype == array.dtype
        assert tensor.is_contiguous()


@torch.inference_mode()
@pytest.mark.parametrize("model", ["tutor", *FAMILIES, *REAL])
def test_logits_of_a_batch_equal_transformers(tmp_path: Path, model: str):
    reference, runtime = load_both(tmp_path, model)
    assert (runtime.model.lm_head is runtime.model.embed_tokens) == runtime.config.tie_word_embeddings
    manager, generator = BlockManager(64, runtime.block_size), torch.Generator().manual_seed(0)
    prompts = [torch.randint(runtime.config.vocab_size, (n,), generator=generator) for n in (37, 5, 50)]
    sequences = [Sequence(completion_of(ids.tolist())) for ids in prompts]
    assert all(manager.allocate(sequence, len(sequence)) for sequence in sequences)
    batch = flat_batch([Chunk(sequence, 0, len(sequence)) for sequence in sequences], runtime.block_size, CPU)
    hidden = runtime.model(batch.input_ids, batch.positions, runtime.make_pool(64), batch.metadata)
    for ids, found in zip(prompts, runtime.model.compute_logits(hidden).split([37, 5, 50]), strict=True):
        assert (found - reference(ids[None]).logits[0]).abs().max() < 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("model", FAMILIES)
def test_bfloat16_is_rounded_about_as_often_as_in_transformers(tmp_path: Path, model: str):
    ids = torch.randint(4096, (40,), generator=torch.Generator().manual_seed(0))
    exact, _ = load_both(tmp_path, model)
    reference, runtime = load_both(tmp_path, model, torch.bfloat16)
    manager, sequence = BlockManager(64, runtime.block_size), Sequence(completion_of(ids.tolist()))
    assert manager.allocate(sequence, len(sequence))
    batch = flat_batch([Chunk(sequence, 0, len(sequence))], runtime.block_size, CPU)
    hidden = runtime.model(batch.input_ids, batch.positions, runtime.make_pool(64), batch.metadata)
    right = exact(ids[None]).logits[0]
    found, theirs = runtime.model.compute_logits(hidden).float(), reference(ids[None]).logits[0].float()
    assert (found - right).norm() < 1.2 * (theirs - right).norm()


def test_gemmas_embeddings_are_scaled_as_transformers_rounds_the_scale(tmp_path: Path):
    reference, runtime = load_both(tmp_path, "gemma3-tiny", torch.bfloat16)
    assert runtime.model.embedding_scale == reference.model.embed_tokens.embed_scale.bfloat16().item() == 11.3125


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def test_swish_is_another_name_of_silu():
    swish, silu = (Qwen2Config(rope_parameters=ROPE, hidden_act=name) for name in ("swish", "silu"))
    assert ModelConfig.from_hf(swish) == ModelConfig.from_hf(silu)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen2Config(rope_parameters=ROPE, hidden_act="mish"), "activation 'mish' is not supported; these are: silu, "),
        (LlamaConfig(rope_parameters=ROPE | {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    ],
)
def test_what_the_model_does_not_implement_is_refused(config: PretrainedConfig, message: str):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(config)


def test_far_positions_keep_their_angle():
    config = preset_config("qwen3-0.6b")
    rope = ModelConfig.from_hf(config).layers[0].rope
    rotary = RotaryEmbedding(rope, 128, 40000, torch.float32, CPU)
    cos, sin = rotary(torch.tensor([39999]))
    angle = 39999 * rope.frequencies(128).double()
    assert (cos[0, 0, 0] - angle.cos()).abs().max() < 5e-3  # float32 holds an angle of 40000 to about 2e-3
    assert (sin[0, 0, 0] + angle.sin()).abs().max() < 5e-3


def test_the_norm_does_not_lose_small_or_large_rows_in_bfloat16():
    norm = RMSNorm(8, 1e-6, torch.bfloat16, CPU)
    norm.weight.fill_(1)
    x = torch.tensor([[1e-2] * 8, [1e4] * 8], dtype=torch.bfloat16)
    assert (norm(x) - 1).abs().max() < 0.02


def test_a_pool_takes_the_bytes_of_its_tokens(tmp_path: Path):
    _, runtime = load_both(tmp_path, "qwen2-tiny")
    pool = runtime.make_pool(3)
    assert pool.num_bytes == pool.tensor.nbytes == 3 * runtime.block_size * runtime.bytes_per_token
