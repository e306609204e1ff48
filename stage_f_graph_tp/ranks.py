"""An engine on several ranks: how they execute a step, who samples, and how each rank builds its own runner.

Rank 0 prepares each step, sends its packed input to the other ranks, and all execute it alike. Greedy and at a plain
temperature, all ranks sample together, each among its own tokens (`tensor_parallel/shard_sampling.py`), inside the
graph too. A step that needs whole rows of logits is sampled by rank 0, which alone knows the requests, and the ids are
broadcast on the device.
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
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_e_batching import parts
from stage_e_batching.llm import make_sampler
from stage_e_batching.sampler import RANDOM, SampledTokens, Sampler, SamplerInput
from stage_f_graph_tp.compose import make_buffers, record_graphs
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

MakeBatch = Callable[[int, int, int], InputBatch]  # of max_num_seqs, max_model_len, block_size


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
        """As rank 0's first message."""
        return json.dumps(asdict(self)).encode()

    @property
    def num_ranks(self) -> int:
        return self.options["tensor_parallel_size"]

    @property
    def asked(self) -> str:
        """The options that ask for this number of ranks, as an error names them."""
        return f"tensor_parallel_size={self.num_ranks}"

    def start(self, build_worker: Build) -> tuple[Rendezvous, Workers]:
        """Start the other ranks: see `start_ranks`."""
        return start_ranks(self.num_ranks, self.asked, torch.device(self.device), build_worker)

    def build(self, rendezvous: Rendezvous, workers: Workers | None = None, batch: MakeBatch = InputBatch) -> Rank:
        """Build one rank's share of the engine. The KV pool has the number of blocks that every rank has room for.

        Args:
            workers: rank 0's handle on the others; None on the others.
            batch: makes the builder of inputs, on rank 0, where they are built.
        """
        options = self.options_class(**self.options)
        device = self.own_device(rendezvous)
        group = RankGroup(rendezvous, device, workers, options.uses("one_shot_all_reduce"), options.uses("pdl"))
        runtime = self.load(options, device, partial(build_sharded_model, group=group))
        group.gather("loaded")  # a collective may only be entered when every rank will enter it
        group.connect()
        sampler = self.make_sampler(runtime, options)
        num_blocks = min(map(int, group.gather("blocks", str(choose_num_blocks(runtime, options)))))
        ranks = Ranks(group, workers)
        inputs = batch(options.max_num_seqs, runtime.max_model_len, runtime.block_size)
        tokens = LastTokens(options.max_num_seqs, device)
        runner = RankRunner(
            ranks,
            inputs,
            make_buffers(runtime, options, inputs),
            sampler,
            Layers(runtime.model, runtime.make_pool(num_blocks), tokens),
            RankHead(runtime.model, runtime.config.vocab_size, runtime.dtype, sampler, tokens, ranks),
        )
        record_graphs(runner, runtime, options, options.max_num_seqs, ranks.report, ranks.watch)
        return Rank(runtime, runner, (group,))

    def own_device(self, rendezvous: Rendezvous) -> torch.device:
        """Return the rank's device, which is the process's current one from here on."""
        device = rendezvous.device(torch.device(self.device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def make_sampler(self, runtime: Runtime, options: GraphOptions) -> Sampler:
        """Make the sampler, of which only rank 0's knows what requests ask for."""
        return make_sampler(runtime, options)

    def load(self, options: GraphOptions, device: torch.device, build: Callable[..., DecoderModel]) -> Runtime:
        """Load one rank's share of the model, which `build` makes: see stage D's `load_runtime`."""
        source, dtype = resolve(self.model), getattr(torch, self.dtype)
        return load_runtime(source, options, device, dtype, self.seed, build, choose_layers)


@dataclass(frozen=True)
class Rank:
    """One rank's share of an engine."""

    runtime: Runtime
    runner: RankRunner
    groups: tuple[RankGroup, ...]  # whose memory is waited for when the engine ends

    def execute_command(self, message: bytes) -> None:
        """Execute a step that rank 0 sent."""
        self.runner.ranks.begin_command()
        command = StepCommand.decode(message)
        self.runner.buffers.unpack(command.shape, command.data)
        run, shape = self.choose_run(command.shape)
        self.runner.execute(run, shape, np.empty(command.num_live, np.int64), command.needs)

    def choose_run(self, shape: StepShape) -> tuple[Run, StepShape]:
        """Choose what runs a step that rank 0 sent: what rank 0 chose too."""
        forward, shape = self.runner.choose_forward(shape)
        return forward.run, shape


def build_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Build a worker's share of the engine; returns what executes rank 0's commands."""
    return Job(**json.loads(message)).build(rendezvous).execute_command


def build_ranks(
    job: Job, config: ModelConfig, build_worker: Build = build_worker, batch: MakeBatch = InputBatch
) -> Rank:
    """Build the engine's model and runner on all ranks. Returns on rank 0 only; the others execute its commands.

    Args:
        job: what every rank builds.
        config: the whole model's shape.
        build_worker: a function of a module, which a worker calls with the encoded job.
        batch: makes rank 0's builder of inputs.

    Raises:
        ValueError: see `check_divisible` and `start_ranks`.
        WorkerError: a worker failed while starting.
    """
    check_divisible(config, job.options["tensor_parallel_size"])
    rendezvous, workers = job.start(build_worker)
    with workers.needed():
        workers.send(job.encode())
        return job.build(rendezvous, workers, batch)


def end_ranks(workers: Workers, groups: Sequence[RankGroup], runner: weakref.ref[StepRunner]) -> None:
    """End the workers, then release the graphs and wait for NCCL's memory. Not in a fork of rank 0's process."""
    workers.close()
    if not workers.is_owner:
        return  # the graphs are another process's
    if (left := runner()) is not None:  # else it has been collected
        left.release()
    for group in groups:
        group.wait_released(RELEASE_SECONDS)


@dataclass(frozen=True)
class StepCommand:
    """What rank 0 tells the others to execute."""

    shape: StepShape
    num_live: int  # sampling rows that are not padding
    needs: int  # what these rows need of the sampler
    data: bytes  # the packed input

    _HEADER = struct.Struct("<10q")

    def encode(self) -> bytes:
        return self._HEADER.pack(*self.shape, self.num_live, self.needs) + self.data

    @classmethod
    def decode(cls, message: bytes) -> StepCommand:
        """Decode a step; raise `struct.error` or `ValueError` for what is none."""
        *sizes, num_live, needs = cls._HEADER.unpack_from(message)
        shape, data = StepShape(*sizes), message[cls._HEADER.size :]
        if len(data) != shape.num_bytes:
            raise ValueError(f"a step of {shape.num_bytes} bytes came with {len(data)}")
        return cls(shape, num_live, needs, data)


class RankRunner(StepRunner):
    """Runs steps on several ranks: rank 0's scheduler decides them, and all ranks execute them.

    Args:
        ranks: rank 0 sends them its steps.
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
    """Several ranks: what rank 0 does around a step, and what all count.

    Args:
        group: the ranks that share a model, or a stage of one.
        workers: rank 0's handle on all others; None on the others.

    Attributes:
        number: of the command that is executed, or was last.
    """

    def __init__(self, group: RankGroup, workers: Workers | None) -> None:
        self.group, self.workers = group, workers
        self.number = 0
        self._sampling_error: BaseException | None = None  # of this step, on rank 0

    def begin_command(self) -> None:
        """Count a command. All of its ranks begin it, or there is an error."""
        self.number += 1
        self.group.agree_on(self.number)

    @contextmanager
    def in_step(self, command: bytes | None) -> Iterator[None]:
        """Send the others a command, if there is one, and execute rank 0's part in the block: see `Workers.in_step`.

        Raises:
            WorkerError: a rank died or failed, this one too.
            Exception: a replaced sampler's, when all ranks have ended the step.
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
        """Let what a replaced sampler raised end the step when all ranks have ended it."""
        self._sampling_error = error

    def watched(self, step: InFlight) -> InFlight | WatchedInFlight:
        """Return a step whose `wait`, on rank 0, also looks after the other ranks."""
        return step if self.workers is None else WatchedInFlight(step, self.workers)

    def watch(self, record: Recorder) -> Recorder:
        """Return a recorder that checks the other ranks: recording takes seconds, and a rank that died ends nothing."""

        def checked(body: Body) -> Recorded:
            if self.workers is not None:
                self.workers.check()
            return record(body)

        return checked

    def report(self, line: str) -> None:
        """Print a line, on the first of the ranks."""
        if self.group.rank == 0:
            print(line, file=sys.stderr)


class RankHead(Head):
    """The LM head, of which each rank has a part of the vocabulary, and a sampler that all ranks run together.

    Args:
        model, vocab_size, dtype, sampler, tokens: as of `Head`.
        ranks: with one rank in their group, the head is whole.
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
        if self._sample_shards is not None:  # which has no whole row of logits
            self.completes, self.makes_logits = ~RANDOM, False

    def choose(self, output: StepOutput, rows: SamplerInput) -> StepOutput:
        """Choose a token for every row of the final states, the same on all ranks."""
        if self._sample_shards is None:
            return super().choose(output, rows)
        assert output.hidden is not None  # no forward of a part of the vocabulary makes logits
        ids, told = self._sample_shards(output.hidden, rows.temperatures, rows.noise_keys)
        return output._replace(logits=None, ids=ids, told=told)

    def finish(
        self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape, sample_slots: np.ndarray, needs: int
    ) -> InFlight | WatchedInFlight:
        return self.ranks.watched(super().finish(output, inputs, shape, sample_slots, needs))

    def complete(self, output: StepOutput, rows: SamplerInput, sample_slots: np.ndarray) -> SampledTokens:
        """Sample on rank 0 what asks for more than a plain temperature, and broadcast the ids."""
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
    """A step on several ranks. If one of them died, the step's tokens are invalid, although they may have arrived."""

    step: InFlight
    workers: Workers

    def wait(self) -> parts.Sampled:
        """Wait for the step's tokens.

        Raises:
            WorkerError: a rank died or failed, or the step took too long.
        """
        with self.workers.awaited():
            if self.step.arrived is not None:
                self.step.arrived.synchronize()  # without the GIL; what ends the waits on the GPU ends it too
        self.workers.check()
        sampled = self.step.wait()
        self.workers.check()
        return sampled
