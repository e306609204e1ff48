"""Stage F's engine with fewer bytes to read: 8-bit weights, an 8-bit KV cache, or both.

    from beyond.quantization import LLM

    llm = LLM("Qwen/Qwen2.5-0.5B-Instruct", quantization="int8", kv_cache_dtype="int8")

The scheduler, the prefix cache, the graphs and the ranks are stage F's. Replaced are the model's matrices while they
are loaded (`layers.py`), the pool (`kv_cache.py`), and the kernels that read them (`products.py`, `attention/`).
"""

from __future__ import annotations

from dataclasses import replace

from beyond.quantization.checkpoint import options_of_checkpoint, resolve_quantized
from beyond.quantization.floor import QuantizedBytes
from beyond.quantization.options import QuantizationOptions
from beyond.quantization.parts import load_quantized_runtime
from stage_d_paged.runtime import Runtime, choose_num_blocks
from stage_e_batching.llm import make_sampler
from stage_f_graph_tp import llm as stage_f
from stage_f_graph_tp.compose import compose_runner
from stage_f_graph_tp.runner import StepRunner


class LLM(stage_f.LLM):
    """Stage F's engine in 8 bits.

    Args:
        model, device, dtype, seed: as in stage A.
        options: those of `QuantizationOptions`, by name.

    Raises:
        ModelError, TypeError, ValueError, MemoryError, OSError, WorkerError: as in stage F.
        ValueError: a format that is not supported, or a combination that is not.
    """

    options_class = QuantizationOptions
    options: QuantizationOptions
    resolve = staticmethod(resolve_quantized)

    @property
    def model_bytes(self) -> QuantizedBytes:
        """What a decode step reads."""
        return QuantizedBytes(super().model_bytes, self.options)

    def _build(self, seed: int) -> tuple[Runtime, StepRunner]:
        options = self.options = options_of_checkpoint(self.source, self.options)
        if options.tensor_parallel_size > 1:
            return self._build_ranks(seed)
        runtime = load_quantized_runtime(self.source, options, self.device, self.dtype, seed)
        sampler = make_sampler(runtime, options)
        kv_cache = runtime.make_pool(choose_num_blocks(runtime, options))
        if options.uses_eight_bits and options.uses("megakernel") and self.device.type == "cuda":
            note = "persistent megakernel: not used (it reads 16-bit weights and a 16-bit KV cache)"
            runtime = replace(runtime, notes=(*runtime.notes, note))
            options = replace(options, without=(*options.without, "megakernel"))
        return runtime, compose_runner(runtime, kv_cache, sampler, options)

    def _build_ranks(self, seed: int) -> tuple[Runtime, StepRunner]:
        from beyond.quantization.ranks import QuantizedJob, build_quantized_worker  # here: as in stage F

        job = QuantizedJob.of(self.source.name, self.device, self.dtype, seed, self.options)
        return self._start_ranks(job, build_quantized_worker)
