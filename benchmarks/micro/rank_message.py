"""What rank 0 tells each other rank per decode step: how many bytes, and what packing and sending them costs.

The host's part of a step is real, as in `step_cost`, and so is the command, padded as for a CUDA graph and sent to
another process. Only the model is left out. CPU time of rank 0's thread: other programs on the machine count for
little. *Share*: of all that the thread does in a step.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.micro import caption
from benchmarks.micro.step_cost import MAX_MODEL_LEN, NullRunner, make_engine
from benchmarks.text import markdown
from stage_f_graph_tp.async_runner import InFlight
from stage_f_graph_tp.cuda_graph import DecodeGraphs, capture_sizes
from stage_f_graph_tp.rank_runner import StepCommand
from stage_f_graph_tp.step_input import StepInput, StepShape

README, MARKERS = "stage_f_graph_tp/tensor_parallel", ("rank-message",)
STEPS, REPEATS = 200, 7
RECEIVER = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
try:
    while True:
        connection.recv_bytes()
except EOFError:
    pass
"""


class SendingRunner(NullRunner):
    """Builds every step's input, padded to a graph's size, and sends it as rank 0 does."""

    def __init__(self, connection: Connection, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        super().__init__(max_num_seqs, max_num_batched_tokens)
        self.graphs = DecodeGraphs(capture_sizes(max_num_seqs), self.batch.max_blocks, MAX_MODEL_LEN, max_num_seqs)
        self.connection = connection
        self.seconds = 0.0  # of this thread's CPU time, for packing and sending
        self.bytes_sent = self.table_bytes = 0

    def next_host(self, exact: StepShape) -> tuple[StepShape, StepInput]:
        shape = self.graphs.padded(exact)
        host = self.buffers.next_host(shape)
        if shape is not exact:
            self.graphs.pad(host, exact.num_seqs)
        self.table_bytes += host.block_tables.nbytes
        return shape, host

    def execute_step(self, shape: StepShape, sample_slots: np.ndarray, needs: int) -> InFlight:
        start = time.thread_time()
        message = StepCommand(shape, len(sample_slots), needs, self.buffers.packed(shape)).encode()
        self.connection.send_bytes(message)
        self.seconds += time.thread_time() - start
        self.bytes_sent += len(message)
        return super().execute_step(shape, sample_slots, needs)


def measure() -> dict:
    """1, 32 and 256 sequences."""
    return {"rows": [measure_row(n, STEPS, REPEATS) for n in (1, 32, 256)]}


def measure_row(num_sequences: int, steps: int, repeats: int) -> dict[str, object]:
    """Bytes and seconds of CPU time per decode step, `repeats` runs of `steps` steps."""
    own, other = socket.socketpair()
    with other:
        receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, str(other.fileno())], pass_fds=[other.fileno()])
    with Connection(own.detach()) as connection:
        runner = SendingRunner(connection, 512, 16384)
        engine = make_engine(num_sequences, 300, 0.6, runner)
        samples = []
        for _ in range(repeats):
            runner.seconds, runner.bytes_sent, runner.table_bytes = 0.0, 0, 0
            start = time.thread_time()
            for _ in range(steps):
                engine.step()
            samples.append({"step": (time.thread_time() - start) / steps, "send": runner.seconds / steps})
    receiver.wait()
    sizes = {"bytes": runner.bytes_sent // steps, "table_bytes": runner.table_bytes // steps}
    return {"sequences": num_sequences, "samples": samples, **sizes}


def table(results: list[dict]) -> dict[str, list[str]]:
    """One line per number of running sequences."""
    body = []
    for row in results[0]["rows"]:
        micros = [1e6 * sample["send"] for sample in row["samples"]]
        share = statistics.median(sample["send"] / sample["step"] for sample in row["samples"])
        sizes = f"{row['bytes']:,}", f"{row['table_bytes']:,}"
        body.append([row["sequences"], *sizes, f"{statistics.median(micros):.0f}", f"{100 * share:.0f} %"])
    heads = ["running sequences", "bytes per step", "of them block tables", "pack and send, µs", "share of the step"]
    return {"rank-message": [*markdown(heads, body), "", caption(results[0])]}
