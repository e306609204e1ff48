"""The cost of the engine's Python per step: stage E with a model that takes no time.

The scheduler, the model's input, the sampler's choice of a path and the delivery of tokens are real; only the model,
the arithmetic of sampling and the device are left out. What remains is the CPU's work between two steps of a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.timing import call_seconds
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.calls import Calls
from stage_e_batching.engine import Engine
from stage_e_batching.sampler import Sampler
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.trace import Trace
from stage_f_graph_tp.compose import compose_runner
from stage_f_graph_tp.forward import StepOutput
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.runner import StepRunner
from stage_f_graph_tp.step_input import StepInput, StepShape

MAX_MODEL_LEN, BLOCK_SIZE = 4096, 64
VOCAB_SIZE = 151_936  # Qwen2.5's and Qwen3's
STEPS, REPEATS = 200, 7


class NullLayers:
    """A model that makes up the tokens and takes no time."""

    def __init__(self) -> None:
        self.ids = torch.arange(1024) + 100

    def takes(self, shape: StepShape) -> StepShape:
        return shape

    def run(self, inputs: StepInput, shape: StepShape, needs: int) -> StepOutput:
        return StepOutput(kept=self.ids[: shape.num_samples], is_on_host=True)


def null_runner(max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> StepRunner:
    """Build and send every step's input as stage F does, for a model that makes up the tokens."""
    runtime = SimpleNamespace(
        model=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        config=SimpleNamespace(vocab_size=VOCAB_SIZE),
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
    )
    sampler = Sampler(max_num_seqs, 1, VOCAB_SIZE, MAX_MODEL_LEN, runtime.device)
    options = GraphOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    runner = compose_runner(runtime, None, sampler, options)
    runner.forwards.insert(0, NullLayers())
    return runner


def null_calls(scheduler: Scheduler, trace: Trace | None = None) -> Calls:
    """Make the calls of stage E's engine with this scheduler and a runner without a model."""
    limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.block_manager.block_size
    engine = Engine(scheduler, null_runner(*limits), trace=trace)
    tokenizer = load_tokenizer(resolve("tutor"))
    return Calls(engine, tokenizer=tokenizer, eos_token_ids=frozenset(), max_model_len=MAX_MODEL_LEN)


def make_calls(num_sequences: int) -> Calls:
    """Make the calls of an engine with `num_sequences` decoding sequences whose prompts had 300 tokens or more."""
    scheduler = Scheduler(
        num_blocks=num_sequences * MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=512,
        max_num_batched_tokens=16384,
    )
    calls = null_calls(scheduler)
    params = SamplingParams(temperature=0.6, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(num_sequences):
        prompt = rng.integers(1, 5000, 300 + i).tolist()  # block edges fall on different steps
        calls.add_request(Request(i, prompt, params, seed=i), streams=False)
    while calls.engine.scheduler.waiting or calls.engine.scheduler.prefilling:
        calls.step()
    return calls


def measure() -> dict:
    """Measure 1, 32 and 256 sequences."""
    return {"rows": [measure_row(n, STEPS, REPEATS) for n in (1, 32, 256)]}


def measure_row(num_sequences: int, steps: int, repeats: int) -> dict[str, object]:
    """Measure the seconds per decode step, in `repeats` runs of `steps` steps."""
    calls = make_calls(num_sequences)

    def run() -> None:
        for _ in range(steps):
            calls.step()

    samples = [seconds / steps for seconds in call_seconds(run, torch.device("cpu"), repeats, warm_up=0)]
    return {"sequences": num_sequences, "samples": samples}
