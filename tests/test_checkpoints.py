"""What `save_pretrained` writes, every stage loads and runs, wherever in the file the weights begin."""

from __future__ import annotations

import importlib
import shutil
import struct

import pytest
import torch
from contract.engines import PACKAGES
from transformers import AutoModelForCausalLM

from stage_a_naive.checkpoints.loading import TUTOR_PATH, load_hf_model, random_tensor, resolve
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.sampling import SamplingParams
from stage_c_fused_mlp.patch import replace_mlp_in_qwen

PROMPT = [5, 600, 7, 8, 1234, 9]
NEW_TOKENS = 12
NEEDS_COMPILER = {"stage_c_fused_mlp": [pytest.mark.compiler]}
STAGES = [pytest.param(name, marks=NEEDS_COMPILER.get(name, ())) for name in PACKAGES[:4]]  # later ones load as D does


def write_checkpoint(path, preset: str, *, tied: bool, shard_size: str, shift: int) -> list[int]:
    """Save a random model with `save_pretrained`, move its tensors by `shift` bytes, return what it should generate."""
    config = preset_config(preset)
    config.tie_word_embeddings = tied
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_tensor(name, parameter.shape, 0, parameter.device, parameter.dtype))
    model.save_pretrained(path, max_shard_size=shard_size)
    for file in path.glob("*.safetensors"):
        data = file.read_bytes()
        (size,) = struct.unpack_from("<Q", data)  # of the JSON header, which may end in blanks
        file.write_bytes(struct.pack("<Q", size + shift) + data[8 : 8 + size] + b" " * shift + data[8 + size :])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TUTOR_PATH / file, path)
    found = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW_TOKENS)
    return found[0, len(PROMPT) :].tolist()


# qwen2 has biases, qwen3 and llama have none; the shift is of the header's end, which is otherwise at a multiple of 8.
CHECKPOINTS = {
    "qwen2, tied, many files, odd": ("qwen2-tiny", dict(tied=True, shard_size="200KB", shift=1)),
    "qwen2, untied, one file, half a float": ("qwen2-tiny", dict(tied=False, shard_size="1GB", shift=2)),
    "qwen3, untied, many files, as written": ("qwen3-tiny", dict(tied=False, shard_size="200KB", shift=0)),
    "llama, tied, one file, half a vector": ("llama-tiny", dict(tied=True, shard_size="1GB", shift=8)),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    preset, layout = CHECKPOINTS[request.param]
    return path, write_checkpoint(path, preset, **layout)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_generates_what_transformers_does(checkpoint, stage):
    path, expected = checkpoint
    llm = importlib.import_module(stage).LLM(path, device="cpu", dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert llm.generate([PROMPT], params, use_tqdm=False)[0]["token_ids"] == expected
    assert len(set(expected)) > 2  # not one token again and again


@pytest.mark.compiler
def test_the_patch_copies_only_weights_that_the_kernel_cannot_read_where_they_are():
    model = load_hf_model(resolve("random:qwen2-tiny"), torch.device("cpu"), torch.float32)
    layers = model.model.layers
    aligned, moved = ((layer.mlp.down_proj.weight, layer.post_attention_layernorm.weight) for layer in layers)
    for weight in moved:
        storage = torch.empty(weight.numel() + 1)
        weight.data = storage[1:].view(weight.shape).copy_(weight)  # 4 bytes past a multiple of 16
    before = [weight.data_ptr() for weight in aligned]
    replace_mlp_in_qwen(model)
    assert [weight.data_ptr() for weight in aligned] == before
    assert [weight.data_ptr() % 16 for weight in moved] == [0, 0]
