"""The engine of stage B with the MLP block of every layer replaced by one kernel of our own.

The path of a token is stage B's, line for line. Only what `model(...)` does inside a decode step is different: see
`patch.py`.
"""

from __future__ import annotations

import time
from os import PathLike

import torch

from stage_a_naive.loading import pick_device
from stage_b_decode_step.llm import LLM as DecodeStepLLM
from stage_c_fused_mlp.fused_mlp import GENERATIONS, load_operators
from stage_c_fused_mlp.patch import PatchReport, replace_mlp_in_qwen


class LLM(DecodeStepLLM):
    """Stage B's engine with the fused MLP block.

    Args:
        mlp_kernel: which kernel: `auto` (the quickest for the number of rows), `naive`, `warp`, `fused`, or `library`
            for PyTorch's own kernels behind the same operator. On the CPU `auto` or `library`.
        model, device, dtype, seed, options: as in stage B.

    Attributes:
        patch_report: how many blocks were replaced, and the memory of the weights before and after.

    Raises:
        ExtensionError: the extension cannot be built here; the message says what is missing.
        ValueError: an unknown kernel, or one that this device does not have; or as in stage B.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        mlp_kernel: str = "auto",
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        **options: object,
    ) -> None:
        if mlp_kernel not in GENERATIONS:
            raise ValueError(f"mlp_kernel must be one of {', '.join(GENERATIONS)}, got {mlp_kernel!r}")
        if pick_device(device).type != "cuda" and mlp_kernel not in ("auto", "library"):
            raise ValueError(f"mlp_kernel={mlp_kernel!r} is a CUDA kernel; on the CPU use 'auto' or 'library'")
        start = time.perf_counter()
        load_operators()  # before the model: whoever has no compiler should not wait for the weights first
        extension_time = time.perf_counter() - start
        super().__init__(model, device=device, dtype=dtype, seed=seed, **options)
        start = time.perf_counter()
        self.patch_report: PatchReport = replace_mlp_in_qwen(self.model, mlp_kernel)
        self.build_time += extension_time + time.perf_counter() - start
