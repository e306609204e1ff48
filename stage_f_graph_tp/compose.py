"""Compose a runner from the options: choose its forwards, and record its graphs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch

from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime
from stage_e_batching.sampler import Sampler
from stage_f_graph_tp.cuda_graph import DecodeGraphs, GraphRecorder, Recorder, capture_sizes
from stage_f_graph_tp.forward import Layers, StepOutput
from stage_f_graph_tp.head import Head
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.last_tokens import LastTokens, Tokens
from stage_f_graph_tp.megakernel import choose_decode_step
from stage_f_graph_tp.megakernel_steps import MegakernelSteps
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.prefill_graphs import make_graphs, prefill_sizes
from stage_f_graph_tp.runner import StepRunner
from stage_f_graph_tp.step_input import StepBuffers, largest_input


def to_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr)


def compose_runner(
    runtime: Runtime,
    kv_cache: KVCache,
    sampler: Sampler,
    options: GraphOptions,
    batch: InputBatch | None = None,
    tokens: Tokens | None = None,
    graphs: Sequence[DecodeGraphs] = (),
) -> StepRunner:
    """Compose the runner of an engine on one device, and record its graphs.

    Args:
        runtime, kv_cache: the model and its pool.
        sampler: with `options.max_num_seqs` batch slots.
        options: say which ideas are switched on, and the limits of a step.
        batch, tokens, graphs: replace stage F's builder of inputs and its tokens on the device; further graphs.
    """
    batch = batch or InputBatch(options.max_num_seqs, runtime.max_model_len, runtime.block_size)
    if tokens is None:
        tokens = LastTokens(options.max_num_seqs, runtime.device)
    buffers, layers = make_buffers(runtime, options, batch), Layers(runtime.model, kv_cache, tokens)
    head = Head(runtime.model, runtime.config.vocab_size, runtime.dtype, sampler, tokens)
    compile_steps(runtime, options, batch, buffers, layers, head)
    megakernel = choose_megakernel(runtime, kv_cache, tokens, batch, options)
    runner = StepRunner(batch, buffers, sampler, layers, head, forwards=megakernel, graphs=graphs)
    record_graphs(runner, runtime, options, options.max_num_seqs)
    return runner


def make_buffers(runtime: Runtime, options: GraphOptions, batch: InputBatch) -> StepBuffers:
    """Allocate memory for the input of the largest step."""
    most_seqs = options.max_num_seqs + 1  # 1 for padding
    return StepBuffers(largest_input(options.max_num_batched_tokens, most_seqs, batch.max_blocks), runtime.device)


@torch.inference_mode()
def compile_steps(
    runtime: Runtime,
    options: GraphOptions,
    batch: InputBatch,
    buffers: StepBuffers,
    layers: Layers,
    head: Head,
    report: Callable[[str], None] = to_stderr,
) -> None:
    """Compile the Triton kernels of all steps in parallel, on a GPU; `report` is called with one line.

    The kernels of a number of tokens are those of the next power of two, up to 256, so only these steps are tried.
    """
    if runtime.device.type != "cuda" or runtime.backend.name == "reference":
        return
    from stage_f_graph_tp.compile_kernels import compile_kernels  # here: only a GPU needs Triton

    tokens, prefills = layers.tokens, prefill_sizes(min(options.max_num_batched_tokens, 256))
    decode, prefill = make_graphs(batch, tokens, capture_sizes(options.max_num_seqs), prefills)

    def run() -> None:
        for graphs in (prefill, decode):
            for shape in graphs.shapes:
                if shape.num_tokens.bit_count() == 1:
                    tokens.by_slot.zero_()  # a kernel that was not launched has sampled any number
                    graphs.body(shape, buffers, layers.run, head)()
        if head.makes_logits and options.uses("megakernel"):
            logits = torch.empty(1, runtime.config.vocab_size, device=runtime.device)  # float32, as the megakernel's
            decode.body(decode.shapes[0], buffers, lambda *_: StepOutput(logits=logits), head)()
        tokens.by_slot.zero_()

    start = time.perf_counter()
    compile_kernels(run)
    report(f"Triton kernels: ready in {time.perf_counter() - start:.1f} s")


def choose_megakernel(
    runtime: Runtime, kv_cache: KVCache, tokens: Tokens, batch: InputBatch, options: GraphOptions
) -> list[MegakernelSteps]:
    """Return the megakernel as a forward, if it is switched on and can run."""
    # A user who selects the reference attention wants it to run.
    if runtime.device.type != "cuda" or runtime.backend.name == "reference" or not options.uses("megakernel"):
        return []
    kernel = choose_decode_step(runtime)
    return [MegakernelSteps(kernel, kv_cache, tokens, batch.max_blocks, batch.max_model_len)] if kernel else []


def record_graphs(
    runner: StepRunner,
    runtime: Runtime,
    options: GraphOptions,
    most_decodes: int,
    report: Callable[[str], None] = to_stderr,
    watch: Callable[[Recorder], Recorder] = lambda record: record,
) -> None:
    """Record a runner's steps as CUDA graphs, if the options and the device allow it.

    Args:
        most_decodes: sequences of the largest decode step.
        report: called with one line per kind of step.
        watch: wraps the recorder.
    """
    decodes = capture_sizes(most_decodes) if options.uses("graphs") else []
    prefills = prefill_sizes(options.max_num_batched_tokens) if options.uses("prefill_graphs") else []
    if runtime.device.type != "cuda" or not (decodes or prefills):
        return
    if runtime.backend.name == "reference":  # it reads the longest context back from the device
        report("CUDA graphs: not used (attention_backend='reference' cannot be recorded)")
        return
    for line in runner.capture(watch(GraphRecorder(runtime.device)), decodes, prefills):
        report(line)
