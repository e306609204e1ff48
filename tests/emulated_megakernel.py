"""The megakernel without a GPU: its own source, compiled for the CPU against `csrc/emulator`."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_f_graph_tp.megakernel import Megakernel, kernel

SOURCE = Path(__file__).with_suffix(".cpp")
CSRC = SOURCE.parents[1] / "csrc"
BLOCKS = 9  # multiprocessors of the emulated GPU


def build(shape: ModelConfig, dtype: torch.dtype, folder: Path) -> ctypes.CDLL:
    """Compile the kernel of a shape."""
    library = folder / "decode_step.so"
    command = [os.environ.get("CXX") or "c++", "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-shared"]
    command += [f"-D{macro}" for macro in kernel.shape_macros(shape, dtype, BLOCKS)]
    command += [f"-I{CSRC / 'emulator'}", f"-I{CSRC}", "-o", library, SOURCE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    loaded = ctypes.CDLL(str(library))
    loaded.decode_workspace_bytes.restype = ctypes.c_int64
    loaded.launch_decode_step.restype = ctypes.c_char_p
    return loaded


class Launch:
    """What `torch.ops.six_engines.decode_step` does on a GPU, with the emulated kernel.

    Attributes:
        seed: of the order in which blocks run and memory delivers; another one in each launch.
        held: a block that starts when all others have ended, and whose copies are slow; -1: none.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.seed, self.held = library, 0, -1

    def __call__(self, *arguments: object) -> None:
        """Run a step. The arguments are the operator's; `timeout` counts turns of the scheduler."""
        *tensors, _, _, _, eps, flags, timeout, _ = arguments
        kv_cache, batch_slots, block_tables = tensors[6], tensors[8], tensors[11]
        assert all(tensor.is_contiguous() for tensor in tensors)
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        self.seed += 1
        wrong = self.library.launch_decode_step(
            pointers,
            *(len(batch_slots), *kv_cache.shape[2:4], block_tables.shape[1]),
            ctypes.c_float(eps),
            flags,
            ctypes.c_int64(timeout),
            ctypes.c_uint64(self.seed),
            self.held,
        )
        assert wrong is None, f"{wrong.decode()} (seed {self.seed})"


def emulate(model: DecoderModel, library: ctypes.CDLL, launch: object, monkeypatch: pytest.MonkeyPatch) -> Megakernel:
    """Make a model's megakernel on the CPU; it calls `launch` instead of the operator."""
    properties = SimpleNamespace(multi_processor_count=BLOCKS)
    for target, name, value in (
        (kernel, "load_operator", lambda: None),
        (kernel, "load_kernel", lambda *args, **options: library),
        (torch.ops, "six_engines", SimpleNamespace(decode_step=SimpleNamespace(default=launch))),
        (torch.cuda, "get_device_properties", lambda _: properties),
    ):
        monkeypatch.setattr(target, name, value, raising=False)
    return Megakernel(model)
