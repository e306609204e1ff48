"""The engine of stage B with the MLP block of every layer replaced by a custom kernel.

A token takes the same path as in stage B. Only the work of `model(...)` inside a decode step is different: see
`patch.py`.
"""

from __future__ import annotations

import sys
import time
from os import PathLike
from typing import Any

import torch

from stage_a_naive.checkpoints.loading import pick_device, resolve
from stage_b_decode_step.llm import LLM as DecodeStepLLM
from stage_c_fused_mlp.fused_mlp import KERNELS, load_operators, why_unsupported
from stage_c_fused_mlp.patch import PatchError, PatchReport, parameter_bytes, replace_mlp_in_qwen


class LLM(DecodeStepLLM):
    """Stage B's engine with the fused MLP block.

    Args:
        mlp_kernel: `auto` (the fastest for the number of rows, or stage B's MLP if the model has another kind),
            `naive`, `warp`, `fused`, or `library` for PyTorch's kernels behind the same operator. On a CPU `auto`,
            `fused` or `library`.
        model, device, dtype, seed, options: as in stage B.

    Attributes:
        extension_time: seconds to build the operators, or to find them if they are built.
        patch_report: the number of replaced blocks, and the memory of the weights before and after.

    Raises:
        ExtensionError: the extension cannot be built here; the message says what is missing.
        ValueError: the kernel is unknown, does not run on this device or at this model's sizes (raised before anything
            is built), or was named and does not compute this model's kind of MLP; or as in stage B.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        mlp_kernel: str = "auto",
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        if mlp_kernel not in KERNELS:
            raise ValueError(f"mlp_kernel must be one of {', '.join(KERNELS)}, got {mlp_kernel!r}")
        config, chosen = resolve(model).config, pick_device(device)
        why = why_unsupported(mlp_kernel, chosen, config.hidden_size, config.intermediate_size)
        if why:
            raise ValueError(f"mlp_kernel={mlp_kernel!r} cannot run here: {why}")
        start = time.perf_counter()
        load_operators(chosen)  # before the model, so that a missing compiler is reported before the weights are loaded
        self.mlp_kernel, self.extension_time = mlp_kernel, time.perf_counter() - start
        super().__init__(model, device=device, dtype=dtype, seed=seed, **options)
        start = time.perf_counter()
        try:
            self.patch_report = replace_mlp_in_qwen(self.model, mlp_kernel)
        except PatchError as error:
            if mlp_kernel != "auto":
                raise
            print(f"[{__package__}] MLP: PyTorch's kernels, as in stage B ({error})", file=sys.stderr)
            self.patch_report = PatchReport(0, *[parameter_bytes(self.model)] * 2)
        self.build_time += self.extension_time + time.perf_counter() - start
