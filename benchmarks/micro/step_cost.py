"""What the engine's own Python costs per step: stage E with a model that takes no time.

The scheduler, the building of the model's input, the sampler's choice of its path and the handing out of tokens are all
real; only the model, the sampling arithmetic and the device are left out. What remains is what the CPU must do between
two steps of a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.timing import call_seconds
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.engine import Engine
from stage_e_batching.sampler import SampledTokens, Sampler
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.trace import Trace
from stage_f_graph_tp.async_runner import AsyncModelRunner, InFlight
from stage_f_graph_tp.step_input import StepShape

MAX_MODEL_LEN, BLOCK_SIZE = 4096, 64
VOCAB_SIZE = 151_936  # Qwen2.5's and Qwen3's
STEPS, REPEATS = 200, 7


class NullRunner(AsyncModelRunner):
    """Builds and sends every step's input as stage F does, and makes up the tokens; it has no model."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> None:
        runtime = SimpleNamespace(
            model=None,
            device=torch.device("cpu"),
            dtype=torch.float32,
            config=SimpleNamespace(vocab_size=VOCAB_SIZE),
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
        )
        sampler = Sampler(max_num_seqs, 1, VOCAB_SIZE, MAX_MODEL_LEN, runtime.device)
        super().__init__(runtime, None, sampler, max_num_seqs, max_num_batched_tokens)
        self.ids = torch.arange(max_num_seqs) + 100

    def execute_step(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        self.buffers.send(shape)
        ids = self.ids[: len(sample_slots)]
        return InFlight(SampledTokens(ids), ids)


def null_engine(scheduler: Scheduler, trace: Trace | None = None) -> Engine:
    """Stage E's engine with this scheduler, and a runner without a model."""
    limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.block_manager.block_size
    return Engine(
        scheduler,
        NullRunner(*limits),
        tokenizer=load_tokenizer(resolve("tutor")),
        eos_token_ids=frozenset(),
        max_model_len=MAX_MODEL_LEN,
        trace=trace,
    )


def make_engine(num_sequences: int) -> Engine:
    """An engine with `num_sequences` decoding sequences, past prompts of 300 tokens and more."""
    scheduler = Scheduler(
        num_blocks=num_sequences * MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=512,
        max_num_batched_tokens=16384,
    )
    engine = null_engine(scheduler)
    params = SamplingParams(temperature=0.6, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(num_sequences):
        prompt = rng.integers(1, 5000, 300 + i).tolist()  # block edges fall on different steps
        engine.add_request(Request(i, prompt, params, seed=i), streams=False)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    return engine


def measure() -> dict:
    """1, 32 and 256 sequences."""
    return {"rows": [measure_row(n, STEPS, REPEATS) for n in (1, 32, 256)]}


def measure_row(num_sequences: int, steps: int, repeats: int) -> dict[str, object]:
    """Seconds per decode step, `repeats` runs of `steps` steps."""
    engine = make_engine(num_sequences)

    def run() -> None:
        for _ in range(steps):
            engine.step()

    samples = [seconds / steps for seconds in call_seconds(run, torch.device("cpu"), repeats, warm_up=0)]
    return {"sequences": num_sequences, "samples": samples}


TABLES = """
[step-cost]
corner = "running sequences"
line = "{sequences}"
columns."µs per step" = "{us:.0f}"
columns.least = "{1e6 * min(samples):.0f}"
columns.most = "{1e6 * max(samples):.0f}"
"""
