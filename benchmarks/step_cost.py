"""What the engine's own Python costs a step: stage E with a model that takes no time.

    python -m benchmarks.step_cost --output benchmarks/results/step-cost-NAME.json

The scheduler, the building of the model's input, the sampler's choice of its path and the handing out of tokens are all
real; only the model, the sampling arithmetic and the device are left out. What remains is what the CPU must do between
two steps of a GPU. Reported for 1, 32 and 256 running sequences, in microseconds, with each part's share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.environment import environment
from stage_a_naive.loading import load_tokenizer, resolve
from stage_a_naive.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.engine import Engine, Sampled
from stage_e_batching.sampler import Sampler
from stage_e_batching.scheduler import Scheduler
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.step_input import StepBuffers, largest_input

MAX_MODEL_LEN = 4096
BLOCK_SIZE = 64
VOCAB_SIZE = 151_936  # Qwen2.5's and Qwen3's


class NullRunner:
    """Builds every step's input as the real runner does, and makes up the tokens."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int = BLOCK_SIZE) -> None:
        device = torch.device("cpu")
        self.batch = InputBatch(max_num_seqs, MAX_MODEL_LEN, block_size)
        self.sampler = Sampler(max_num_seqs, VOCAB_SIZE, device)
        num_bytes = largest_input(max_num_batched_tokens, max_num_seqs, self.batch.max_blocks)
        self.buffers = StepBuffers(num_bytes, device)
        self.ids = torch.arange(max_num_seqs) + 100

    def run(self, step: ScheduledStep) -> Sampled:
        for sequence in step.admitted:
            self.sampler.seat(sequence)
        self.batch.update(step)
        if not step.sequences:
            return Sampled([])
        shape = self.batch.shape_of(step)
        host = self.buffers.next_host(shape)
        steps = self.batch.fill(step, host)
        self.sampler.fill(host.sample_seats, steps, host.temperatures, host.noise_keys)
        self.buffers.send(shape)
        self.sampler.needs(host.sample_seats)
        return Sampled(self.ids[: shape.num_samples].tolist())


def make_engine(num_sequences: int, prompt_len: int, temperature: float) -> Engine:
    """An engine with `num_sequences` decoding sequences."""
    scheduler = Scheduler(
        num_blocks=num_sequences * MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=512,
        max_num_batched_tokens=16384,
    )
    source = resolve("tutor")
    engine = Engine(
        scheduler,
        NullRunner(512, 16384),
        tokenizer=load_tokenizer(source),
        eos_token_ids=frozenset({0}),
        max_model_len=MAX_MODEL_LEN,
    )
    params = SamplingParams(temperature=temperature, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(num_sequences):
        prompt = rng.integers(1, 5000, prompt_len + i).tolist()  # page edges fall on different steps
        engine.add_request(Request(i, prompt, params, seed=i), streams=False)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    return engine


def measure(num_sequences: int, steps: int, repeats: int) -> dict[str, object]:
    """Microseconds a step, the median of `repeats` runs of `steps` decode steps, and where they go."""
    engine = make_engine(num_sequences, 300, 0.6)
    parts = {"schedule": 0.0, "run": 0.0, "postprocess": 0.0}

    def timed(part: str, function: Callable) -> Callable:
        def call(*args: object) -> object:
            start = time.perf_counter()
            result = function(*args)
            parts[part] += time.perf_counter() - start
            return result

        return call

    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        samples.append((time.perf_counter() - start) / steps * 1e6)
    scheduler, runner = engine.scheduler, engine.runner
    scheduler.schedule = timed("schedule", scheduler.schedule)
    runner.run = timed("run", runner.run)
    engine.postprocess = timed("postprocess", engine.postprocess)
    for _ in range(steps):
        engine.step()
    return {
        "sequences": num_sequences,
        "us_per_step": statistics.median(samples),
        "samples_us": samples,
        "parts_us": {part: seconds / steps * 1e6 for part, seconds in parts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = [measure(n, arguments.steps, arguments.repeats) for n in arguments.sequences]
    for row in rows:
        parts = ", ".join(f"{part} {us:.0f}" for part, us in row["parts_us"].items())
        print(f"{row['sequences']:4d} sequences: {row['us_per_step']:7.1f} µs a step ({parts})")
    if arguments.output:
        options = {"steps": arguments.steps, "repeats": arguments.repeats, "block_size": BLOCK_SIZE}
        record = {"kind": "step-cost", "environment": environment(), "options": options, "rows": rows}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
