"""An engine on several ranks: build a runner per rank, execute steps on all of them, and sample.

Rank 0 prepares each step, sends its packed input to the other ranks, and all execute the same step. If requests are
greedy or temperature-only, all ranks sample together, each among its part of the vocabulary
(`tensor_parallel/shard_sampling.py`), also inside a graph. If a step needs whole rows of logits, rank 0 samples,
because only rank 0 knows the requests, and the ids are broadcast on the device.
"""

from __future__ import annotations

import json
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.checkpoints.loading import resolve
from stage_d_paged.config import ModelConfig
from stage_d_paged.model import DecoderModel
from stage_d_paged.runtime import BuildModel, Runtime, choose_num_blocks, load_runtime
from stage_e_batching import parts
from stage_e_batching.llm import make_sampler
from stage_e_batching.sampler import RANDOM, SampledTokens, Sampler, SamplerInput
from stage_f_graph_tp.compose import compile_steps, make_buffers, record_graphs
from stage_f_graph_tp.cuda_graph import Body, Recorded, Recorder
from stage_f_graph_tp.forward import Layers, Run, StepHead, StepOutput
from stage_f_graph_tp.head import Head, InFlight
from stage_f_graph_tp.input_batch import InputBatch
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.runner import StepRunner
from stage_f_graph_tp.step_input import StepBuffers, StepInput, StepShape
from stage_f_graph_tp.tensor_parallel import (
    Build,
    RankGroup,
    Rendezvous,
    ShardSampler,
    Workers,
    build_sharded_model,
    check_divisible,
    start_ranks,
)

RELEASE_SECONDS = 10.0  # for NCCL to release its memory

MakeBatch = Callable[[int, int, int], InputBatch]  # arguments: max_num_seqs, max_model_len, block_size


@dataclass(frozen=True)
class Job:
    """Everything that a rank needs to build its share of the engine."""

    model: str
    device: str
    dtype: str
    seed: int
    options: dict[str, Any]
    options_class: ClassVar[type[GraphOptions]] = GraphOptions

    @classmethod
    def of(cls, model: str, device: torch.device, dtype: torch.dtype, seed: int, options: GraphOptions) -> Job:
        return cls(model, device.type, str(dtype).removeprefix("torch."), seed, asdict(options))

    def encode(self) -> bytes:
        """Encode the job as rank 0's first message."""
        return json.dumps(asdict(self)).encode()

    @property
    def num_ranks(self) -> int:
        return self.options["tensor_parallel_size"]

    @property
    def asked(self) -> str:
        """The options that set the number of ranks, for error messages."""
        return f"tensor_parallel_size={self.num_ranks}"

    def check(self, config: ModelConfig) -> None:
        """Check, before a rank starts, that the ranks can divide a model of this shape: see `check_divisible`."""
        check_divisible(config, self.options["tensor_parallel_size"])

    def start(self, build_worker: Build) -> tuple[Rendezvous, Workers]:
        """Start the other ranks: see `start_ranks`."""
        return start_ranks(self.num_ranks, self.asked, torch.device(self.device), build_worker)

    def build(self, rendezvous: Rendezvous, workers: Workers | None = None, batch: MakeBatch = InputBatch) -> Rank:
        """Build one rank's share of the engine. The KV pool has as many blocks as fit on every rank.

        Args:
            workers: rank 0's handle on the others; None on the others.
            batch: makes the builder of inputs, on rank 0.
        """
        options = self.options_class(**self.options)
        device = self.own_device(rendezvous)
        group = RankGroup(rendezvous, device, workers, options.uses("one_shot_all_reduce"), options.uses("pdl"))
        runtime = self.load(options, device, partial(build_sharded_model, group=group))
        group.gather("loaded")  # enter a collective only when every rank will enter it
        group.connect()
        sampler = self.make_sampler(runtime, options)
        num_blocks = min(map(int, group.gather("blocks", str(choose_num_blocks(runtime, options)))))
        ranks = Ranks(group, workers)
        inputs = batch(options.max_num_seqs, runtime.max_model_len, runtime.block_size)
        tokens = LastTokens(options.max_num_seqs, device)
        buffers = make_buffers(runtime, options, inputs)
        layers = Layers(runtime.model, runtime.make_pool(num_blocks), tokens)
        head = RankHead(runtime.model, runtime.config.vocab_size, runtime.dtype, sampler, tokens, ranks)
        compile_steps(runtime, options, inputs, buffers, layers, head, ranks.report)
        runner = RankRunner(ranks, inputs, buffers, sampler, layers, head)
        record_graphs(runner, runtime, options, options.max_num_seqs, ranks.report, ranks.watch)
        return Rank(runtime, runner, (group,))

    def own_device(self, rendezvous: Rendezvous) -> torch.device:
        """Return the rank's device, and make it the process's current one."""
        device = rendezvous.device(torch.device(self.device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def make_sampler(self, runtime: Runtime, options: GraphOptions) -> Sampler:
        """Make the sampler; only rank 0's sampler knows the parameters of the requests."""
        return make_sampler(runtime, options)

    def load(self, options: GraphOptions, device: torch.device, build: BuildModel) -> Runtime:
        """Load one rank's share of the model, built by `build`: see stage D's `load_runtime`."""
        source, dtype = resolve(self.model), getattr(torch, self.dtype)
        return load_runtime(source, options, device, dtype, self.seed, build, choose_layers)


@dataclass(frozen=True)
class Rank:
    """One rank's share of an engine."""

    runtime: Runtime
    runner: RankRunner
    groups: tuple[RankGroup, ...]  # their memory is waited for when the engine ends

    def execute_command(self, message: bytes) -> None:
        """Execute a step that rank 0 sent."""
        self.runner.ranks.begin_command()
        command = StepCommand.decode(message)
        self.runner.buffers.unpack(command.shape, command.data)
        run, shape = self.choose_run(command.shape)
        self.runner.execute(run, shape, np.empty(command.num_live, np.int64), command.needs)

    def choose_run(self, shape: StepShape) -> tuple[Run, StepShape]:
        """Choose the forward for a step that rank 0 sent: the same as on rank 0."""
        forward, shape = self.runner.choose_forward(shape)
        return forward.run, shape


def build_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Build a worker's share of the engine; returns the function that executes rank 0's commands."""
    return Job(**json.loads(message)).build(rendezvous).execute_command


def build_ranks(
    job: Job, config: ModelConfig, build_worker: Build = build_worker, batch: MakeBatch = InputBatch
) -> Rank:
    """Build the engine's model and runner on all ranks. Returns on rank 0 only; the others execute its commands.

    Args:
        job: describes what every rank builds.
        config: the whole model's shape.
        build_worker: a module-level function, which a worker calls with the encoded job.
        batch: makes rank 0's builder of inputs.

    Raises:
        ValueError: see `Job.check` and `start_ranks`.
        WorkerError: a worker failed while starting.
    """
    job.check(config)
    rendezvous, workers = job.start(build_worker)
    with workers.needed():
        workers.send(job.encode())
        return job.build(rendezvous, workers, batch)


def end_ranks(workers: Workers, groups: Sequence[RankGroup], runner: weakref.ref[StepRunner]) -> None:
    """End the workers, release the graphs and wait for NCCL's memory. A no-op in a fork of rank 0's process."""
    workers.close()
    if not workers.is_owner:
        return  # the graphs belong to another process
    if (left := runner()) is not None:  # else it has been collected
        left.release()
    for group in groups:
        group.wait_released(RELEASE_SECONDS)


@dataclass(frozen=True)
class StepCommand:
    """A step that rank 0 tells the other ranks to execute."""

    shape: StepShape
    num_live: int  # sampling rows that are not padding
    needs: int  # flags of the sampler features that these rows use
    data: bytes  # the packed input

    _HEADER = struct.Struct("<10q")

    def encode(self) -> bytes:
        return self._HEADER.pack(*self.shape, self.num_live, self.needs) + self.data

    @classmethod
    def decode(cls, message: bytes) -> StepCommand:
        """Decode a step; raise `struct.error` or `ValueError` for anything else."""
        *sizes, num_live, needs = cls._HEADER.unpack_from(message)
        shape, data = StepShape(*sizes), message[cls._HEADER.size :]
        if len(data) != shape.num_bytes:
            raise ValueError(f"a step of {shape.num_bytes} bytes came with {len(data)}")
        return cls(shape, num_live, needs, data)


class RankRunner(StepRunner):
    """Runs steps on several ranks: rank 0 schedules them, and all ranks execute them.

    Args:
        ranks: rank 0 sends its steps to the others.
        batch, buffers, sampler, layers, head: as of `StepRunner`.
    """

    def __init__(
        self, ranks: Ranks, batch: InputBatch, buffers: StepBuffers, sampler: Sampler, layers: Layers, head: StepHead
    ) -> None:
        super().__init__(batch, buffers, sampler, layers, head)
        self.ranks = ranks

    def execute(self, run: Run, shape: StepShape, sample_slots: np.ndarray, needs: int) -> parts.InFlight:
        """Execute this rank's part of a step; rank 0 sends it to the others first."""
        if self.ranks.workers is None:
            return super().execute(run, shape, sample_slots, needs)
        command = StepCommand(shape, len(sample_slots), needs, self.buffers.packed(shape))
        with self.ranks.in_step(command.encode()):
            return super().execute(run, shape, sample_slots, needs)


class Ranks:
    """The ranks of an engine: sends commands, counts them, and watches the other ranks.

    Args:
        group: the ranks that share a model, or a stage of one.
        workers: rank 0's handle on all others; None on the others.

    Attributes:
        number: of the current command, or of the last one.
    """

    def __init__(self, group: RankGroup, workers: Workers | None) -> None:
        self.group, self.workers = group, workers
        self.number = 0
        self._sampling_error: BaseException | None = None  # of this step, on rank 0

    def begin_command(self) -> None:
        """Count a command, and check that all ranks begin the same one."""
        self.number += 1
        self.group.agree_on(self.number)

    @contextmanager
    def in_step(self, command: bytes | None) -> Iterator[None]:
        """Send the other ranks a command, if there is one, and execute rank 0's part: see `Workers.in_step`.

        Raises:
            WorkerError: a rank, perhaps this one, died or failed.
            Exception: a replaced sampler's error, once all ranks have ended the step.
        """
        assert self.workers is not None
        self._sampling_error = None
        with self.workers.in_step(command):
            if command is not None:
                self.begin_command()
            yield
        if self._sampling_error is not None:
            self.workers.check()
            raise self._sampling_error

    def raise_after_step(self, error: BaseException) -> None:
        """Raise a replaced sampler's error once all ranks have ended the step."""
        self._sampling_error = error

    def watched(self, step: InFlight) -> InFlight | WatchedInFlight:
        """Return the step, wrapped on rank 0 so that `wait` also checks the other ranks."""
        return step if self.workers is None else WatchedInFlight(step, self.workers)

    def watch(self, record: Recorder) -> Recorder:
        """Return a recorder that also checks the other ranks, because recording takes seconds and one may die."""

        def checked(body: Body) -> Recorded:
            if self.workers is not None:
                self.workers.check()
            return record(body)

        return checked

    def report(self, line: str) -> None:
        """Print a line on rank 0 only."""
        if self.group.rank == 0:
            print(line, file=sys.stderr)


class RankHead(Head):
    """The LM head, split by vocabulary over the ranks, and a sampler that all ranks run together.

    Args:
        model, vocab_size, dtype, sampler, tokens: as of `Head`.
        ranks: if their group has only one rank, the head is whole.
    """

    def __init__(
        self,
        model: DecoderModel,
        vocab_size: int,
        dtype: torch.dtype,
        sampler: Sampler,
        tokens: LastTokens,
        ranks: Ranks,
    ) -> None:
        super().__init__(model, vocab_size, dtype, sampler, tokens)
        self.ranks = ranks
        self._sample_shards = ShardSampler(model.lm_head) if ranks.group.size > 1 else None
        if self._sample_shards is not None:  # it has no whole row of logits
            self.completes, self.makes_logits = ~RANDOM, False

    def choose(self, output: StepOutput, rows: SamplerInput) -> StepOutput:
        """Choose a token for every row of the final states, the same on all ranks."""
        if self._sample_shards is None:
            return super().choose(output, rows)
        assert output.hidden is not None  # with a split vocabulary no forward produces logits
        ids, told = self._sample_shards(output.hidden, rows.temperatures, rows.noise_keys)
        return output._replace(logits=None, ids=ids, told=told)

    def finish(
        self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape, sample_slots: np.ndarray, needs: int
    ) -> InFlight | WatchedInFlight:
        return self.ranks.watched(super().finish(output, inputs, shape, sample_slots, needs))

    def complete(self, output: StepOutput, rows: SamplerInput, sample_slots: np.ndarray) -> SampledTokens:
        """Sample rows that are not greedy or temperature-only on rank 0, and broadcast the ids."""
        count = len(sample_slots)
        if self._sample_shards is not None:
            assert output.hidden is not None
            whole = self.model.compute_logits(output.hidden[:count])
            ids = torch.zeros(count, dtype=torch.int64, device=self.device)
            output = output._replace(logits=whole, ids=ids, told=ids)
        assert output.logits is not None and output.ids is not None
        sampled = SampledTokens(output.ids[:count], output.ids[:count])
        try:
            if self.ranks.group.rank == 0:
                if self._sample_shards is not None:
                    ids, told = self.sampler.choose(output.logits, rows)
                    output = output._replace(ids=ids, told=told)
                sampled = super().complete(output, rows, sample_slots)
        except BaseException as error:  # a replaced sampler may raise; all ranks get zeros and end the step
            self.ranks.raise_after_step(error)
        self.ranks.group.broadcast(sampled.ids)
        return sampled


@dataclass(frozen=True)
class WatchedInFlight:
    """A step on several ranks. If a rank has died, the step's tokens are invalid, even if they have arrived."""

    step: InFlight
    workers: Workers

    def wait(self) -> parts.Sampled:
        """Wait for the step's tokens.

        Raises:
            WorkerError: a rank died or failed, or the step took too long.
        """
        with self.workers.awaited():
            if self.step.arrived is not None:
                self.step.arrived.synchronize()  # without the GIL; ending the waits on the GPU ends it too
        self.workers.check()
        sampled = self.step.wait()
        self.workers.check()
        return sampled
