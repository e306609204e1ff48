"""Ranks that torchrun starts, on two hosts: one rank's tokens, and an error within seconds when a host disappears.

The hosts are network namespaces of this machine (`benchmarks/two_hosts.py`), made and removed by the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import stage_e_batching
from benchmarks import two_hosts
from beyond import LLM
from beyond.scale_out import hosts
from beyond.scale_out.hosts import HostsRendezvous, accept_workers, connect_to_rank_0
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp.tensor_parallel import WorkerError

PROMPTS = [[5, 6, 7], [(i * 37) % 4000 + 1 for i in range(40)]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SECONDS = 30  # from the disappearance to the end of both processes; the ranks' own limit is minutes

RANK = f"""
import json, sys
from beyond.scale_out import LLM, SamplingParams, hosts

hosts.HOST_SECONDS = 2
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


@pytest.mark.skipif(two_hosts.missing() is not None, reason=str(two_hosts.missing()))
@pytest.mark.parametrize(
    "option", ["pipeline_parallel_size", pytest.param("tensor_parallel_size", marks=pytest.mark.slow)]
)
def test_two_hosts_give_one_ranks_tokens_and_one_that_disappears_is_an_error_on_the_other(option, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    single = stage_e_batching.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=64)
    expected = [output["token_ids"] for output in single.generate(PROMPTS, GREEDY, False)]
    environment = os.environ | {"PYTHONPATH": str(Path(two_hosts.ROOT))}
    with two_hosts.two_hosts() as both:
        processes = [
            both.start(
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
            assert min(map(both.bytes_sent, range(2))) > 0
            both.pull_the_cable()
            deadline = time.monotonic() + SECONDS
            left = [rest_of(lines, deadline) for lines in outputs]
            assert "WorkerError: rank 1 of 2 died" in left[0], left[0]
            assert "error: no reply from rank 0's host" in left[1], left[1]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert not any(name in subprocess.check_output(["ip", "netns"], text=True) for name in both.names)


def test_under_torchrun_the_number_of_processes_is_checked_and_address_and_gpu_are_this_machines(monkeypatch):
    ours = {"TORCHELASTIC_RUN_ID": "1", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    for name, value in (ours | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="tensor_parallel_size=4, but torchrun started 8 processes"):
        LLM("random:qwen2-tiny", device="cpu", tensor_parallel_size=4)
    place = HostsRendezvous(dist.HashStore(), 5, 8)
    assert place.device(torch.device("cuda")) == torch.device("cuda", 1)
    assert place.device(torch.device("cpu")) == torch.device("cpu")
    assert place.own_address == "127.0.0.1"


def test_ranks_that_torchrun_starts_again_read_nothing_of_those_that_failed(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(1) as pool:
        for attempt in "first", "second":
            stores = [dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(2)]
            ranks = [HostsRendezvous(store, rank, 2) for rank, store in enumerate(stores)]
            early = pool.submit(connect_to_rank_0, ranks[1])
            with pytest.raises(TimeoutError):  # in the second attempt it finds the address of the first one's rank 0
                early.result(0.3)
            zero, connections = accept_workers(ranks[0])
            one, _ = early.result(30)
            assert list(connections) == [1] and not zero.store.check(["ready/0"])
            zero.store.set("ready/0", attempt)
            assert one.store.get("ready/0").decode() == attempt


def test_a_process_of_torchruns_that_does_not_connect_is_an_error(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(hosts, "START_SECONDS", 0.1)
    with pytest.raises(WorkerError, match="the other ranks did not connect within 0 s"):
        accept_workers(HostsRendezvous(dist.HashStore(), 0, 2))


def test_torchrun_starts_the_same_engine_and_answers_once():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "beyond", "--tensor-parallel-size", "2", "--device", "cpu", "--max-tokens", "16"]
    question = "What is a KV cache?"
    process = subprocess.Popen(
        [*command, "--prompt", question], cwd=two_hosts.ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, _ = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
    llm = stage_e_batching.LLM("tutor", device="cpu")
    conversation = [{"role": "user", "content": question}]
    [output] = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=16), False)
    assert stdout.count(f"[answer]\n{output['text']}") == 1 and stdout.count("[performance]") == 1
