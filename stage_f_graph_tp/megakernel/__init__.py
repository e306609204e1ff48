"""The persistent megakernel, one launch per decode step. The rest of stage F calls only `choose_decode_step`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from stage_c_fused_mlp.extension import load_extension, plan
from stage_c_fused_mlp.toolchain import ExtensionError
from stage_d_paged.config import ModelConfig
from stage_d_paged.runtime import Runtime
from stage_f_graph_tp.megakernel.kernel import MAX_ROWS, Megakernel, load_kernel, why_unsupported

__all__ = ["Megakernel", "build_early", "choose_decode_step", "most_rows"]


def most_rows(config: ModelConfig) -> int:
    """Return the largest number of requests for which the kernel was measured faster than the layers in a graph.

    With many KV heads, the attention of five or more requests has more work items than there are multiprocessors.
    """
    return MAX_ROWS if config.num_kv_heads <= 4 else 4


def build_early(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Start to compile the megakernel in threads, if this model and GPU use it and it is not compiled yet.

    Two compilers work while the model is loaded. `choose_decode_step` waits for them, and reports their errors.
    """
    if device.type != "cuda" or why_unsupported(config, dtype, 16, torch.cuda.get_device_capability(device)):
        return
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def build(load: Callable[[], object]) -> None:
        with suppress(ExtensionError):
            plan("megakernel").require_cuda()
            load()

    for load in (partial(load_extension, "megakernel"), partial(load_kernel, config, dtype, multiprocessors)):
        threading.Thread(target=build, args=(load,), daemon=True).start()


def choose_decode_step(runtime: Runtime) -> Megakernel | None:
    """Return the megakernel for this model and GPU, compiling it if needed; or print why it is not used: None."""
    capability = torch.cuda.get_device_capability(runtime.device)
    reason = why_unsupported(runtime.config, runtime.dtype, runtime.block_size, capability)
    if not reason:
        try:
            return Megakernel(runtime.model)
        except ExtensionError as error:
            reason = str(error)
    print(f"persistent megakernel: not used ({reason}); the layers run kernel by kernel", file=sys.stderr)
    return None
