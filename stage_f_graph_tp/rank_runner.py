"""The runner of an engine on several ranks, and how each rank builds its own.

Rank 0 prepares each step, sends its packed input to the other ranks, and all execute it alike. Greedy and at a plain
temperature, all ranks sample together, each among its own tokens (`tensor_parallel/shard_sampling.py`), inside the
graph too. A step that needs whole rows of logits is sampled by rank 0, which alone knows the requests, and the ids are
broadcast on the device.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from stage_a_naive.checkpoints.loading import resolve
from stage_d_paged.config import ModelConfig
from stage_d_paged.kv_cache import KVCache
from stage_d_paged.runtime import Runtime, choose_num_blocks, load_runtime
from stage_e_batching.engine import Sampled
from stage_e_batching.llm import make_sampler
from stage_e_batching.sampler import RANDOM, SampledTokens, Sampler, SamplerInput
from stage_f_graph_tp.async_runner import InFlight, StepResult
from stage_f_graph_tp.cuda_graph import Body, Recorder, StepGraphs
from stage_f_graph_tp.kernels import choose_layers
from stage_f_graph_tp.model_runner import GraphModelRunner
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.step_input import StepShape
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

    def build(self, rendezvous: Rendezvous, workers: Workers | None = None) -> tuple[Runtime, RankRunner]:
        """Build one rank's share of the engine. The KV pool has the number of blocks that every rank has room for."""
        options = self.options_class(**self.options)
        device = rendezvous.device(torch.device(self.device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group = RankGroup(rendezvous, device, workers)
        runtime = self.load(options, device, group)
        group.gather("loaded")  # a collective may only be entered when every rank will enter it
        group.connect()
        sampler = make_sampler(runtime, options)
        num_blocks = min(map(int, group.gather("blocks", str(choose_num_blocks(runtime, options)))))
        return runtime, RankRunner(runtime, runtime.make_pool(num_blocks), sampler, options, group, workers)

    def load(self, options: GraphOptions, device: torch.device, group: RankGroup) -> Runtime:
        """Load one rank's share of the model."""
        build = partial(build_sharded_model, group=group)
        patch = partial(choose_layers, fused=options.fused)
        return load_runtime(resolve(self.model), options, device, getattr(torch, self.dtype), self.seed, build, patch)


def build_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Build a worker's share of the engine; returns what executes rank 0's commands."""
    return Job(**json.loads(message)).build(rendezvous)[1].execute_command


def build_ranks(job: Job, config: ModelConfig, build_worker: Build = build_worker) -> tuple[Runtime, RankRunner]:
    """Build the engine's model and runner on all ranks. Returns on rank 0 only; the others execute its commands.

    Args:
        job: what every rank builds.
        config: the whole model's shape.
        build_worker: a function of a module, which a worker calls with the encoded job.

    Raises:
        ValueError: see `check_divisible` and `start_ranks`.
        WorkerError: a worker failed while starting.
    """
    check_divisible(config, job.options["tensor_parallel_size"])
    rendezvous, workers = start_ranks(job.num_ranks, job.asked, torch.device(job.device), build_worker)
    with workers.needed():
        workers.send(job.encode())
        return job.build(rendezvous, workers)


@dataclass(frozen=True)
class StepCommand:
    """What rank 0 tells the others to execute."""

    shape: StepShape
    num_live: int  # sampling rows that are not padding
    needs: int  # what these rows need of the sampler
    data: bytes  # the packed input

    _HEADER = struct.Struct("<9q")

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


class RankRunner(GraphModelRunner):
    """Runs this rank's share of every step.

    Args:
        runtime, kv_cache, sampler, options: see `GraphModelRunner`.
        group: the ranks.
        workers: rank 0's handle on the others; None on the others.
    """

    def __init__(
        self,
        runtime: Runtime,
        kv_cache: KVCache,
        sampler: Sampler,
        options: GraphOptions,
        group: RankGroup,
        workers: Workers | None,
    ) -> None:
        self.group = group
        self.workers = workers
        self._number = 0  # of the command that is executed, or was last
        self._sampling_error: BaseException | None = None  # of this step, on rank 0
        self._sample_shards = ShardSampler(runtime.model.lm_head) if group.size > 1 else None
        if self._sample_shards is not None:  # which has no whole row of logits
            self.beyond_graphs, self.logits_in_graphs = ~RANDOM, False
        super().__init__(runtime, kv_cache, sampler, options)

    def execute_command(self, message: bytes) -> None:
        """Execute a step that rank 0 sent."""
        self.begin_command()
        command = StepCommand.decode(message)
        self.buffers.unpack(command.data)
        self.execute_step(command.shape, np.empty(command.num_live, np.int64), command.needs)

    def begin_command(self) -> None:
        """Count a command. All of its ranks begin it, or there is an error."""
        self._number += 1
        self.group.agree_on(self._number)

    def execute_step(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        """As one rank does; rank 0 sends the step to the others first."""
        if self.workers is None:
            return super().execute_step(shape, sample_slots, needs)
        command = StepCommand(shape, len(sample_slots), needs, self.buffers.packed(shape))
        with self.in_step(command.encode()):
            step = super().execute_step(shape, sample_slots, needs)
        return self.watched(step)

    def watched(self, step: InFlight) -> InFlight:
        """Return the same step, whose `wait` on rank 0 also looks after the other ranks."""
        assert self.workers is not None
        return WatchedInFlight(step.sampled, step.host_ids, step.arrived, self.workers)

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

    def choose(self, hidden: Tensor, rows: SamplerInput) -> tuple[Tensor, Tensor | None]:
        """Choose a token for every row of the final states, the same on all ranks."""
        if self._sample_shards is None:
            return super().choose(hidden, rows)
        return self._sample_shards(hidden, rows.temperatures, rows.noise_keys), None

    def complete(self, result: StepResult, rows: SamplerInput, sample_slots: np.ndarray) -> SampledTokens:
        """Sample on rank 0 what asks for more than a plain temperature, and broadcast the ids."""
        if self._sample_shards is not None:
            whole = self.model.compute_logits(result.hidden[: len(sample_slots)])
            result = replace(result, logits=whole, ids=torch.zeros(len(whole), dtype=torch.int64, device=self.device))
        sampled = SampledTokens(result.ids[: len(sample_slots)])
        try:
            if self.group.rank == 0:
                if self._sample_shards is not None:
                    result = replace(result, ids=self.sampler.choose(whole, rows))
                sampled = super().complete(result, rows, sample_slots)
        except BaseException as error:  # a replaced sampler may raise; all ranks get zeros and end the step
            self._sampling_error = error
        self.group.broadcast(sampled.ids)
        return sampled

    def release(self) -> None:
        assert self.workers is not None
        if not self.workers.is_owner:
            return  # the graphs are another process's
        super().release()
        self.group.wait_released(RELEASE_SECONDS)

    def _capture(self, record: Recorder, graphs: StepGraphs, name: str, body_of: Callable[[StepShape], Body]) -> None:
        def checked(shape: StepShape) -> Body:
            if self.workers is not None:
                self.workers.check()  # recording takes seconds, and a rank that died does not end it
            return body_of(shape)

        super()._capture(record, graphs, name, checked)

    def _report(self, line: str) -> None:
        if self.group.rank == 0:
            super()._report(line)


@dataclass(frozen=True)
class WatchedInFlight(InFlight):
    """A step on several ranks. If one of them died, the step's tokens are invalid, although they may have arrived."""

    workers: Workers | None = None

    def wait(self) -> Sampled:
        """Wait for the step's tokens.

        Raises:
            WorkerError: a rank died or failed, or the step took too long.
        """
        assert self.workers is not None
        with self.workers.awaited():
            if self.arrived is not None:
                self.arrived.synchronize()  # without the GIL; what ends the waits on the GPU ends it too
        self.workers.check()
        sampled = super().wait()
        self.workers.check()
        return sampled
