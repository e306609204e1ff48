"""Our weights against torchao's, and a checkpoint that transformers writes with it: `pip install -e .[compare]`."""

from __future__ import annotations

import pytest
import torch

import beyond.quantization
from beyond.quantization import SamplingParams
from beyond.quantization.formats import FORMATS, quantize_matrix
from stage_a_naive.checkpoints.tutor import TUTOR_PATH

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install -e .[compare]")

WEIGHT = torch.randn(64, 384, generator=torch.Generator().manual_seed(0))
INT8 = {None: torchao.PerRow(), 128: torchao.PerGroup(128)}


def quantized_by_torchao(config: object) -> torch.Tensor:
    linear = torch.nn.Linear(WEIGHT.shape[1], WEIGHT.shape[0], bias=False)
    linear.weight.data.copy_(WEIGHT)
    torchao.quantize_(linear, config)
    return linear.weight


def test_e4m3_weights_are_torchaos_value_by_value():
    theirs = quantized_by_torchao(torchao.Float8WeightOnlyConfig())
    ours = quantize_matrix(WEIGHT, FORMATS["fp8"])
    assert torch.equal(ours.values.float(), theirs.qdata.float()) and torch.equal(ours.scales, theirs.scale)


@pytest.mark.parametrize("group", INT8)
def test_int8_weights_differ_from_torchaos_by_its_scale_and_at_most_one(group):
    theirs = quantized_by_torchao(torchao.Int8WeightOnlyConfig(granularity=INT8[group]))
    ours = quantize_matrix(WEIGHT, torch.int8, group)
    torch.testing.assert_close(theirs.scale, ours.scales * (127 / 127.5))
    assert (ours.values.int() - theirs.qdata.int()).abs().max() == 1
    scaled = WEIGHT / theirs.scale.repeat_interleave(group or WEIGHT.shape[1], 1)
    off = scaled.round().clamp(-128, 127) != theirs.qdata
    assert ((scaled - scaled.floor() - 0.5)[off].abs() < 1e-4).all(), "other than numbers halfway between two"


@pytest.mark.parametrize("group", INT8)
def test_a_checkpoint_that_transformers_writes_with_torchao_is_taken_over(tmp_path, group):
    from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

    scheme = TorchAoConfig(torchao.Int8WeightOnlyConfig(granularity=INT8[group]))
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, quantization_config=scheme, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TUTOR_PATH).save_pretrained(tmp_path)
    llm = beyond.quantization.LLM(tmp_path, device="cpu", dtype="float32", num_kvcache_blocks=32)
    [output] = llm.chat([{"role": "user", "content": "What is a KV cache?"}], SamplingParams(temperature=0.0))
    theirs, down = model.model.layers[2].mlp.down_proj.weight, llm.runtime.model.layers[2].mlp.down_proj.weight
    assert llm.options.quantization_group_size == group
    assert torch.equal(down.values, theirs.qdata) and torch.equal(down.scales, theirs.scale)
    prompt = torch.tensor([output["prompt_token_ids"]])
    generated = model.generate(prompt, do_sample=False, max_new_tokens=64)[0, prompt.shape[1] :].tolist()
    assert generated == output["token_ids"]
