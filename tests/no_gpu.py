"""Simulate a GPU that is not there: its tensors, launches and compilations."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

H200, RTX_4090 = torch.device("cuda", 90), torch.device("cuda", 89)  # of `pretended_gpus`


class PretendedDevice(TorchFunctionMode):
    """Put tensors made on `device`, a GPU that is not there, into `memory`; they report `device`."""

    def __init__(self, device: torch.device, memory: str = "meta") -> None:
        super().__init__()
        self.device, self.memory = device, torch.device(memory)
        self.kind = type("Pretended", (torch.Tensor,), {"device": device})

    def __torch_function__(self, function, types, args=(), kwargs=None):
        values = [*args, *(kwargs or {}).values()]
        here = [isinstance(value, torch.device) and value == self.device for value in values]
        values = [self.memory if moved else value for moved, value in zip(here, values, strict=True)]
        named = dict(zip(kwargs or {}, values[len(args) :], strict=True))
        result = function(*values[: len(args)], **named)
        return result.as_subclass(self.kind) if any(here) and isinstance(result, torch.Tensor) else result


def recorded_launches(monkeypatch: pytest.MonkeyPatch, module: object, *kernels: str) -> list[SimpleNamespace]:
    """Record launches from now on: kernel, grid, arguments, and named arguments. Nothing is run."""
    launches: list[SimpleNamespace] = []

    class Recorder:
        def __init__(self, kernel: str) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]):
            def launch(*arguments: object, **named: object) -> None:
                launches.append(SimpleNamespace(kernel=self.kernel, grid=grid, arguments=arguments, **named))

            return launch

    for kernel in kernels:
        monkeypatch.setattr(module, kernel, Recorder(kernel))
    return launches


def compiled_for_hopper(
    kernel, types: Mapping[str, str], constants: Mapping[str, object], strides: Sequence[str] = (), **options: object
) -> str:
    """PTX of a kernel whose tensors are aligned, as PyTorch's are: that needs Triton's compiler, but no GPU.

    Args:
        types: Triton's, by argument: `*bf16`, `i32`, …
        constants: arguments that are known when it is compiled.
        strides: arguments that are multiples of 16.
        options: for the compiler, such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if not isinstance(kernel, triton.JITFunction):
        pytest.skip("Triton interprets in this process, and compiles nothing")
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [name for name in names if types[name].startswith("*") or name in strides]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
