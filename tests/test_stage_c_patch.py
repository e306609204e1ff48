"""The patch of stage C: the same tokens, no second copy of the weights, and a way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_stage_a_loading import edit_json
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from stage_a_naive.checkpoints.loading import load_hf_model, resolve
from stage_b_decode_step import LLM as StageB
from stage_c_fused_mlp import LLM, SamplingParams, replace_mlp_in_qwen, restore_mlp
from stage_c_fused_mlp.patch import PatchError, parameter_bytes

pytestmark = pytest.mark.compiler

TINY = ["random:qwen2-tiny", "random:qwen3-tiny", "random:llama-tiny"]
CPU = torch.device("cpu")
PROMPT = torch.arange(7)[None]


def tiny(name, dtype=torch.float32):
    return load_hf_model(resolve(name), CPU, dtype, 0).eval()


@pytest.mark.parametrize("name", TINY)
def test_a_patched_model_gives_the_same_logits_and_a_restored_one_its_own_bits(name):
    model = tiny(name)
    for layer in model.model.layers:
        layer.post_attention_layernorm.variance_epsilon = 0.1
    with torch.no_grad():
        before = model(PROMPT).logits
        report = replace_mlp_in_qwen(model, "fused")
        patched = model(PROMPT).logits
        restore_mlp(model)
        after = model(PROMPT).logits
    assert report.layers == model.config.num_hidden_layers
    torch.testing.assert_close(patched, before, rtol=1e-4, atol=1e-4)
    assert not torch.equal(patched, before)  # else nothing was replaced
    assert torch.equal(after, before)
    weights = [layer.mlp.gate_proj.weight for layer in model.model.layers]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights), "separate memory again"


def test_a_patched_model_compiles_as_one_graph():
    model = tiny(TINY[0])
    with torch.no_grad():
        before = model(PROMPT, use_cache=False).logits
        replace_mlp_in_qwen(model, "fused")
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(PROMPT, use_cache=False).logits
    torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel, most", [("fused", 16), ("auto", 2)])  # on a CPU `auto` leaves more than two rows
def test_more_rows_than_the_kernel_takes_go_through_the_layer_as_before(kernel, most):
    model = tiny(TINY[0])
    prompt = torch.arange(40)[None]
    with torch.no_grad():
        before = model(prompt).logits
        replace_mlp_in_qwen(model, kernel)
        assert torch.equal(model(prompt).logits, before)
        rows = []
        model.model.layers[0].mlp.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[:-1].numel()))
        for shape in ((1, most), (1, most + 1), (3, most // 2)):
            model(torch.ones(shape, dtype=torch.int64))
    assert rows == [most + 1, 3 * (most // 2)], "few rows do not reach the layer's own MLP"


@pytest.mark.parametrize("name", TINY)
def test_the_weights_are_not_copied_twice_and_the_state_dict_stays(name):
    model = tiny(name)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    size = parameter_bytes(model)
    report = replace_mlp_in_qwen(model)
    assert report.bytes_before == report.bytes_after == size == parameter_bytes(model)
    assert f"{size / 1e6:.1f} MB before" in str(report)
    for _ in range(2):
        assert model.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
        if hasattr(model.model.layers[0].mlp, "gate_up_proj"):
            restore_mlp(model)
    assert parameter_bytes(model) == size


def test_the_bytes_of_a_model_are_those_of_its_buffers_too_and_what_is_shared_counts_once():
    model = torch.nn.Linear(8, 4, bias=False)
    model.register_buffer("packed", model.weight.data[:2])
    model.register_buffer("other", torch.zeros(5))
    assert parameter_bytes(model) == 4 * (8 * 4 + 5)


def test_patching_twice_and_restoring_what_is_not_patched_are_refused():
    model = tiny(TINY[0])
    with pytest.raises(PatchError, match="layer 0 is not patched"):
        restore_mlp(model)
    replace_mlp_in_qwen(model)
    with pytest.raises(PatchError, match="patched already; call restore_mlp first"):
        replace_mlp_in_qwen(model)


def llama(**changes):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=40)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(sizes | changes)))


def without_gate(layer):
    layer.mlp.gate_proj = None


def with_biased_norm(layer):
    layer.post_attention_layernorm.bias = torch.nn.Parameter(torch.zeros(32))


@pytest.mark.parametrize(
    "model, change, message",
    [
        (llama(hidden_act="gelu"), id, "its activation is GELU.*expected SiLU"),
        (llama(mlp_bias=True), id, "gate_proj, up_proj, down_proj has a bias"),
        (llama(intermediate_size=44), id, "sizes 32 and 44, expected multiples of 8"),
        (llama(), without_gate, "layer 1 .* has no linear layer gate_proj, so it is not the gated kind"),
        (llama(), with_biased_norm, "layer 1 .* is LlamaRMSNorm, expected an RMSNorm without a bias"),
    ],
)
def test_a_block_of_another_kind_is_refused_and_nothing_is_changed(model, change, message):
    change(model.model.layers[1])
    with pytest.raises(PatchError, match=message):
        replace_mlp_in_qwen(model)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_a_model_without_decoder_layers_of_this_family_is_refused():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20))
    with pytest.raises(PatchError, match="GPT2LMHeadModel has no list of decoder layers"):
        replace_mlp_in_qwen(model)


@pytest.mark.gpu
def test_a_compiled_step_with_graphs_gives_the_same_tokens():
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options = {"device": "cuda", "dtype": "float32", "matmul_precision": "highest"}
    expected = StageB(TINY[0], **options).generate([[5, 6, 7]], params, use_tqdm=False)
    found = LLM(TINY[0], compile=True, **options).generate([[5, 6, 7]], params, use_tqdm=False)
    assert found[0]["token_ids"] == expected[0]["token_ids"]


def test_every_layer_has_the_kernel_that_was_asked_for():
    llm = LLM(TINY[0], mlp_kernel="library", device="cpu")
    assert {layer.mlp.kernel for layer in llm.model.model.layers} == {"library"}


def test_kernels_that_cannot_run_are_refused_before_anything_is_loaded(tutor_copy: Path):
    with pytest.raises(ValueError, match="mlp_kernel must be one of auto, naive, .* got 'quick'"):
        LLM("no such model", mlp_kernel="quick")
    (tutor_copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="mlp_kernel='warp' cannot run here: it is a CUDA kernel; on the CPU use"):
        LLM(tutor_copy, mlp_kernel="warp", device="cpu")
    edit_json(tutor_copy / "config.json", intermediate_size=44)
    with pytest.raises(ValueError, match="sizes are 256 and 44, and it takes multiples of 8; stage B takes any size"):
        LLM(tutor_copy, device="cpu")
