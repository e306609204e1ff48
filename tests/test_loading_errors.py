"""Errors of models that cannot be loaded: the same in stage A, which builds transformers' model, in stage D, which
builds its own, on several ranks and in 8 bits; and one line that names the file and the field."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_stage_a_loading import edit_json

from beyond.options import Options
from beyond.quantization.parts import load_quantized_runtime
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive.checkpoints import memory
from stage_a_naive.checkpoints.loading import load_hf_model, resolve
from stage_a_naive.contract.errors import ModelError
from stage_b_decode_step.attention import ATTENTION_NAME
from stage_d_paged import LLM as PagedLLM
from stage_d_paged.options import EngineOptions
from stage_d_paged.runtime import load_runtime
from stage_f_graph_tp.tensor_parallel.sharding import build_sharded_model

pytestmark = pytest.mark.fast
CPU, BF16 = torch.device("cpu"), torch.bfloat16  # not PyTorch's default, to which every load must come back
OF_TWO_RANKS = partial(build_sharded_model, group=SimpleNamespace(rank=0, size=2))
LOADERS = {  # from a source to a model
    "a": partial(load_hf_model, device=CPU, dtype=BF16),
    "b": partial(load_hf_model, device=CPU, dtype=BF16, attn_implementation=ATTENTION_NAME),
    "d": lambda source: load_runtime(source, EngineOptions(), CPU, BF16).model,
    "f": lambda source: load_runtime(source, EngineOptions(), CPU, BF16, build=OF_TWO_RANKS).model,
    "8 bits": lambda source: load_quantized_runtime(source, Options(quantization="int8"), CPU, BF16).model,
}
every_loader = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
GEMMA = {"model_type": "gemma3_text", "rope_parameters": None, "layer_types": None}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 64,
}
NORM = "model.layers.2.post_attention_layernorm.weight"
NOT_FINITE = [torch.ones(256).index_fill(0, torch.tensor([100]), float(x)) for x in ("nan", "inf", "-inf")]


def edit_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a checkpoint."""
    file = directory / "model.safetensors"
    weights = {**load_file(file), **changes}
    save_file({n: w for n, w in weights.items() if w is not None}, file, metadata={"format": "pt"})


def check_refused(directory: Path, load: object, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        load(resolve(directory))
    assert "\n" not in str(caught.value)
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == CPU


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be 1 or more, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be 1 or more, got 0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
        ({"vocab_size": -5}, "vocab_size must be 1 or more, got -5"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be 1 or more, got 0"),
        ({"hidden_size": "896"}, "'hidden_size'.*expected int, got str"),
        ({"hidden_size": 255}, r"hidden_size \(255\) is not a multiple of num_attention_heads \(4\)"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be above 0"),
        ({"pad_token_id": -2}, r"pad_token_id \(-2\) is outside the vocabulary of 4096"),
        ({"pad_token_id": 10**9}, "pad_token_id .* is outside the vocabulary of 4096"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta of rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "Missing required keys.*low_freq_factor"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
            "factor of rope_parameters must",
        ),
        ({"rope_parameters": LONGROPE | {"long_factor": [1.0] * 31}}, "long_factor .* must be a list of 32 numbers"),
        ({"rope_parameters": LONGROPE | {"short_factor": ["1"] * 32}}, "short_factor .* must be a list of 32 numbers"),
        ({"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"model_type": ["qwen2"]}, "is not supported; these are: llama, mistral, qwen2, qwen3, gemma3_text"),
        ({"layer_types": ["x"] * 4}, "layer_types"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported; these are: llama, mistral, qwen2, qwen3, gemma3_text"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}, "rope_parameters": None}, "'ntk' is not supported"),
        ({"model_type": "mistral", "sliding_window": 0, "layer_types": None}, "the window is 0; set sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types has 'sliding_attention'"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'; supported are full_attention and sliding_"),
        (
            {"model_type": "llama", "layer_types": ["sliding_attention"] * 4},
            "every layer of llama here has full_attenti",
        ),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0, got 0"),
        (
            {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False, "sliding_window": 128},
            "layer_types has 'sliding_attention', and the window is None; set sliding_window",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ],
)
def test_a_config_that_no_model_can_have_is_named_with_the_whole_reason(
    tutor_copy: Path, changes: dict, says: str
) -> None:
    edit_json(tutor_copy / "config.json", **changes)
    check_refused(tutor_copy, lambda source: pytest.fail("it was resolved"), rf"config\.json: .*{says}|{says}")


@every_loader
def test_a_config_that_nothing_can_be_built_from_is_an_error_of_the_model(tutor_copy: Path, load: object) -> None:
    edit_json(tutor_copy / "config.json", hidden_act="nope")
    check_refused(tutor_copy, load, "nope")


@pytest.mark.parametrize("content", ["[]", '"qwen2"', "3", "null", "{"])
def test_a_config_that_is_no_object_is_named(tutor_copy: Path, content: str) -> None:
    (tutor_copy / "config.json").write_text(content)
    check_refused(tutor_copy, None, r"config\.json (holds a JSON \w+; an object is expected|is not JSON)")


@every_loader
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", r"index\.json is not JSON"),
        ("[]", r"index\.json holds a JSON list"),
        ('{"weights": {}}', "is not a safetensors index"),
        ('{"weight_map": ["a"]}', "is not a safetensors index"),
        ('{"weight_map": {"x": 3}}', "is not a safetensors index"),
        ('{"weight_map": {"x": "nowhere.safetensors"}}', r"names files that are not there: nowhere\.safetensors"),
        (None, "holds no weights"),
    ],
)
def test_a_bad_index_of_shards_is_named(tutor_copy: Path, load: object, content: str | None, says: str) -> None:
    (tutor_copy / "model.safetensors").rename(tutor_copy / "part.safetensors")
    if content is not None:
        (tutor_copy / "model.safetensors.index.json").write_text(content)
    check_refused(tutor_copy, load, says)


@every_loader
def test_a_truncated_weights_file_is_an_error_and_not_a_crash(tutor_copy: Path, load: object) -> None:
    weights = tutor_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    check_refused(tutor_copy, load, r"cannot read .*model\.safetensors.*truncated")


@every_loader
def test_a_weight_that_is_in_two_files_is_named_with_both(tutor_copy: Path, load: object) -> None:
    (tutor_copy / "model.safetensors").rename(tutor_copy / "first.safetensors")
    save_file({NORM: torch.ones(256)}, tutor_copy / "second.safetensors", metadata={"format": "pt"})
    files = {NORM: "second.safetensors", "model.norm.weight": "first.safetensors"}
    (tutor_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    says = f"{NORM} is stored twice: in first.safetensors and in second.safetensors"
    check_refused(tutor_copy, load, says)


@every_loader
@pytest.mark.parametrize(
    ("name", "weight", "says"),
    [
        (NORM, None, f"the weight {NORM} is missing"),
        ("model.mystery.weight", torch.zeros(2, 2), "1 weights that the model does not have: model.mystery.weight"),
        (NORM, torch.ones(255), rf"the weight {NORM} has shape \[255\]; the config asks for \[256\]"),
        (NORM, torch.ones(256, dtype=torch.int8), rf"{NORM} in .*s is stored as I8; supported are F32, F16, BF16"),
        *((NORM, bad, f"the weight {NORM} holds NaN or infinite values") for bad in NOT_FINITE),
    ],
    ids=["missing", "extra", "of another shape", "quantised", "NaN", "infinite", "infinite below 0"],
)
def test_a_weight_that_does_not_fit_is_named(
    tutor_copy: Path, load: object, name: str, weight: torch.Tensor | None, says: str
) -> None:
    edit_weights(tutor_copy, **{name: weight})
    check_refused(tutor_copy, load, says)


@every_loader
def test_a_tied_head_may_be_stored_too_but_not_differently(tutor_copy: Path, load: object) -> None:
    table = load_file(tutor_copy / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(tutor_copy, **{"lm_head.weight": table.clone()})
    load(resolve(tutor_copy))
    edit_weights(tutor_copy, **{"lm_head.weight": table + 1})
    check_refused(tutor_copy, load, r"lm_head\.weight differs from the weight that the config ties it to")


@every_loader
def test_an_untied_model_needs_its_own_head(tutor_copy: Path, load: object) -> None:
    edit_json(tutor_copy / "config.json", tie_word_embeddings=False)
    check_refused(tutor_copy, load, r"the weight lm_head\.weight is missing")


@every_loader
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_weights_of_any_dtype_load_in_the_wanted_one_and_stored_frequencies_are_ignored(
    tutor_copy: Path, load: Callable, dtype: torch.dtype
) -> None:
    stored = {name: weight.to(dtype) for name, weight in load_file(tutor_copy / "model.safetensors").items()}
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # of some old checkpoints
    edit_weights(tutor_copy, **stored, **frequencies)
    found, expected = (load(resolve(model)).state_dict() for model in (tutor_copy, "tutor"))
    assert {name: weight.dtype for name, weight in found.items()} == {n: w.dtype for n, w in expected.items()}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", r"generation_config\.json is not JSON"),
        ("[]", r"generation_config\.json holds a JSON list"),
        ('{"eos_token_id": "</s>"}', r"generation_config\.json: eos_token_id must be a token id or a list of them"),
        ('{"eos_token_id": [1, 2.5]}', "eos_token_id must be a token id or a list of them"),
    ],
)
def test_a_generation_config_that_cannot_be_read_is_named(tutor_copy: Path, content: str, says: str) -> None:
    (tutor_copy / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=says):
        NaiveLLM(tutor_copy, device="cpu")


@pytest.mark.parametrize("options", [{"num_kvcache_blocks": 10**9}, {"kvcache_block_size": 10**15}])
def test_a_pool_larger_than_the_memory_is_refused_before_it_is_allocated(options: dict) -> None:
    with pytest.raises(MemoryError, match=r"a KV pool of .* GiB; cpu has .* GiB\. Lower num_kvcache_blocks") as caught:
        PagedLLM("random:qwen2-tiny", device="cpu", **options)
    assert "\n" not in str(caught.value)


# ---- models that do not fit into memory ------------------------------------------------------------------------------


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | str], object]:
    """Say how many bytes a container may have; `meminfo` beside it is what Linux says."""
    limit = tmp_path / "memory.max"
    for name, value in {"LIMITS": (limit, tmp_path / "nowhere"), "MEMINFO": tmp_path / "meminfo"}.items():
        monkeypatch.setattr(memory, name, value)
    return lambda count: limit.write_text(f"{count}\n")


@every_loader
@pytest.mark.parametrize("name", ["random:qwen2-tiny", "random:qwen3-tiny", "random:llama-tiny", "tutor"])
def test_a_model_is_loaded_where_its_weights_fit_exactly_and_refused_with_one_byte_less(
    name: str, load: Callable[..., torch.nn.Module], free: Callable
) -> None:
    source = resolve(name)
    model = load(source)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    free(needed)
    load(source)
    free(needed - 1)
    says = rf"the weights take {needed} bytes \(.* GiB, in .*\), and cpu has {needed - 1} bytes .* free; take a smaller"
    with pytest.raises(MemoryError, match=says):
        load(source)


def test_what_is_free_is_what_linux_says_within_the_limit_of_a_container(tmp_path: Path, free: Callable) -> None:
    assert memory.free_memory(CPU) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "meminfo").write_text("MemTotal:     9000 kB\nMemAvailable:     100 kB\n")
    assert memory.free_memory(CPU) == 102400
    for limit, expected in (("max", 102400), (4096, 4096)):
        free(limit)
        assert memory.free_memory(CPU) == expected
