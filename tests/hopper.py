"""Triton kernels compiled for a Hopper GPU: that needs Triton's compiler, but no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def compiled_for_hopper(
    kernel, types: Mapping[str, str], constants: Mapping[str, object], strides: Sequence[str] = (), **options: object
) -> str:
    """PTX of a kernel whose tensors are aligned, as PyTorch's are.

    Args:
        types: Triton's, by argument: `*bf16`, `i32`, …
        constants: arguments that are known when it is compiled.
        strides: arguments that are multiples of 16.
        options: for the compiler, such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [name for name in names if types[name].startswith("*") or name in strides]
    source = ASTSource(
        kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
