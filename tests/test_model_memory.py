"""A model that does not fit into memory is refused before it is made, with the bytes needed and the bytes there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from beyond.options import Options
from beyond.quantization.parts import load_quantized_runtime
from stage_a_naive.checkpoints import memory
from stage_a_naive.checkpoints.loading import load_hf_model, resolve
from stage_d_paged.options import EngineOptions
from stage_d_paged.runtime import load_runtime
from stage_f_graph_tp.tensor_parallel.sharding import build_sharded_model

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
MODELS = ["random:qwen2-tiny", "random:qwen3-tiny", "random:llama-tiny", "tutor"]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how many bytes are free."""
    return lambda count: monkeypatch.setattr(memory, "free_memory", lambda device: count)


def num_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


def of_transformers(name: str, dtype: torch.dtype) -> torch.nn.Module:
    return load_hf_model(resolve(name), CPU, dtype)


def of_stage_d(name: str, dtype: torch.dtype) -> torch.nn.Module:
    return load_runtime(resolve(name), EngineOptions(), CPU, dtype).model


def first_of_two_ranks(name: str, dtype: torch.dtype) -> torch.nn.Module:
    group = SimpleNamespace(rank=0, size=2)
    build = partial(build_sharded_model, group=group)
    return load_runtime(resolve(name), EngineOptions(), CPU, dtype, build=build).model


def in_8_bits(name: str, dtype: torch.dtype) -> torch.nn.Module:
    return load_quantized_runtime(resolve(name), Options(quantization="int8"), CPU, dtype).model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("load", [of_transformers, of_stage_d, first_of_two_ranks, in_8_bits])
def test_a_model_is_loaded_where_its_weights_fit_exactly_and_refused_with_one_byte_less(
    name: str, load: Callable[..., torch.nn.Module], free: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = num_bytes(load(name, torch.bfloat16))
    free(needed)
    assert num_bytes(load(name, torch.bfloat16)) == needed
    free(needed - 1)
    for source in ("stage_a_naive.checkpoints.loading.random_tensor", "stage_d_paged.weights.random_tensor"):
        monkeypatch.setattr(source, lambda *_: pytest.fail("a weight was made"))
    says = rf"the weights take {needed} bytes \(.* GiB, in .*\), and cpu has {needed - 1} bytes .* free; take a smaller"
    with pytest.raises(MemoryError, match=says):
        load(name, torch.bfloat16)


@pytest.mark.parametrize("package", ["stage_a_naive", "stage_d_paged"])
def test_seven_billion_weights_in_float32_are_refused_by_a_machine_of_16_gib(package: str, free: Callable) -> None:
    free(16 << 30)
    with pytest.raises(MemoryError, match=r"28.4 GiB, in float32\), and cpu has 17179869184 bytes \(16.0 GiB\) free"):
        importlib.import_module(package).LLM("random:qwen2.5-7b", device="cpu", dtype="float32")


def test_what_is_free_is_what_linux_says_within_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, meminfo = tmp_path / "memory.max", tmp_path / "meminfo"
    for name, value in {"LIMITS": (limit, tmp_path / "nowhere"), "MEMINFO": meminfo}.items():
        monkeypatch.setattr(memory, name, value)
    assert memory.free_memory(CPU) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo.write_text("MemTotal:     9000 kB\nMemAvailable:     100 kB\n")
    assert memory.free_memory(CPU) == 102400
    limit.write_text("max\n")
    assert memory.free_memory(CPU) == 102400
    limit.write_text("4096\n")
    assert memory.free_memory(CPU) == 4096
