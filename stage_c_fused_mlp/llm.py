"""The engine of stage B with the MLP block of every layer replaced by one kernel of our own.

The path of a token is stage B's, line for line. Only what `model(...)` does inside a decode step is different: see
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
        mlp_kernel: `auto` (the fastest for the number of rows, and stage B's MLP where a model has another one),
            `naive`, `warp`, `fused`, or `library` for PyTorch's
            own kernels behind the same operator. On a CPU `auto`, `fused` or `library`.
        model, device, dtype, seed, options: as in stage B.

    Attributes:
        extension_time: seconds that it took to build the operators, or to find them built.
        patch_report: how many blocks were replaced, and the memory of the weights before and after.

    Raises:
        ExtensionError: the extension cannot be built here; the message says what is missing.
        ValueError: an unknown kernel, or one that does not run on this device or at this model's sizes (said before
            anything is built); one that was named, and the model's MLP is not of its kind; or as in stage B.
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
        load_operators(chosen)  # before the model: whoever has no compiler should not wait for the weights first
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
