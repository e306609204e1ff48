"""The Python side of the persistent megakernel: from a stage D model to the arguments of one launch.

The kernel is in `csrc/stage_f/`, in two libraries. The operator `torch.ops.six_engines.decode_step` checks its tensors
and is the same for all models. It calls the kernel, which is compiled for the shape of one model: every size is a
constant, so the compiler unrolls the loops. Two models in one process have two kernel libraries.

This module gathers the arguments from a stage D model: the addresses of the weights in one table, rotary tables in
float32, and the workspace through which the multiprocessors pass activations to each other.

Everything that changes between steps is read from device memory, so a CUDA graph captured once serves every step.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from stage_c_fused_mlp.extension import LOWEST_CAPABILITY, load_extension, plan
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderLayer, DecoderModel

MAX_ROWS = 8  # kMaxDecodeRows in csrc/stage_f/decode_step.h: two sets of four, one matrix instruction for each set
SMALL_SHARED_MEMORY = (12, 0)  # from this compute capability on a block has 99 KB; the kernel needs 227 (kSharedBytes)
# Larger models spend more time on memory than on hand-offs between blocks, and run faster kernel by kernel.
MAX_HIDDEN, MAX_INTERMEDIATE = 2048, 16384
MAX_BLOCKS = 160  # kMaxBlocks in csrc/stage_f/decode_step.h


@functools.cache
def load_operator() -> None:
    """Load `torch.ops.six_engines.decode_step`, building it if needed.

    Raises:
        ExtensionError: it cannot be built here, or not with CUDA; then nothing is built.
    """
    plan("megakernel").require_cuda()
    load_extension("megakernel")

    @torch.library.register_fake("six_engines::decode_step")
    def _(*args: Any) -> None:
        return None


def load_kernel(config: ModelConfig, dtype: torch.dtype, multiprocessors: int, *, trace: bool = False) -> ctypes.CDLL:
    """Load the library with the kernel for this shape. Compiling it, once per machine, takes some tens of seconds.

    Args:
        config: the model's sizes.
        dtype: of weights and KV cache, float16 or bfloat16.
        multiprocessors: of the GPU; the kernel runs one block on each.
        trace: compile the kernel with clock recording, for measurements.

    Raises:
        ExtensionError: it cannot be built here.
    """
    extension = load_extension("megakernel_of_shape", defines=shape_macros(config, dtype, multiprocessors, trace))
    library = ctypes.CDLL(str(extension.library))
    library.decode_workspace_bytes.restype = ctypes.c_int64
    return library


def shape_macros(config: ModelConfig, dtype: torch.dtype, multiprocessors: int, trace: bool = False) -> tuple[str, ...]:
    """Return the macros with the kernel's sizes for `csrc/stage_f/shape.cuh`; arguments as of `load_kernel`."""
    sizes = {
        "LAYERS": config.num_layers,
        "HIDDEN": config.hidden_size,
        "INTERMEDIATE": config.intermediate_size,
        "HEADS": config.num_heads,
        "KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "VOCAB": config.vocab_size,
        "GRID": min(multiprocessors, MAX_BLOCKS, config.intermediate_size // 2),
    }
    defines = [f"SIX_{name}={size}" for name, size in sizes.items()]
    return *defines, *["SIX_HALF"] * (dtype == torch.float16), *["SIX_TRACE"] * trace


def why_unsupported(config: ModelConfig, dtype: torch.dtype, block_size: int, capability: tuple[int, int]) -> str:
    """Say why the kernel cannot, or should not, run this model on a GPU of this compute capability.

    Returns "" if it can. Compiles nothing.
    """
    lowest, given = LOWEST_CAPABILITY["megakernel"], f"{capability[0]}.{capability[1]}"
    if capability < lowest:
        return f"it needs compute capability {lowest[0]}.{lowest[1]}, and this GPU has {given}"
    if capability >= SMALL_SHARED_MEMORY:
        return f"it needs 227 KB of shared memory per block, and GPUs of compute capability {given} have 99"
    if config.beyond_kernels:
        return f"the model has {config.beyond_kernels}"
    if len(set(config.layers)) > 1 or config.layers[0].window:
        return "the model has layers with a window, or of several kinds"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the dtype is {dtype}; the kernel has float16 and bfloat16"
    if config.head_dim not in (64, 128):
        return f"head_dim is {config.head_dim}; the kernel has 64 and 128"
    if config.num_heads > 8 * config.num_kv_heads:
        return f"{config.num_heads} heads share {config.num_kv_heads} KV heads; the kernel has up to 8 to one"
    if config.hidden_size % 32 or config.intermediate_size % 32:
        return f"hidden size {config.hidden_size} and MLP size {config.intermediate_size} must be multiples of 32"
    if block_size < 16 or block_size & (block_size - 1):
        return f"kvcache_block_size is {block_size}; the kernel needs a power of two of at least 16"
    if config.hidden_size > MAX_HIDDEN or config.intermediate_size > MAX_INTERMEDIATE:
        sizes = f"{config.hidden_size} and MLP size {config.intermediate_size}"
        return f"hidden size {sizes}; it is faster for up to {MAX_HIDDEN} and {MAX_INTERMEDIATE} only"
    return ""


class Megakernel:
    """Runs a decode step of a stage D model in one launch, for 1 to 8 requests.

    Holds references to the model's weights (their addresses are in a table on the device), not copies. Make a new
    `Megakernel` if a weight tensor is replaced; overwriting its values is fine.

    Args:
        model: on a CUDA device, loaded, not sharded.
        trace: for measurements: `step` can record clocks.

    Attributes:
        flags: parts that a measurement or test leaves out (bits in csrc/stage_f/decode_step.h); 0 for correct results.
        timeout_ms: a longer wait ends in an error instead of a hang.
        max_steps: launches after which the workspace is reset.

    Raises:
        ExtensionError: the kernel cannot be built here.
    """

    flags = 0
    timeout_ms = 2000

    def __init__(self, model: DecoderModel, *, trace: bool = False) -> None:
        load_operator()
        self.config = model.config
        self.model = model
        config, weight = model.config, model.embed_tokens.weight
        table = [_pointers(layer, config.num_heads) for layer in model.layers]
        self.layer_table = torch.tensor(table, dtype=torch.int64, device=weight.device)  # [layers, 9]
        # The model's tables hold both halves, sin with its sign; the kernel takes [positions, head_dim / 2] of each.
        self.cos = model.rotaries[0].cos[:, 0].float().contiguous()
        self.sin = model.rotaries[0].sin[:, 1].float().contiguous()
        multiprocessors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        self._library = load_kernel(config, weight.dtype, multiprocessors, trace=trace)
        size = self._library.decode_workspace_bytes()
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=weight.device)
        # A step counts its flags up by layers + 2, in 32 bits. They must not wrap around to 0, which means "no value
        # yet".
        self.max_steps = self._steps_left = 2**31 // (config.num_layers + 2)
        # Everything that is the same in every step is looked up once: the GPU may be waiting for the next launch.
        self._launch = torch.ops.six_engines.decode_step.default
        self._weights = (self.layer_table, weight, model.norm.weight, model.lm_head.weight, self.cos, self.sin)
        self._sizes = (config.num_heads, config.intermediate_size, config.rms_norm_eps)
        self._kernel = ctypes.cast(self._library.launch_decode_step, ctypes.c_void_p).value  # its address

    def make_logits(self, rows: int) -> Tensor:
        """Allocate logits for `step`: `[rows, vocab]` float32, not initialised."""
        return torch.empty(rows, self.config.vocab_size, dtype=torch.float32, device=self.workspace.device)

    def make_result(self, rows: int) -> Tensor:
        """Allocate a result for `step`: int64 `[rows + 1]` in pinned host memory, written over the bus."""
        return torch.zeros(rows + 1, dtype=torch.int64, pin_memory=self.workspace.is_cuda)

    def step(
        self,
        last_tokens: Tensor,  # int64 [batch slots]: this step's tokens; afterwards its sampled tokens
        batch_slots: Tensor,  # int64 [rows]: each row's index in `last_tokens`
        positions: Tensor,  # int64 [rows]
        slot_mapping: Tensor,  # int64 [rows]; -1: a padding row, which reads and writes no KV
        block_tables: Tensor,  # int32 [rows, max_blocks]
        context_lens: Tensor,  # int32 [rows], including this step's token
        temperatures: Tensor,  # float32 [rows], 0: greedy
        noise_keys: Tensor,  # int32 [rows], the bits of `noise_key(seed, step)`
        kv_cache: Tensor,  # [2, layers, blocks, block_size, kv_heads, head_dim]: `KVCache.tensor`
        logits: Tensor,  # float32 [rows, vocab], written
        result: Tensor,  # int64 [rows + 1], written; on the device or page-locked
        trace: Tensor | None = None,  # int64 [multiprocessors, 17 * layers + 7]: clocks at the ends of the phases
    ) -> None:
        """Enqueue one step on the current stream; can be captured in a CUDA graph.

        Each row's token, greedy or temperature-only, is written to `last_tokens` and to `result`, whose last number is
        `failure`. Steps of one `Megakernel` must not run at the same time on two streams: they share the workspace.

        Raises:
            ValueError, TypeError: a shape or dtype does not fit, or the kernel is not compiled for the shape.
        """
        if self._steps_left == 0:
            self.reset()
            self._steps_left = self.max_steps
        self._steps_left -= 1
        self._launch(
            *self._weights,
            kv_cache,
            last_tokens,
            batch_slots,
            positions,
            slot_mapping,
            block_tables,
            context_lens,
            temperatures,
            noise_keys,
            logits,
            result,
            self.workspace,
            trace,
            *self._sizes,
            self.flags,
            self.timeout_ms,
            self._kernel,
        )

    @property
    def failure(self) -> Tensor:
        """int32 `[1]` on the device: 0, or 1 + 16 × layer + phase of the first wait that timed out since `reset`."""
        return self.workspace[4:8].view(torch.int32)

    def check(self, failure: Tensor | None = None) -> None:
        """Raise an error if a wait of a step timed out; its results are invalid.

        Later steps are invalid too, because they began with its tokens. So this waits until the device has ended them,
        and then resets the workspace for the next step.

        Args:
            failure: the last number of the step's `result`; without it, this waits for the device and reads it there.

        Raises:
            RuntimeError: a wait has timed out since the last `reset`.
        """
        place = int(self.failure if failure is None else failure)
        if place:
            if self.workspace.is_cuda:
                torch.cuda.synchronize(self.workspace.device)
            self.reset()
            layer, phase = divmod(place - 1, 16)
            raise RuntimeError(
                f"the persistent megakernel waited longer than {self.timeout_ms} ms in layer {layer}, phase {phase}; "
                "its tokens are invalid. Something else occupies the device's multiprocessors for that long: end it, "
                "or pass without='megakernel'"
            )

    def reset(self) -> None:
        """Reset the workspace after a launch that timed out or was killed."""
        self.workspace.zero_()


def _pointers(layer: DecoderLayer, num_heads: int) -> list[int]:
    """Return the addresses of a layer's weights, in the order of `LayerWeights` in decode_step.h; 0 if missing."""
    attention, mlp = layer.self_attn, layer.mlp
    norms: list[Tensor | None] = [None, None]
    if attention.qk_norm is not None:
        norms = [attention.qk_norm.weight[0], attention.qk_norm.weight[num_heads]]  # every head's row is the same
    tensors = [
        layer.input_layernorm.weight,
        attention.qkv_proj.weight,
        attention.qkv_proj.bias,
        *norms,
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        mlp.gate_up_proj.weight,
        mlp.down_proj.weight,
    ]
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
