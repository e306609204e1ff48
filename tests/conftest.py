"""Shared by all tests: the skip of what this machine cannot run, and no progress bars or network."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

# What a shell in the background or `nohup` ignores, the programs that tests start would ignore too.
for number, handler in {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Before torch is imported. One thread per process: the models are tiny, and threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["LANGUAGE"] = "en"  # tests read what commands say, whatever the locale
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

gc.disable()  # until all tests are collected: little of what that makes is garbage
hypothesis.settings.register_profile("thorough", max_examples=300)
ROOT = Path(__file__).resolve().parent.parent
MARGIN = 1 << 14  # elements
# Seconds that a test may take where the default is too short, by its markers and fixtures: the first one builds an
# extension, and a file of kernels runs in Triton's interpreter as one test.
TIME_LIMITS = {"gpu": 1200, "compiler": 1200, "run_interpreted_tests": 1800}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose markers this machine does not satisfy, and set time limits."""
    missing = {} if torch.cuda.is_available() else {"gpu": "no NVIDIA GPU"}
    if os.environ.get("TRITON_INTERPRET") != "1":
        missing["interpreted"] = "is run by the test of this file that calls `run_interpreted_tests`"
    if any("compiler" in item.keywords for item in items):
        from stage_c_fused_mlp.extension import ExtensionError, plan  # here: most tests do not need this import

        try:
            plan()
        except ExtensionError as error:
            missing["compiler"] = str(error)
    for item in items:
        longer = [TIME_LIMITS[name] for name in TIME_LIMITS if name in item.keywords or name in item.fixturenames]
        if longer and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(longer)))
        for marker in missing.keys() & item.keywords.keys():
            item.add_marker(pytest.mark.skip(reason=missing[marker]))


def pytest_collection_finish() -> None:
    """Hide the million objects of imports and of collected tests from the garbage collector."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `torch.empty` return NaN between margins of infinities, which must still be there when the test ends.

    A kernel that reads unwritten memory, or past the end of a tensor, computes NaN (and so does infinity times
    zero, or less infinity); a kernel that writes before or after a tensor is noticed.
    """
    empty, buffers = torch.empty, []

    def guarded(*size: object, dtype: torch.dtype | None = None, device: object = None, **others: object):
        shape = torch.Size(size if isinstance(size[0], int) else size[0])
        plain = empty(shape, dtype=dtype, device=device, **others)
        if others or plain.is_meta or not plain.is_floating_point():
            return plain
        buffer = torch.full((plain.numel() + 2 * MARGIN,), float("inf"), dtype=plain.dtype, device=plain.device)
        buffers.append((buffer, MARGIN + plain.numel()))
        return buffer[MARGIN : MARGIN + plain.numel()].fill_(float("nan")).view(shape)

    def guarded_like(x: torch.Tensor, device: object = None, **_: object) -> torch.Tensor:
        return guarded(*x.shape, dtype=x.dtype, device=device or x.device)

    for function in {"empty": guarded, "empty_like": guarded_like}.items():
        monkeypatch.setattr(torch, *function)
    yield
    for buffer, end in buffers:
        assert buffer[:MARGIN].isposinf().all() and buffer[end:].isposinf().all(), "memory outside a tensor was written"


@pytest.fixture
def shuffled_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter run the programs of every launch in a random order, as a GPU may."""
    from triton.runtime.interpreter import interpreter_builder as builder

    generator, order = random.Random(0), []

    def set_grid_idx(x: int, y: int, z: int) -> None:
        columns, layers = builder.grid_dim[1:]
        if (x, y, z) == (0, 0, 0):
            count = builder.grid_dim[0] * columns * layers
            order[:] = generator.sample(range(count), count)
        index = order[(x * columns + y) * layers + z]
        builder.grid_idx = index // (columns * layers), index // layers % columns, index % layers

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


@pytest.fixture(autouse=True)
def hostile_interpreter(request: pytest.FixtureRequest) -> None:
    """Give tests marked `interpreted` uninitialised memory, and run their programs in any order."""
    if request.node.get_closest_marker("interpreted"):
        request.getfixturevalue("guarded_memory")
        request.getfixturevalue("shuffled_programs")


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make a program the interpreter that the labs start."""

    def stand_in(program: str) -> Path:
        file = tmp_path / "stand in"
        file.write_text(f"#!{sys.executable}\n{program}", encoding="utf-8")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        return file

    return stand_in


@pytest.fixture
def run_interpreted_tests(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Run the tests of a file that are marked `interpreted`, or named so, in Triton's interpreter; they must pass.

    They run in a separate process, because Triton reads TRITON_INTERPRET when it is first imported. Slow tests run if
    this run has slow tests.
    """
    tier = request.config.option.markexpr

    def run(file: str) -> None:
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") == "1":
            pytest.skip("they run in this process")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "interpreted",
            "-m",
            tier,
            file,
        ]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        inner = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert inner.returncode == 0 and " passed" in inner.stdout, inner.stdout + inner.stderr

    return run


@pytest.fixture
def pretended_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The compute capabilities of GPUs that PyTorch then finds; none at first.

    Whatever is in the list, `cuda:90` has compute capability 9.0 and an H200's properties, `cuda:89` 8.9 and those of a
    GeForce RTX 4090, and so on.
    """
    gpus: list[tuple[int, int]] = []

    def capability(device: torch.device | int | None = None) -> tuple[int, int]:
        index = getattr(device, "index", device) or 0
        return gpus[index] if index < len(gpus) else divmod(index, 10)

    def properties(device: torch.device | int | None = None) -> SimpleNamespace:
        large = capability(device)[0] in (9, 10)
        shared = (228 if large else 99) * 1024
        return SimpleNamespace(
            multi_processor_count=132 if large else 128,
            shared_memory_per_multiprocessor=shared,
            shared_memory_per_block_optin=shared - 1024,
        )

    for name, answer in {
        "is_available": lambda: bool(gpus),
        "device_count": lambda: len(gpus),
        "current_device": lambda: 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return gpus


@pytest.fixture
def pretended_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended_gpus: list) -> Path:
    """Pretend a C++ compiler and a ninja that produce nothing, PyTorch with CUDA, and no GPU. Returns nvcc's path."""
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "ninja"):
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CXX", "/bin/true")
    monkeypatch.setenv("SIX_ENGINES_BUILD", str(tmp_path / "build"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    return tmp_path / "bin" / "nvcc"


@pytest.fixture
def tutor_copy(tmp_path: Path) -> Path:
    """The embedded model in a directory that a test may break."""
    from stage_a_naive.checkpoints.tutor import TUTOR_PATH  # here: most tests can do without it

    return Path(shutil.copytree(TUTOR_PATH, tmp_path / "model"))


@pytest.fixture
def draw_norm_weights():
    """Give a model norm weights that matter: in an untrained one all are 1."""

    def draw(model):
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.uniform_(0.2, 2, generator=generator)

    return draw
