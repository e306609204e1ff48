"""int8 checkpoints as the libraries write them are taken over as they are; other methods are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import beyond.quantization
from beyond.quantization import SamplingParams
from beyond.quantization.formats import quantize_matrix
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract.errors import ModelError

CHAT = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False}


def write(directory: Path, form: str, group: int | None = None, **changes: object) -> Path:
    """The tutor in the layout of compressed-tensors 0.20 or torchao 0.18, checked against what the libraries write."""
    for file in TUTOR_PATH.iterdir():
        if file.is_file() and file.suffix == ".json":
            (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((TUTOR_PATH / "config.json").read_text())
    config["quantization_config"] = (torchao_config(group) if form == "torchao" else compressed(form, group)) | changes
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(TUTOR_PATH / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = tensor
            continue
        values, scales = quantize_matrix(tensor * 1.004, torch.int8, group)  # not what we would do
        if form == "torchao":
            stem = name.removesuffix("weight") + "_weight"
            zeros = torch.zeros_like(scales, dtype=torch.int8)
            tensors |= {f"{stem}_qdata": values, f"{stem}_scale": scales, f"{stem}_zero_point": zeros}
            continue
        tensors[f"{name}_scale"] = scales
        if form == "int-quantized":
            tensors[name] = values
        else:
            tensors[f"{name}_packed"] = (values.short() + 128).to(torch.uint8).view(torch.int32)
            tensors[f"{name}_shape"] = torch.tensor(values.shape)
    save_file(tensors, directory / "model.safetensors")
    return directory


def compressed(form: str, group: int | None) -> dict:
    weights = WEIGHTS | ({"strategy": "group", "group_size": group} if group else {})
    scheme = {"format": form, "weights": weights, "input_activations": None, "targets": ["Linear"]}
    how = {"format": form, "config_groups": {"group_0": scheme}, "ignore": ["lm_head"], "transform_config": {}}
    return {"quant_method": "compressed-tensors"} | how


def torchao_config(group: int | None, kind: str = "Int8WeightOnlyConfig", version: int = 2) -> dict:
    per = {"_type": "PerGroup", "_data": {"group_size": group}} if group else {"_type": "PerRow", "_data": {"dim": -1}}
    how = {"_type": kind, "_version": version, "_data": {"granularity": per, "group_size": None}}
    whole = {"modules_to_not_convert": None, "include_input_output_embeddings": False}
    return {"quant_method": "torchao", "quant_type": {"default": how}} | whole


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("form", ["int-quantized", "pack-quantized", "torchao"])
def test_a_checkpoint_is_taken_over_value_by_value(tmp_path, form, group):
    path = write(tmp_path, form, group)
    llm = beyond.quantization.LLM(path, device="cpu", num_kvcache_blocks=32)
    assert (llm.options.quantization, llm.options.quantization_group_size) == ("int8", group)
    name = "model.layers.1.self_attn.k_proj.weight"
    original = load_file(TUTOR_PATH / "model.safetensors")[name]
    expected = quantize_matrix(original * 1.004, torch.int8, group)
    own = slice(original.shape[1], original.shape[1] + original.shape[0])  # K's rows lie behind Q's
    attention = llm.runtime.model.layers[1].self_attn.qkv_proj
    assert torch.equal(attention.weight.values[own], expected.values)
    assert torch.equal(attention.weight.scales[own], expected.scales)
    plain = beyond.quantization.LLM("tutor", device="cpu", num_kvcache_blocks=32)
    assert llm.chat(CHAT, GREEDY)[0]["token_ids"] == plain.chat(CHAT, GREEDY)[0]["token_ids"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, "is quantised with 'awq', which is not supported"),
        ({"quant_method": "gptq"}, "is quantised with 'gptq'"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "is quantised with 'bitsandbytes'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme={'num_bits': 8}; supported: None"),
        ({"transform_config": {"config_groups": {"R3": {}}}}, "has transform_config="),
        ({"ignore": ["model.layers.0.mlp.up_proj", "lm_head"]}, "has ignore="),
        ({"config_groups": {}}, "has 0 quantization groups"),
        (torchao_config(None, "Int4WeightOnlyConfig"), "has quant_type='Int4WeightOnlyConfig'; supported: 'Int8Weight"),
        (torchao_config(None) | {"quant_type": "int8_weight_only"}, "has quant_type='int8_weight_only'"),
        (torchao_config(None, version=1), "has quant_type version=1; supported: 2"),
        (torchao_config(64), "has group_size=64; supported: None, 128"),
        (torchao_config(None) | {"modules_to_not_convert": ["down_proj"]}, "modules_to_not_convert="),
        (torchao_config(None) | {"include_input_output_embeddings": True}, "include_input_output_embeddings=True"),
    ],
)
def test_another_method_is_refused_by_name(tmp_path, changes, message):
    path = write(tmp_path, "int-quantized", **changes)
    with pytest.raises(ModelError, match=message):
        beyond.quantization.LLM(path, device="cpu")


WEIGHT_FIELDS = [
    ("num_bits", 4),
    ("type", "float"),
    ("symmetric", False),
    ("strategy", "tensor"),
    ("actorder", "group"),
]
FIELDS = [("format", "float-quantized"), ("input_activations", "int8"), ("output_activations", "int8")]


@pytest.mark.parametrize(
    ("field", "value"),
    [*((f"weights.{field}", value) for field, value in WEIGHT_FIELDS), *FIELDS, ("targets", "Embedding")],
)
def test_another_scheme_is_refused_by_name(tmp_path, field, value):
    scheme = compressed("int-quantized", None)
    group = scheme["config_groups"]["group_0"]
    (group["weights"] if field.startswith("weights.") else group)[field.removeprefix("weights.")] = value
    path = write(tmp_path, "int-quantized", **scheme)
    with pytest.raises(ModelError, match=f"{field}={value!r}; supported"):
        beyond.quantization.LLM(path, device="cpu")


CONTRADICTION = "is int8 with quantization_group_size=None; leave them out"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, CONTRADICTION),
        ({"quantization": "int8", "quantization_group_size": 128}, CONTRADICTION),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size above 1 cannot be combined"),
    ],
)
def test_an_option_that_contradicts_the_checkpoint_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        beyond.quantization.LLM(write(tmp_path, "int-quantized"), device="cpu", **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scale"), "is stored as I8"),
        (lambda tensors, name: tensors.update({name: tensors[name].float()}), "is stored as F32; supported is int8"),
    ],
    ids=["int8 without a scale", "float with a scale"],
)
def test_a_matrix_is_int8_and_has_a_scale_or_is_refused(tmp_path, change, message):
    path = write(tmp_path, "int-quantized")
    tensors = load_file(path / "model.safetensors")
    change(tensors, "model.layers.0.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=f"up_proj.weight in .* {message}"):
        beyond.quantization.LLM(path, device="cpu")
