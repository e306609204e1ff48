"""Loading: every kind of model name, and the errors of broken model directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
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


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


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
        (str(Path(__file__).with_name("contract")), r"config\.json"),
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


def test_no_padding_token_may_be_written_as_minus_one(tutor_copy: Path) -> None:
    edit_json(tutor_copy / "config.json", pad_token_id=-1)
    assert torch.equal(load(tutor_copy).get_input_embeddings().weight, load(TUTOR_PATH).get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json is not JSON"),
        ("tokenizer.json", "[]", r"tokenizer\.json holds a JSON list"),
        ("tokenizer.json", "{}", r"does not load \(KeyError: .*\); download it again"),
        ("tokenizer.json", None, r"has no tokenizer\.json"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json holds a JSON list"),
    ],
)
def test_a_tokenizers_file_that_cannot_be_read_is_named(
    tutor_copy: Path, file: str, content: str | None, says: str
) -> None:
    (tutor_copy / file).unlink()
    if content is not None:
        (tutor_copy / file).write_text(content)
    with pytest.raises(ModelError, match=says) as caught:
        load_tokenizer(resolve(tutor_copy))
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_asked_for_twice_is_an_error() -> None:
    loader, name = WeightLoader(SafetensorsDirectory(TUTOR_PATH)), "model.norm.weight"
    hidden = resolve("tutor").config.hidden_size
    assert loader.read(name, (hidden,)).shape == (hidden,)
    with pytest.raises(ModelError, match=f"{name} is used twice"):
        loader.read(name, (hidden,))


def test_a_random_preset_is_the_same_model_for_the_same_seed() -> None:
    source = resolve("random:qwen3-tiny")
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
    edit_json(tutor_copy / "config.json", eos_token_id=9)
    source = resolve(tutor_copy)
    tokenizer = load_tokenizer(source)
    file = tutor_copy / "generation_config.json"
    for content, ids in (('{"eos_token_id": [3, 4]}', {3, 4}), ("{}", {9})):
        file.write_text(content)
        assert ids | {tokenizer.eos_token_id} == eos_token_ids(source, tokenizer)
    file.unlink()
    assert {9, tokenizer.eos_token_id} == eos_token_ids(source, tokenizer)


def test_a_tokenizer_without_padding_gets_one(tutor_copy: Path) -> None:
    edit_json(tutor_copy / "tokenizer_config.json", pad_token=None)
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


def test_a_gpu_on_which_no_kernel_would_run_is_refused(pretended_gpus: list[tuple[int, int]]) -> None:
    pretended_gpus += [(9, 0), (9, 0)]
    for name in ("cuda", "cuda:0"):
        assert pick_device(name) == torch.device(name)
    with pytest.raises(ValueError, match="'cuda:1' .* let CUDA_VISIBLE_DEVICES name that GPU"):
        pick_device("cuda:1")
    with pytest.raises(ValueError, match="'cuda:2' .* only 2 GPUs"):
        pick_device("cuda:2")
