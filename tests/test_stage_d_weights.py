"""Loading: whatever is wrong with a checkpoint is named before anything runs, and every tensor is used exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from stage_a_naive.checkpoints.loading import ModelError, ModelSource
from stage_a_naive.checkpoints.presets import preset_config
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.options import EngineOptions
from stage_d_paged.runtime import load_runtime

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TIED = Qwen2Config(**SHAPE, rope_parameters=ROPE, tie_word_embeddings=True)
UNTIED = LlamaConfig(**SHAPE, rope_parameters=ROPE, tie_word_embeddings=False)


def save(path: Path, config: PretrainedConfig = TIED, dtype: torch.dtype = torch.float32, **options) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path, **options)
    return path


def load(path: Path | None, config: PretrainedConfig = TIED, dtype: torch.dtype = torch.float32) -> DecoderModel:
    source = ModelSource(str(path), config, path, Path())
    return load_runtime(source, EngineOptions(max_model_len=64), torch.device("cpu"), dtype).model


def change(path: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a checkpoint."""
    stored = load_file(path / "model.safetensors") | tensors
    save_file({name: t for name, t in stored.items() if t is not None}, path / "model.safetensors")


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_loads_tied_or_untied(tmp_path: Path, config: PretrainedConfig, stored: torch.dtype):
    save(tmp_path, config, stored)
    tensors = load_file(tmp_path / "model.safetensors")
    model = load(tmp_path, config)
    assert model.embed_tokens.weight.dtype == torch.float32
    attention, mlp = model.layers[1].self_attn, model.layers[1].mlp
    key = tensors["model.layers.1.self_attn.k_proj.weight"].float()
    assert torch.equal(attention.qkv_proj.weight[32:48], key)
    assert torch.equal(mlp.gate_up_proj.weight[48:], tensors["model.layers.1.mlp.up_proj.weight"].float())
    assert (model.lm_head is model.embed_tokens) == config.tie_word_embeddings


def test_one_file_and_many_files_are_the_same_model(tmp_path: Path):
    one = load(save(tmp_path / "one"))
    many_path = save(tmp_path / "many", max_shard_size="20KB")
    assert len(list(many_path.glob("*.safetensors"))) > 1
    many = load(many_path)
    for (name, a), (_, b) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_missing_shard_is_named(tmp_path: Path):
    save(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, None, "holds no weights"),
        ("model.safetensors.index.json", lambda _: b'{"weights": {}}', "is not a safetensors index"),
        ("model.safetensors", lambda whole: whole[:-100], "model.safetensors.*truncated"),
    ],
    ids=["no file", "a broken index", "a truncated file"],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, file, content, message: str):
    if file:
        whole = (save(tmp_path) / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / file).write_bytes(content(whole))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "name", "tensor", "message"),
    [
        (TIED, "layers.1.mlp.up_proj.weight", None, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (
            TIED,
            "layers.2.input_layernorm.weight",
            torch.ones(32),
            r"not have: model\.layers\.2\.input_layernorm\.weight",
        ),
        (UNTIED, "layers.0.self_attn.q_proj.bias", torch.ones(32), "q_proj.bias"),  # a Llama has none
        (
            TIED,
            "layers.0.self_attn.k_proj.weight",
            torch.ones(32, 32),
            r"k_proj\.weight has shape \[32, 32\]; the config asks for \[16, 32\]",
        ),
        (TIED, "norm.weight", torch.ones(32, dtype=torch.int8), "stored as I8"),
    ],
    ids=["missing", "extra", "a bias too many", "shape", "integers"],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, config, name: str, tensor, message: str):
    change(save(tmp_path, config), {f"model.{name}": tensor})
    with pytest.raises(ModelError, match=message):
        load(tmp_path, config, torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32 and torch.empty(1).device.type == "cpu"  # after the error


def test_a_tied_model_may_store_its_head_twice_but_not_differently(tmp_path: Path):
    table = load_file(save(tmp_path) / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, {"lm_head.weight": table.clone()})
    load(tmp_path)
    change(tmp_path, {"lm_head.weight": table + 1})
    with pytest.raises(ModelError, match="lm_head.weight differs"):
        load(tmp_path)


def test_an_untied_model_needs_its_own_head(tmp_path: Path):
    change(save(tmp_path, UNTIED), {"lm_head.weight": None})
    with pytest.raises(ModelError, match="lm_head.weight is missing"):
        load(tmp_path, UNTIED)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path):
    change(save(tmp_path), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(tmp_path)


def test_random_weights_depend_on_the_seed_alone():
    config = preset_config("qwen3-tiny")
    source = ModelSource("random:qwen3-tiny", config, None, Path())
    options, cpu = EngineOptions(max_model_len=64), torch.device("cpu")
    one, same, other = (load_runtime(source, options, cpu, torch.float32, seed).model for seed in (1, 1, 2))
    assert torch.equal(one.layers[1].mlp.down_proj.weight, same.layers[1].mlp.down_proj.weight)
    assert not torch.equal(one.layers[1].mlp.down_proj.weight, other.layers[1].mlp.down_proj.weight)


def test_swish_is_another_name_of_silu():
    config = Qwen2Config(**SHAPE, rope_parameters=ROPE, tie_word_embeddings=True, hidden_act="swish")
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(TIED)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen2Config(**SHAPE, rope_parameters=ROPE, hidden_act="gelu"), "activation 'gelu'"),
        (LlamaConfig(**SHAPE, rope_parameters=ROPE, attention_bias=True), "attention_bias"),
        (LlamaConfig(**SHAPE, rope_parameters=ROPE, mlp_bias=True), "mlp_bias"),
        (LlamaConfig(**SHAPE, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (LlamaConfig(**SHAPE | {"num_key_value_heads": 3}, rope_parameters=ROPE), "not a multiple"),
    ],
)
def test_what_the_model_does_not_implement_is_refused(config: PretrainedConfig, message: str):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(config)
