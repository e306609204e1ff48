"""Several ranks behind one `LLM`: the tokens of one rank, and errors instead of hangs when a rank fails."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_stage_f_graphs import EagerRecorder

import stage_e_batching
import stage_f_graph_tp
from labs.tests.forks import fork_worker
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.sampler import SampledTokens
from stage_f_graph_tp import rank_runner
from stage_f_graph_tp.cuda_graph import StepGraphs
from stage_f_graph_tp.model_runner import GraphModelRunner
from stage_f_graph_tp.rank_runner import Job, RankRunner, StepCommand, WatchedInFlight
from stage_f_graph_tp.step_input import StepShape
from stage_f_graph_tp.tensor_parallel import rendezvous as rendezvous_module
from stage_f_graph_tp.tensor_parallel import workers as workers_module
from stage_f_graph_tp.tensor_parallel.rank_group import RankGroup, finish_or_raise
from stage_f_graph_tp.tensor_parallel.rendezvous import Rendezvous, open_rendezvous
from stage_f_graph_tp.tensor_parallel.workers import WorkerError, Workers, interrupts_held

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 17, 9, 50)]
PROMPTS.append(PROMPTS[4][:40] + [7, 8, 9])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SECONDS = 30  # an error must come much sooner than the ranks' limit of minutes (`ANSWER_SECONDS`)

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")


def ids(outputs) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def ranked(size: int = 2, model: str = "random:qwen2-tiny", **options: object) -> stage_f_graph_tp.LLM:
    return stage_f_graph_tp.LLM(model, device="cpu", tensor_parallel_size=size, **options)


def children() -> set[int]:
    """This process's living children."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def one_rank() -> stage_e_batching.LLM:
    return stage_e_batching.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=256)


SIZES = [1, 2, 4]  # batch sizes with a recorded decode step; larger ones run eagerly
PREFILLS = [8, 20]  # numbers of tokens with a recorded step
RECORDER = EagerRecorder()


def build_recording_worker(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Stage F's `build_worker`, with steps recorded as on a GPU."""
    runner = Job(**json.loads(message)).build(rendezvous)[1]
    runner.capture(RECORDER, SIZES, PREFILLS)
    return runner.execute_command


@pytest.fixture(scope="module")
def two_ranks():
    """Small chunks, a pool that is too small for all requests at once, and a recorded step for some sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_runner, "build_worker", build_recording_worker)
        llm = ranked(num_kvcache_blocks=40, kvcache_block_size=2, max_num_batched_tokens=20, max_num_seqs=6)
    llm.runner.capture(RECORDER, SIZES, PREFILLS)
    llm.engine.scheduler.watermark = lambda sequence: 0  # whoever fits comes in, and has to go again
    yield llm
    llm.close()


def test_greedy_tokens_are_those_of_one_rank_under_chunking_and_preemption(one_rank, two_ranks):
    expected = ids(one_rank.generate(PROMPTS, GREEDY, False))
    for _ in range(2):  # the second time with cached prefixes
        assert ids(two_ranks.generate(PROMPTS, GREEDY, False)) == expected
    assert two_ranks.engine.counters.num_preemptions > 0
    assert two_ranks.engine.stats()["num_used_blocks"] == 0


def test_sampled_tokens_are_those_of_one_rank(one_rank, two_ranks):
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=1.1, seed=2, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=10, seed=5, max_tokens=11, ignore_eos=True),
        GREEDY,
    ]
    found, expected = (engine.generate(PROMPTS, params, False) for engine in (two_ranks, one_rank))
    assert ids(found) == ids(expected)
    assert [list(top) for top in found[3]["logprobs"]] == [list(top) for top in expected[3]["logprobs"]]


def test_greedy_and_plainly_sampled_tokens_need_no_gathered_logits_and_no_broadcast(one_rank, two_ranks, monkeypatch):
    params = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=10 - i, ignore_eos=True) for i in range(6)]
    replays = RECORDER.replays.copy()
    with monkeypatch.context() as patch:
        patch.setattr(two_ranks.runner.group, "all_gather", None)
        patch.setattr(two_ranks.runner.group, "broadcast", None)
        found = ids(two_ranks.generate(PROMPTS, params, False))
    assert found == ids(one_rank.generate(PROMPTS, params, False))
    assert set(RECORDER.replays - replays) == {*SIZES, "8 tokens", "20 tokens"}


def test_a_sampler_that_raises_costs_its_call_and_leaves_the_ranks_in_step(one_rank, two_ranks, monkeypatch):
    calls = 0

    def fail(logits, params):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError("stop here")
        return logits.argmax(-1)

    with monkeypatch.context() as patch:
        patch.setattr(two_ranks, "sampling_fn", fail)
        with pytest.raises(ZeroDivisionError, match="stop here"):
            two_ranks.generate(PROMPTS, GREEDY, False)
    assert not two_ranks.engine.has_unfinished()
    assert ids(two_ranks.generate(PROMPTS, GREEDY, False)) == ids(one_rank.generate(PROMPTS, GREEDY, False))


def test_threads_that_share_an_engine_leave_the_ranks_in_step(one_rank, two_ranks):
    expected = ids(one_rank.generate(PROMPTS, GREEDY, False))
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(two_ranks.generate, PROMPTS, GREEDY, False) for _ in range(6)]
        assert [ids(call.result()) for call in calls] == [expected] * 6


def test_a_sampled_id_outside_the_vocabulary_is_refused_and_leaves_the_ranks_in_step(one_rank, two_ranks, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(two_ranks, "sampling_fn", lambda logits, params: logits.argmax(-1) + logits.shape[-1])
        with pytest.raises(ValueError, match="outside the vocabulary of 4096"):
            two_ranks.generate(PROMPTS, GREEDY, False)
    assert ids(two_ranks.generate(PROMPTS, GREEDY, False)) == ids(one_rank.generate(PROMPTS, GREEDY, False))


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the tests run in the background of a shell, which lets its jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_costs_its_call_and_leaves_the_ranks_in_step(one_rank, two_ranks, interruptible):
    os.kill(two_ranks.runner.workers._processes[1].pid, signal.SIGINT)  # a terminal sends it to all processes
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()  # here: outside it would end the tests
        for _ in range(200):
            two_ranks.generate(PROMPTS, GREEDY, False)
    timer.join()
    assert not two_ranks.engine.has_unfinished()
    assert ids(two_ranks.generate(PROMPTS, GREEDY, False)) == ids(one_rank.generate(PROMPTS, GREEDY, False))


def test_an_interrupt_is_held_until_the_block_is_done(interruptible):
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_messages_have_no_fixed_size_and_two_engines_live_side_by_side(one_rank, two_ranks):
    prompts = [[i % 4000 + 1, 5] for i in range(512)]
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    long = [(i * 7919) % 4000 + 1 for i in range(4000)]
    before = children()
    wide = ranked(model="random:llama-tiny", num_kvcache_blocks=1200)
    [process] = children() - before
    expected = ids(two_ranks.generate(PROMPTS, GREEDY, False))
    outputs = wide.generate([long, *prompts], few, False)
    assert [len(answer) for answer in ids(outputs)] == [3] * 513
    single = stage_e_batching.LLM("random:llama-tiny", device="cpu", num_kvcache_blocks=300)
    assert ids(outputs)[:9] == ids(single.generate([long, *prompts[:8]], few, False))
    assert ids(two_ranks.generate(PROMPTS, GREEDY, False)) == expected
    with killed_soon(process), pytest.raises(WorkerError, match="rank 1 of 2 died .SIGKILL."):  # in prefill
        for start in range(1000):
            wide.generate([long[start:]], few, False)
    wide.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        wide.generate(PROMPTS, GREEDY, False)
    assert ids(two_ranks.generate(PROMPTS, GREEDY, False)) == expected


@contextlib.contextmanager
def killed_soon(process: int) -> Iterator[None]:
    """Kill a process in half a second; the block has to end within seconds of that."""
    timer = threading.Timer(0.5, os.kill, [process, signal.SIGKILL])
    timer.start()
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SECONDS


def test_a_killed_worker_is_an_error_within_seconds_and_a_new_engine_starts(one_rank):
    before = children()
    llm = ranked()
    [process] = children() - before
    with killed_soon(process), pytest.raises(WorkerError, match="rank 1 of 2 died .SIGKILL."):
        for _ in range(1000):
            llm.generate(PROMPTS, GREEDY, False)
    assert not llm.engine.has_unfinished()
    with pytest.raises(WorkerError, match="close it and make a new one"):
        llm.generate(PROMPTS, GREEDY, False)
    llm.close()
    llm.close()
    assert children() == before
    again = ranked()
    assert ids(again.generate(PROMPTS, GREEDY, False)) == ids(one_rank.generate(PROMPTS, GREEDY, False))
    timer = threading.Timer(0.3, again.close)  # by another thread, in the middle of a step
    timer.start()
    with pytest.raises(RuntimeError, match="the engine was closed|this engine is closed"):
        for _ in range(1000):
            again.generate(PROMPTS, GREEDY, False)
    timer.join()
    assert children() == before


def test_a_step_that_fails_on_rank_0_alone_is_an_error_that_ends_the_workers():
    before = children()
    llm = ranked()
    llm.runner.forward = lambda *args: 1 / 0  # the other rank now waits in a collective
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 could not run a step: ZeroDivisionError"):
        llm.generate(PROMPTS, GREEDY, False)
    while children() != before and time.monotonic() - start < SECONDS:  # a process that was killed takes a moment to go
        time.sleep(0.01)
    assert time.monotonic() - start < SECONDS
    assert children() == before


def test_a_failure_after_the_workers_started_ends_them(tmp_path):
    before = children()
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        ranked(trace=str(tmp_path / "no-such-folder" / "trace.jsonl"))
    assert children() == before


def test_a_worker_killed_at_its_start_is_an_error_within_seconds():
    before = children()
    start = time.monotonic()

    def kill_workers() -> None:
        while not (started := children() - before):
            time.sleep(0.01)
        for process in started:
            os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill_workers)
    killer.start()
    with pytest.raises(WorkerError, match="rank 1 of 2 died .SIGKILL."):
        ranked()
    killer.join()
    assert time.monotonic() - start < SECONDS
    assert children() == before


def test_what_is_received_is_never_unpickled():
    for path in Path(stage_f_graph_tp.__file__).parent.rglob("*.py"):
        assert not re.search(r"(import|from) pickle|\.recv\(\)", path.read_text()), path


def test_ranks_of_one_machine_listen_on_the_loopback_address_only(two_ranks):
    own_sockets = set()
    for process in [os.getpid(), *children()]:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                own_sockets.add(os.readlink(link))
    listening = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own_sockets:
                listening.add(address.partition(":")[0])
    assert listening == {"0100007F"}


def fail_as_cuda_does(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Raise an error of several lines, of which the first says what happened."""
    raise RuntimeError("CUDA error: no such address\nCompile with `TORCH_USE_CUDA_DSA`")


def test_a_worker_that_raises_reports_it_and_rank_0_says_what_it_was_in_the_first_line():
    rendezvous = open_rendezvous(2)
    ranks = Workers(rendezvous, fail_as_cuda_does)
    try:
        ranks.send(b"job")
        ranks._failing.wait(60)  # a worker imports PyTorch first
        first = f"rank 1 of 2 failed: RuntimeError: CUDA error: no such address; {workers_module.ADVICE}"
        with pytest.raises(WorkerError, match=rf"^{first}\nTraceback(?s:.*)\nCompile with `TORCH_USE_CUDA_DSA`$"):
            ranks.check()
    finally:
        ranks.close()


# ---- workers that do what a test sends them: no PyTorch, started in a moment ---------------------------------------

PUPPET = """
import os, signal, sys, time
from multiprocessing.connection import Connection
parent, connection, port, rank, size = map(int, sys.argv[3:])
connection = Connection(connection)
while True:
    exec(connection.recv_bytes()[8:])  # behind the number
"""


def build(*args: object) -> None:
    """A puppet never calls it."""


@pytest.fixture
def puppets(tmp_path, monkeypatch):
    """Makes `Workers` of puppets; they are closed after the test."""
    script = tmp_path / "puppet.py"
    script.write_text(PUPPET)
    monkeypatch.setattr(workers_module, "SCRIPT", script)
    made = []

    def make(size: int) -> Workers:
        made.append(Workers(open_rendezvous(size), build))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def raised_by(ranks: Workers) -> str:
    with pytest.raises(WorkerError) as raised:
        for _ in range(SECONDS):
            ranks.explain()
    return str(raised.value)


DIE = "os.kill(os.getpid(), signal.SIGKILL)"
REPORT = "connection.send_bytes(b'Connection closed by peer'); time.sleep(100)"


def test_the_rank_that_died_is_named_though_others_notice_first(puppets, monkeypatch):
    monkeypatch.setattr(workers_module, "CAUSE_SECONDS", 2.0)  # also on a busy machine it dies within that time
    ranks = puppets(4)
    ranks.send(f"if rank == 3: time.sleep(0.1); {DIE}\nelse: {REPORT}".encode())
    assert raised_by(ranks).startswith("rank 3 of 4 died (SIGKILL)")


def test_a_rank_that_dies_is_noticed_though_a_child_of_it_keeps_its_connection_open(puppets):
    ranks = puppets(3)
    ranks.send(f"if rank == 1 and os.fork(): {DIE}".encode())  # the child waits for the next message
    assert raised_by(ranks).startswith("rank 1 of 3 died (SIGKILL)")


def test_a_rank_that_exits_is_named_with_its_code_also_where_it_broke_a_collective(puppets):
    ranks = puppets(3)
    with pytest.raises(WorkerError, match=r"rank 2 of 3 died \(exit code 7\)"), ranks.needed():
        ranks.send(b"if rank == 2: os._exit(7)")
        ranks._failing.wait(SECONDS)
        raise RuntimeError("Connection closed by peer")


def test_ranks_share_the_cores_and_only_rank_0_shows_progress(puppets, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    ranks = puppets(2)
    names = ("OMP_NUM_THREADS", "TQDM_DISABLE")
    ranks.send(f"connection.send_bytes(' '.join(map(os.environ.get, {names})).encode())".encode())
    assert "failed: 4 1;" in raised_by(ranks)


def test_the_rank_that_raised_is_named_with_its_report(puppets, tmp_path):
    ranks = puppets(3)
    first = tmp_path / "has reported"
    report = b"KeyError: no such page\nTraceback"
    ranks.send(f"if rank == 2: connection.send_bytes({report}); open({str(first)!r}, 'w')".encode())
    ranks.send(f"while not os.path.exists({str(first)!r}): time.sleep(0.01)".encode())
    ranks.send(REPORT.encode())
    error = raised_by(ranks)
    assert re.fullmatch("rank 2 of 3 failed: KeyError: no such page; .*\nTraceback", error)


def test_a_death_ends_this_ranks_waits_at_once_and_then_all_workers(puppets):
    before = children()
    ranks = puppets(3)
    survivor = ranks._processes[2].pid
    seen = []
    ranks.stop_waiting = lambda: seen.append(survivor in children())
    ranks.send(f"if rank == 1: {DIE}".encode())
    raised_by(ranks)
    assert seen == [True]
    ranks.close()
    assert seen == [True] and children() == before


def test_tokens_of_a_step_in_which_a_rank_died_are_not_returned(puppets):
    workers = puppets(2)
    step = WatchedInFlight(SampledTokens(torch.tensor([7])), torch.tensor([7]), None, workers)
    assert step.wait().token_ids == [7]
    workers.send(DIE.encode())
    workers._failing.wait(SECONDS)
    with pytest.raises(WorkerError, match="rank 1 of 2 died"):
        step.wait()


def test_a_step_that_will_not_arrive_because_a_rank_died_is_not_waited_for(puppets):
    workers, ended = puppets(2), threading.Event()
    workers.stop_waiting = ended.set  # on a GPU, the kernels that wait for the rank end
    late = SimpleNamespace(synchronize=lambda: ended.wait(SECONDS))
    step = WatchedInFlight(SampledTokens(torch.tensor([7])), None, late, workers)
    workers.send(DIE.encode())
    with pytest.raises(WorkerError, match="rank 1 of 2 died"):
        step.wait()
    assert ended.is_set()


def test_a_step_that_never_arrives_is_an_error(puppets, monkeypatch):
    monkeypatch.setattr(workers_module, "ANSWER_SECONDS", 0.4)
    workers, ended = puppets(2), threading.Event()
    workers.stop_waiting = ended.set
    never = SimpleNamespace(synchronize=lambda: ended.wait(SECONDS))
    step = WatchedInFlight(SampledTokens(torch.tensor([7])), None, never, workers)
    with pytest.raises(WorkerError, match="the other ranks did not answer within 0 s"):
        step.wait()


def test_a_command_that_a_stopped_rank_does_not_read_is_an_error_that_names_it(puppets, monkeypatch):
    monkeypatch.setattr(workers_module, "ANSWER_SECONDS", 1.0)
    before = children()
    ranks = puppets(4)
    os.kill(ranks._processes[2].pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="rank 2 of 4 is stopped and did not answer within 1 s"):
        for _ in range(100):
            with ranks.in_step(b"#" * 2**20):
                pass
    ranks.close()
    assert children() == before


def test_a_long_step_in_which_the_ranks_answer_one_another_is_not_late_and_nobody_waits_after_it(puppets):
    workers = puppets(2)
    group, waits = RankGroup(open_rendezvous(2), torch.device("cpu"), workers), []
    work = SimpleNamespace(is_completed=lambda: True, wait=lambda: waits.append(workers._awaited))
    with workers.in_step(b"pass"):
        waits.append(workers._awaited)
        group._wait(work)
        assert workers._awaited is None, "what rank 0 computes then has no limit"
    assert None not in waits and waits[0] is not waits[1]
    with pytest.raises(KeyboardInterrupt), workers.awaited():
        raise KeyboardInterrupt
    assert workers._awaited is None


def test_a_wait_for_a_collective_on_cpus_is_left_when_a_rank_has_died(puppets):
    ranks = puppets(2)
    group = RankGroup(open_rendezvous(2), torch.device("cpu"), ranks)
    ranks.send(DIE.encode())
    with pytest.raises(WorkerError, match="rank 1 of 2 died"):
        group._wait(SimpleNamespace(is_completed=lambda: False, wait=lambda: pytest.fail("it would wait for ever")))


def test_a_launch_that_is_blocked_behind_a_stopped_rank_ends_with_the_waits(puppets, monkeypatch):
    monkeypatch.setattr(workers_module, "ANSWER_SECONDS", 0.4)
    ranks, unblocked = puppets(2), threading.Event()
    ranks.stop_waiting = unblocked.set  # on a GPU, the kernels that the launch waits for end
    with pytest.raises(WorkerError, match="the other ranks did not answer"), ranks.in_step(b"pass"):
        assert unblocked.wait(SECONDS)
        ranks.check()


def test_an_error_that_rank_0_cannot_raise_because_a_call_does_not_end_is_printed(puppets, monkeypatch):
    monkeypatch.setattr(workers_module, "BLOCKED_SECONDS", 0.1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(workers_module, "print", lambda line, **_: lines.put(line), raising=False)
    ranks = puppets(2)
    with ranks.awaited():
        ranks.send(DIE.encode())
        assert re.fullmatch("error: rank 1 of 2 died .* rank 0 has not come back .*", lines.get(timeout=SECONDS))


def test_rank_0_is_not_blocked_where_it_came_back_and_waits_for_something_else(puppets, monkeypatch):
    lines, before, looks_again, waits_again = [], set(threading.enumerate()), threading.Event(), threading.Event()
    ranks = puppets(2)
    [watcher] = set(threading.enumerate()) - before
    monkeypatch.setattr(workers_module, "print", lambda line, **_: lines.append(line), raising=False)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: looks_again.set() or waits_again.wait(SECONDS))
    monkeypatch.setattr(workers_module, "time", clock)
    with ranks.awaited():
        ranks.send(DIE.encode())
        assert looks_again.wait(SECONDS)
    with ranks.awaited():
        waits_again.set()
        watcher.join(SECONDS)
    assert not watcher.is_alive() and not lines


def test_time_in_which_rank_0_is_stopped_itself_does_not_count(puppets, monkeypatch):
    looks, wait, clock = threading.Semaphore(0), workers_module.wait, time.monotonic
    monkeypatch.setattr(workers_module, "wait", lambda *arguments: looks.release() or wait(*arguments))
    ranks = puppets(2)
    with ranks.awaited(100.0):
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)  # as after a long Ctrl-Z
        assert all(looks.acquire(timeout=SECONDS) for _ in range(4))
        ranks.check()


def stop_in(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank but 0 stop when it comes to a function."""
    original, here = getattr(owner, name), os.getpid()

    def stop(*arguments: object) -> object:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments)

    monkeypatch.setattr(owner, name, stop)


@pytest.mark.parametrize("phase", [(Job, "load"), (RankGroup, "connect"), (RankRunner, "run_model")], ids=str)
def test_a_rank_that_stops_is_an_error_after_a_time_limit_and_leaves_no_process(phase, monkeypatch):
    before = children()
    monkeypatch.setattr(workers_module, "_start_worker", fork_worker)
    monkeypatch.setattr(workers_module, "START_SECONDS", 4.0)
    monkeypatch.setattr(workers_module, "ANSWER_SECONDS", 1.0)
    stop_in(*phase, monkeypatch)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="did not answer within . s; the engine cannot go on"):
        ranked().generate(PROMPTS, GREEDY, False)
    assert time.monotonic() - start < SECONDS
    gc.collect()  # the engine, which nobody closed
    assert children() == before


def test_a_samplers_error_in_a_step_in_which_a_rank_died_is_the_ranks_error(puppets):
    runner = object.__new__(RankRunner)
    runner.workers, runner.begin_command = puppets(2), lambda: None
    with pytest.raises(WorkerError, match="rank 1 of 2 died"), runner.in_step(DIE.encode()):
        runner._sampling_error = ZeroDivisionError()
        runner.workers._failing.wait(SECONDS)


def test_a_step_that_broke_because_a_rank_died_is_the_ranks_error(puppets, monkeypatch):
    workers = puppets(2)

    def explain() -> None:  # the death comes to light behind the step's own error
        workers.send(DIE.encode())
        workers._failing.wait(SECONDS)
        workers.check()

    monkeypatch.setattr(workers, "explain", explain)
    with pytest.raises(WorkerError, match="rank 1 of 2 died"), workers.in_step(b"pass"):
        raise RuntimeError("Connection closed by peer")


class Alarm(Exception):
    """What a signal's handler raises."""


def throw(*args: object) -> None:
    raise Alarm


@pytest.mark.parametrize("where", ["send", "fail"])
def test_a_step_that_rank_0_left_before_its_end_is_the_last(puppets, monkeypatch, where):
    """In the sending of its command, and where the exception came while another one ended the engine."""
    ranks = puppets(2)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, where, throw)
        with pytest.raises((WorkerError, Alarm)), ranks.in_step(b"pass"):
            raise ZeroDivisionError
    begun, reason = [], "rank 0 (could not run a step|left a step before its end)"
    with pytest.raises(WorkerError, match=reason), ranks.in_step(b"pass"):
        begun.append(True)
    assert not begun


def test_an_end_that_is_interrupted_is_finished(puppets, monkeypatch):
    ranks, calls = puppets(2), []

    def interrupted_once() -> None:
        calls.append(None)
        if len(calls) == 1:
            raise Alarm

    ranks.stop_waiting = interrupted_once
    with pytest.raises(Alarm), ranks.in_step(b"pass"):
        raise ZeroDivisionError
    with pytest.raises(WorkerError, match="rank 0 was interrupted; the engine cannot go on"):
        ranks.check()
    assert len(calls) == 2 and ranks._processes[1].wait(SECONDS) == -signal.SIGKILL


def keep_quiet(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Execute any command by doing nothing."""
    return lambda message: None


def test_a_command_that_is_missing_or_comes_twice_is_an_error_of_the_rank(monkeypatch):
    monkeypatch.setattr(workers_module, "_start_worker", fork_worker)
    for lost in (-1, 1):
        ranks = Workers(open_rendezvous(2), keep_quiet)
        try:
            ranks.send(b"job")
            ranks.send(b"first")
            ranks._num_sent += lost
            ranks.send(b"second")
            assert re.match(rf"rank 1 of 2 failed: .* command {2 + lost} came where command 2 was", raised_by(ranks))
        finally:
            ranks.close()


def test_recording_graphs_of_any_kind_ends_when_a_rank_has_died(puppets):
    runner = object.__new__(RankRunner)
    runner.workers, runner.device, runner._is_cuda = puppets(2), torch.device("cpu"), False
    recorded = []

    def record(body: int) -> None:
        recorded.append(body)
        if body == 2:
            runner.workers.send(DIE.encode())
            runner.workers._failing.wait(SECONDS)

    with pytest.raises(WorkerError, match="rank 1 of 2 died"):
        runner._capture(record, StepGraphs([1, 2, 3]), "prefill", lambda shape: shape)
    assert recorded == [3, 2]


def test_only_rank_0_reports(capsys):
    for rank in range(3):
        runner = object.__new__(RankRunner)
        runner.group = SimpleNamespace(rank=rank)
        runner._report(f"from rank {rank}")
    assert capsys.readouterr().err == "from rank 0\n"


def test_a_step_travels_as_numbers_and_bytes_of_the_right_length():
    shape = StepShape(3, 2, 2, 4, 1, 2, 9)
    command = StepCommand(shape, 1, ~1, bytes(shape.num_bytes))
    message = command.encode()
    assert StepCommand.decode(message) == command
    for wrong in (message + b"x", message[:-1], message[:20], b""):
        with pytest.raises((ValueError, struct.error)):
            StepCommand.decode(wrong)


def test_a_send_that_blocks_ends_when_its_worker_dies(puppets):
    ranks = puppets(2)
    threading.Timer(0.3, lambda: os.kill(ranks._processes[1].pid, signal.SIGKILL)).start()
    ranks.send(b"time.sleep(100)")
    with pytest.raises(WorkerError, match="rank 1 of 2 died"):
        for _ in range(100):
            ranks.send(bytes(2**20))


def test_a_forked_child_does_not_end_its_parents_workers(puppets):
    ranks = puppets(2)
    child = os.fork()
    if child == 0:
        ranks.close()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.1)
    ranks.check()


PARENT = """
import os, sys, time
from stage_f_graph_tp.rank_runner import build_worker
from stage_f_graph_tp.tensor_parallel.rendezvous import open_rendezvous
from stage_f_graph_tp.tensor_parallel.workers import Workers
worker = Workers(open_rendezvous(2), build_worker)._processes[1].pid
if os.fork() == 0:
    time.sleep(100)
    os._exit(0)
print(worker, flush=True)
time.sleep(100)
"""


def test_a_worker_ends_quietly_with_a_parent_that_is_killed_while_it_starts_and_has_a_forked_child():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PARENT]  # of a fork beside threads
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        worker = int(parent.stdout.readline())
        parent.kill()
        deadline = time.monotonic() + SECONDS
        while Path(f"/proc/{worker}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # the forked child
    assert parent.stderr.read() == b""


def test_a_wait_that_nothing_ends_is_left_when_a_rank_has_died():
    def died() -> None:
        raise WorkerError("rank 1 died")

    with pytest.raises(WorkerError, match="rank 1 died"):
        finish_or_raise(lambda: time.sleep(100), died)
    done = []
    finish_or_raise(lambda: done.append(True), lambda: None)
    assert done
    with pytest.raises(ZeroDivisionError):
        finish_or_raise(lambda: 1 / 0, lambda: None)


def test_a_process_of_torchruns_that_does_not_connect_is_an_error(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for module in (workers_module, rendezvous_module):
        monkeypatch.setattr(module, "START_SECONDS", 0.1)
    with pytest.raises(WorkerError, match="the other ranks did not connect within 0 s"):
        Workers(Rendezvous(dist.HashStore(), 0, 2, is_torchrun=True), build)


def test_one_rank_has_no_group_no_process_and_no_port(monkeypatch):
    for name in ("TCPStore", "ProcessGroupGloo", "init_process_group"):
        monkeypatch.delattr(dist, name)
    before = children()
    llm = stage_f_graph_tp.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=16)
    llm.generate([[1, 2, 3]], GREEDY, False)
    assert type(llm.runner) is GraphModelRunner
    assert not dist.is_initialized() and children() == before
    llm.close()
    llm.close()


def test_torchrun_starts_the_same_engine_and_answers_once(one_rank):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "stage_f_graph_tp", "--tensor-parallel-size", "2", "--device", "cpu", "--max-tokens", "16"]
    question = "What is a KV cache?"
    process = subprocess.Popen(
        [*command, "--prompt", question], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
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
