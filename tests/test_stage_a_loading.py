"""Loading: what every kind of name gives, and what a broken model directory says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from stage_a_naive.checkpoints.checkpoint import SafetensorsDirectory, WeightLoader
from stage_a_naive.checkpoints.loading import (
    TUTOR_PATH,
    ModelError,
    eos_token_ids,
    load_hf_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    random_tensor,
    resolve,
)
from stage_a_naive.checkpoints.presets import preset_config

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(directory: Path) -> torch.nn.Module:
    return load_hf_model(resolve(directory), CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/nowhere", "no such directory"),
        ("nowhere", "no such directory"),
        ("random:gpt-5", "there are: random:qwen2.5-0.5b"),
        (str(Path(__file__)), "is a file"),
        ("no-such-owner/no-such-model", "the hub does not give it"),
        ("", "a model is 'tutor', .* got ''"),
        (None, "a model is 'tutor', .* got None"),
        (b"tutor", "a model is 'tutor', .* got b'tutor'"),
    ],
)
def test_a_name_that_means_no_model_says_so_in_one_line(name: object, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


def test_a_directory_may_be_given_from_ones_home(tutor_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tutor_copy.parent))
    assert resolve("~/model").path == tutor_copy


def test_loading_leaves_what_transformers_says_as_it_was() -> None:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    try:
        load(TUTOR_PATH)
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
    finally:
        transformers_logging.set_verbosity(before)


def test_an_empty_directory_misses_its_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; these are: llama, qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}, "rope_parameters": None}, "'ntk' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types has 'sliding_attention'"),
        (
            {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False, "sliding_window": 128},
            "layer_types has 'sliding_attention': only full attention",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ],
)
def test_features_that_are_not_supported_are_refused(tutor_copy: Path, changes: dict, says: str) -> None:
    edit_config(tutor_copy, **changes)
    with pytest.raises(ModelError, match=says):
        resolve(tutor_copy)


def test_no_padding_token_may_be_written_as_minus_one(tutor_copy: Path) -> None:
    edit_config(tutor_copy, pad_token_id=-1)
    assert torch.equal(load(tutor_copy).get_input_embeddings().weight, load(TUTOR_PATH).get_input_embeddings().weight)


def test_a_directory_without_weights_or_tokenizer_says_which(tutor_copy: Path) -> None:
    (tutor_copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load(tutor_copy)
    (tutor_copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(resolve(tutor_copy))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(("content", "says"), [("{", "is not JSON"), ("[]", "holds a JSON list")])
def test_a_tokenizers_file_that_cannot_be_read_is_named(tutor_copy: Path, file: str, content: str, says: str) -> None:
    (tutor_copy / file).write_text(content)
    with pytest.raises(ModelError, match=rf"{re.escape(file)} {says}"):
        load_tokenizer(resolve(tutor_copy))


def test_a_tokenizer_without_its_parts_is_an_error_that_says_what_to_do(tutor_copy: Path) -> None:
    (tutor_copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"does not load \(KeyError: .*\); download it again") as caught:
        load_tokenizer(resolve(tutor_copy))
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_asked_for_twice_is_an_error() -> None:
    loader, name = WeightLoader(SafetensorsDirectory(TUTOR_PATH)), "model.norm.weight"
    hidden = resolve("tutor").config.hidden_size
    assert loader.read(name, (hidden,)).shape == (hidden,)
    with pytest.raises(ModelError, match=f"{name} is used twice"):
        loader.read(name, (hidden,))


def test_several_safetensors_files_load_and_a_missing_one_is_an_error(tutor_copy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tutor_copy)
    sharded = tutor_copy.with_name("sharded")
    model.save_pretrained(sharded, max_shard_size="3MB")
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 1
    shutil.copy(tutor_copy / "tokenizer.json", sharded)
    again = load(sharded)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    shards[0].unlink()
    with pytest.raises(ModelError):
        load(sharded)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_checkpoint_of_any_dtype_loads_in_the_wanted_one(tutor_copy: Path, dtype: str) -> None:
    path = tutor_copy / "model.safetensors"
    stored = {name: t.to(getattr(torch, dtype)) for name, t in load_file(path).items()}
    save_file(stored, path, metadata={"format": "pt"})
    model = load_hf_model(resolve(tutor_copy), CPU, torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
def test_a_random_preset_is_the_same_model_for_the_same_seed(preset: str) -> None:
    source = resolve(f"random:{preset}")
    first, again, other = (load_hf_model(source, CPU, torch.float32, seed) for seed in (1, 1, 2))
    for (name, a), (_, b), (_, c) in zip(*(m.named_parameters() for m in (first, again, other)), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
        assert torch.equal(a, random_tensor(name, a.shape, 1, CPU, torch.float32))


def test_the_real_presets_have_the_published_sizes() -> None:
    counts = {}
    for name in ("qwen2.5-0.5b", "qwen2.5-7b", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(preset_config(name))
        counts[name] = sum(p.numel() for p in model.parameters())
    assert counts == {
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-7b": 7_615_616_512,
        "qwen3-0.6b": 596_049_920,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
    }


def test_all_declared_end_of_sequence_ids_are_found(tutor_copy: Path) -> None:
    config = tutor_copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 9}))
    source = resolve(tutor_copy)
    tokenizer = load_tokenizer(source)
    (tutor_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert {3, 4, tokenizer.eos_token_id} == eos_token_ids(source, tokenizer)
    (tutor_copy / "generation_config.json").write_text("{}")
    assert {9, tokenizer.eos_token_id} == eos_token_ids(source, tokenizer)
    (tutor_copy / "generation_config.json").unlink()
    assert {9, tokenizer.eos_token_id} == eos_token_ids(source, tokenizer)


def test_a_tokenizer_without_padding_gets_one(tutor_copy: Path) -> None:
    path = tutor_copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("pad_token", None)
    path.write_text(json.dumps(settings))
    assert load_tokenizer(resolve(tutor_copy)).pad_token_id is not None


def test_a_device_or_dtype_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="'tpu'"):
        pick_device("tpu")
    with pytest.raises(ValueError, match="'int4'"):
        pick_dtype("int4", CPU)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            pick_device("cuda")
    assert pick_dtype("auto", CPU) == torch.float32


def test_a_gpu_on_which_no_kernel_would_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "device_count": 2, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("cuda", "cuda:0"):
        assert pick_device(name) == torch.device(name)
    with pytest.raises(ValueError, match="'cuda:1' .* let CUDA_VISIBLE_DEVICES name that GPU"):
        pick_device("cuda:1")
    with pytest.raises(ValueError, match="'cuda:2' .* only 2 GPUs"):
        pick_device("cuda:2")


@pytest.mark.parametrize("name", ["tutor", "random:qwen2-tiny"])
def test_without_the_tutors_files_a_clone_is_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage_a_naive.checkpoints.tutor.TUTOR_PATH", tmp_path / "models" / "tutor")
    with pytest.raises(ModelError, match="need a clone of the repository"):
        resolve(name)
