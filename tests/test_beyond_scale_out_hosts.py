"""Ranks on two hosts: the tokens of one rank, and an error within seconds when a host disappears.

The hosts are network namespaces of this machine (`benchmarks/two_hosts.py`), made and removed by the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import stage_e_batching
from benchmarks import two_hosts
from stage_a_naive.sampling import SamplingParams

PROMPTS = [[5, 6, 7], [(i * 37) % 4000 + 1 for i in range(40)]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SECONDS = 30  # from the disappearance to the end of both processes; the ranks' own limit is minutes

pytestmark = pytest.mark.skipif(two_hosts.missing() is not None, reason=str(two_hosts.missing()))

RANK = f"""
import json, sys
from beyond.scale_out import LLM, SamplingParams
from stage_f_graph_tp.tensor_parallel.watch import rendezvous

rendezvous.HOST_SECONDS = 2
llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=64, **json.loads(sys.argv[1]))
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
while True:
    outputs = llm.generate({PROMPTS}, greedy, False)
    print("tokens", json.dumps([output["token_ids"] for output in outputs]), flush=True)
"""


def lines_of(process: subprocess.Popen) -> queue.SimpleQueue[str | None]:
    """A process's output, line by line; None at its end."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def rest_of(lines: queue.SimpleQueue[str | None], deadline: float) -> str:
    """What is still to come, which must end before the deadline (monotonic clock)."""
    found = []
    while (line := lines.get(timeout=max(0.01, deadline - time.monotonic()))) is not None:
        found.append(line)
    return "".join(found)


@pytest.mark.parametrize(
    "option", ["pipeline_parallel_size", pytest.param("tensor_parallel_size", marks=pytest.mark.slow)]
)
def test_two_hosts_give_one_ranks_tokens_and_one_that_disappears_is_an_error_on_the_other(option, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    single = stage_e_batching.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=64)
    expected = [output["token_ids"] for output in single.generate(PROMPTS, GREEDY, False)]
    environment = os.environ | {"PYTHONPATH": str(Path(two_hosts.ROOT))}
    with two_hosts.two_hosts() as hosts:
        processes = [
            hosts.start(
                host,
                two_hosts.torchrun(host, [str(script), json.dumps({option: 2})]),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for host in range(2)
        ]
        try:
            outputs = [lines_of(process) for process in processes]
            for _ in range(3):
                while not (line := outputs[0].get(timeout=100) or "the end").startswith("tokens"):
                    assert line != "the end"
                assert json.loads(line.removeprefix("tokens")) == expected
            assert min(map(hosts.bytes_sent, range(2))) > 0
            hosts.pull_the_cable()
            deadline = time.monotonic() + SECONDS
            left = [rest_of(lines, deadline) for lines in outputs]
            assert "WorkerError: rank 1 of 2 died" in left[0], left[0]
            assert "error: no sign of life from rank 0's host" in left[1], left[1]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert not any(name in subprocess.check_output(["ip", "netns"], text=True) for name in hosts.names)
