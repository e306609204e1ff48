"""Rank 0's commands to the other ranks, and errors instead of hangs when a rank fails, stops or is left waiting.

The tokens of several ranks are in `contract/`. Here most ranks are puppets, which execute a test's commands.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from contract.engines import GREEDY, PROMPTS, ask, one_by_one
from ranks import (
    MIXED,
    SECONDS,
    SHARING,
    admit_whoever_fits,
    children,
    error_of,
    forked_ranks,
    in_other_ranks,
    killed_soon,
    recording_ranks,
    stop,
    within_seconds,
)

import stage_e_batching
import stage_f_graph_tp
from labs.tests.forks import fork_worker
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.sampler import SampledTokens
from stage_f_graph_tp.forward import Layers
from stage_f_graph_tp.head import InFlight
from stage_f_graph_tp.ranks import Job, StepCommand, WatchedInFlight
from stage_f_graph_tp.runner import StepRunner
from stage_f_graph_tp.step_input import StepShape
from stage_f_graph_tp.tensor_parallel.rank_group import RankGroup, finish_or_raise
from stage_f_graph_tp.tensor_parallel.watch import rendezvous as rendezvous_module
from stage_f_graph_tp.tensor_parallel.watch import workers as workers_module
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import Rendezvous, open_rendezvous
from stage_f_graph_tp.tensor_parallel.watch.workers import (
    NUMBER,
    BrokenCollective,
    WorkerError,
    Workers,
    interrupts_held,
)

ROOT = Path(__file__).resolve().parent.parent
SIZES, PREFILLS = [1, 2, 4], [8, 20]  # batch sizes, and numbers of tokens, with a recorded step

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")


def ranked(size: int = 2, model: str = "random:qwen2-tiny", **options: object) -> stage_f_graph_tp.LLM:
    return stage_f_graph_tp.LLM(model, device="cpu", tensor_parallel_size=size, **options)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the time limits of the ranks, and the clock by which they are told."""

    def change(**values: object) -> None:
        for name, value in values.items():
            for module in (workers_module, rendezvous_module):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)

    return change


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank() -> stage_e_batching.LLM:
    return stage_e_batching.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=256)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[SimpleNamespace]:
    """Small chunks, a pool that is too small for all requests at once, and a recorded step for some sizes."""
    with recording_ranks(SIZES, PREFILLS) as replays:
        llm = ranked(num_kvcache_blocks=40, kvcache_block_size=2, max_num_batched_tokens=20, max_num_seqs=6)
    admit_whoever_fits(llm)
    yield SimpleNamespace(llm=llm, group=llm.runner.ranks.group, replays=replays)
    llm.close()


def test_recorded_ranks_give_one_ranks_tokens_under_chunking_and_preemption_whatever_is_sampled(one_rank, two_ranks):
    for asked in (GREEDY, MIXED, GREEDY):
        assert ask(two_ranks.llm, SHARING, asked) == ask(one_rank, SHARING, asked)
    counters = two_ranks.llm.engine.counters
    assert counters.num_preemptions > 0 and counters.num_cached_tokens > 0


def test_greedy_and_plainly_sampled_tokens_need_no_gathered_logits_and_no_broadcast(one_rank, two_ranks):
    params = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=10 - i, ignore_eos=True) for i in range(5)]
    two_ranks.group.all_gather = two_ranks.group.broadcast = None
    try:
        assert ask(two_ranks.llm, PROMPTS, params) == ask(one_rank, PROMPTS, params)
    finally:
        del two_ranks.group.all_gather, two_ranks.group.broadcast
    assert all({*SIZES, *PREFILLS} == set(two_ranks.replays(rank)) for rank in range(2))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise even if the tests run as a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_held_until_the_block_is_done(interruptible):
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_engines_live_side_by_side_messages_have_no_fixed_size_and_an_end_is_that_of_one(one_rank, two_ranks):
    prompts = [[(i * 7919) % 4000 + 1 for i in range(4000)], *([i % 4000 + 1, 5] for i in range(512))]
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    expected = one_by_one(one_rank)
    with within_seconds():
        before = children()
        with forked_ranks():
            wide = ranked(model="random:llama-tiny", num_kvcache_blocks=1200)
        [process] = children() - before
        assert ask(two_ranks.llm, PROMPTS) == expected
        found = ask(wide, prompts, few)
        single = stage_e_batching.LLM("random:llama-tiny", device="cpu", num_kvcache_blocks=300)
        assert found[:9] == ask(single, prompts[:9], few) and [len(answer) for answer in found] == [3] * 513
        with killed_soon(process), pytest.raises(WorkerError, match="rank 1 of 2 died .SIGKILL."):  # in prefill
            for start in range(1000):
                ask(wide, [prompts[0][start:]], few)
        wide.close()
    assert ask(two_ranks.llm, PROMPTS) == expected


def test_a_killed_worker_costs_its_engine_ctrl_c_only_its_call_and_a_closed_one_leaves_no_process(
    one_rank, interruptible
):
    with within_seconds():
        before = children()
        llm = ranked()
        [process] = children() - before
        os.kill(process, signal.SIGINT)  # a terminal sends it to all processes
        timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()  # here: outside it would end the tests
            for _ in range(200):
                ask(llm, PROMPTS)
        timer.join()
        assert not llm.calls.has_unfinished() and ask(llm, PROMPTS) == one_by_one(one_rank)
        with killed_soon(process), pytest.raises(WorkerError, match="rank 1 of 2 died .SIGKILL."):
            for _ in range(1000):
                ask(llm, PROMPTS)
        assert not llm.calls.has_unfinished()
        with pytest.raises(WorkerError, match="close it and make a new one"):
            ask(llm, PROMPTS)
        llm.close()
        llm.close()


def test_an_engine_closed_by_another_thread_in_the_middle_of_a_step_says_so():
    with within_seconds(), forked_ranks():
        llm = ranked()
        timer = threading.Timer(0.3, llm.close)
        timer.start()
        with pytest.raises(RuntimeError, match="the engine was closed|this engine is closed"):
            for _ in range(1000):
                ask(llm, PROMPTS)
        timer.join()


def test_a_step_that_fails_on_rank_0_alone_is_an_error_that_ends_the_workers():
    with within_seconds(), forked_ranks():
        llm = ranked()
        llm.runner.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)  # the other rank waits in a collective
        with pytest.raises(WorkerError, match="rank 0 could not run a step: ZeroDivisionError"):
            ask(llm, PROMPTS)


def test_a_failure_after_the_workers_started_ends_them(tmp_path):
    with within_seconds(), forked_ranks(), pytest.raises(FileNotFoundError, match="no-such-folder"):
        ranked(trace=str(tmp_path / "no-such-folder" / "trace.jsonl"))


def test_a_worker_killed_at_its_start_is_an_error_within_seconds():
    before = children()

    def kill_workers() -> None:
        while not (started := children() - before):
            time.sleep(0.01)
        for process in started:
            os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill_workers)
    with within_seconds(), pytest.raises(WorkerError, match="rank 1 of 2 died .SIGKILL."):
        killer.start()
        ranked()
    killer.join()


@pytest.mark.parametrize(
    "phase",
    [
        *(pytest.param(phase, marks=pytest.mark.slow) for phase in [(Job, "load"), (RankGroup, "connect")]),
        (Layers, "run"),
    ],
    ids=str,
)
def test_a_rank_that_stops_is_an_error_after_a_time_limit_and_leaves_no_process(phase, limits):
    limits(START_SECONDS=4.0, ANSWER_SECONDS=1.0)
    with within_seconds():
        with (
            in_other_ranks(*phase, stop),
            pytest.raises(WorkerError, match="did not answer within . s; the engine cannot go on"),
        ):
            ask(ranked(), PROMPTS)
        gc.collect()  # the engine, which nobody closed


def test_recording_graphs_ends_when_a_rank_has_died():
    recorded = []

    def record(body: object) -> None:
        recorded.append(body)
        if len(recorded) == 2:
            [process] = children() - before
            os.kill(process, signal.SIGKILL)
            error_of(llm.runner.ranks.workers)

    with within_seconds(), forked_ranks():
        before = children()
        llm = ranked()
        with pytest.raises(WorkerError, match="rank 1 of 2 died"):
            llm.runner.capture(llm.runner.ranks.watch(record), [1, 2, 3])
        assert len(recorded) == 2


# ---- puppets: ranks that execute a test's commands --------------------------------------------------------------


def puppet(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Execute any command as Python, in one namespace."""
    names = {"rank": rendezvous.rank, "rendezvous": rendezvous, **globals()}
    return lambda command: exec(command, names)


DIE = b"os.kill(os.getpid(), signal.SIGKILL)"
DIE_AND_LEAVE_A_CHILD = b"os.fork() and os.kill(os.getpid(), signal.SIGKILL); time.sleep(3); os._exit(0)"
LOSE = b"raise BrokenCollective('Connection closed by peer')"


@pytest.fixture
def puppets() -> Iterator[Callable[[int], Workers]]:
    """Makes `Workers` of puppets; they are closed after the test."""
    made = []

    def make(size: int) -> Workers:
        with forked_ranks():
            made.append(Workers(open_rendezvous(size), puppet))
        made[-1].send(b"")  # what they are built from
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize(
    ("size", "command", "says"),
    [
        (4, b"if rank == 3: time.sleep(0.1); " + DIE + b"\nelse: " + LOSE, r"rank 3 of 4 died \(SIGKILL\)"),
        (
            4,
            b"if rank == 3: time.sleep(0.1); raise KeyError('no such page')\nelse: " + LOSE,
            f"rank 3 of 4 failed: KeyError: 'no such page'; {workers_module.ADVICE}\nTraceback.*'no such page'$",
        ),
        (3, LOSE, "rank [12] of 3 failed: .*BrokenCollective: Connection closed by peer; "),
    ],
    ids=["it died", "it raised", "every rank lost another"],
)
def test_the_rank_that_failed_is_named_though_others_notice_first(puppets, limits, size, command, says):
    limits(CAUSE_SECONDS=5.0)  # also on a busy machine it fails within that time
    ranks = puppets(size)
    ranks.send(command)
    assert re.match(says, error_of(ranks), re.DOTALL)


def test_a_rank_that_dies_is_noticed_though_a_child_of_it_keeps_its_connection_open(puppets):
    ranks = puppets(3)
    ranks.send(b"if rank == 1: " + DIE_AND_LEAVE_A_CHILD)
    assert error_of(ranks).startswith("rank 1 of 3 died (SIGKILL)")


def test_a_rank_that_exits_is_named_with_its_code_also_where_it_broke_a_collective(puppets):
    ranks = puppets(3)
    with pytest.raises(WorkerError, match=r"rank 2 of 3 died \(exit code 7\)"), ranks.needed():
        ranks.send(b"if rank == 2: os._exit(7)")
        error_of(ranks)
        raise RuntimeError("Connection closed by peer")


def test_a_death_ends_this_ranks_waits_at_once_and_then_all_workers(puppets):
    before, seen = children(), []
    ranks = puppets(3)
    _, survivor = sorted(children() - before)
    ranks.end_waits_of(SimpleNamespace(stop_waiting=lambda: seen.append(survivor in children())))
    ranks.send(b"if rank == 1: " + DIE)
    error_of(ranks)
    assert seen == [True]
    ranks.close()
    assert seen == [True] and children() == before


def step_of(workers: Workers, arrived: object = None, read: Callable[[], object] = lambda: None) -> WatchedInFlight:
    """A step of one token, and what happens while it is read."""
    host_ids = SimpleNamespace(tolist=lambda: read() or [7])
    return WatchedInFlight(InFlight(SampledTokens(torch.tensor([7]), torch.tensor([7])), host_ids, arrived), workers)


def test_tokens_of_a_step_in_which_a_rank_died_are_not_returned(puppets):
    ranks = puppets(2)
    assert step_of(ranks).wait().token_ids == [7]

    def die() -> None:
        ranks.send(DIE)
        error_of(ranks)

    for read in (die, lambda: pytest.fail("they are invalid")):  # it dies while they are read, or died before
        with pytest.raises(WorkerError, match="rank 1 of 2 died"):
            step_of(ranks, read=read).wait()


@pytest.mark.parametrize(
    ("command", "says"), [(DIE, "rank 1 of 2 died"), (b"pass", "the other ranks did not answer within 0 s")]
)
def test_a_step_that_will_not_arrive_is_an_error_when_the_waits_on_the_gpu_were_ended(puppets, limits, command, says):
    limits(ANSWER_SECONDS=30.0 if command == DIE else 0.4)
    ranks, ended = puppets(2), threading.Event()
    ranks.end_waits_of(SimpleNamespace(stop_waiting=ended.set))  # on a GPU, the kernels that wait for the rank end
    ranks.send(command)
    with pytest.raises(WorkerError, match=says):
        step_of(ranks, SimpleNamespace(synchronize=lambda: ended.wait(SECONDS))).wait()
    assert ended.is_set()


def test_a_launch_that_is_blocked_behind_a_stopped_rank_ends_with_the_waits(puppets, limits):
    limits(ANSWER_SECONDS=0.4)
    ranks, unblocked = puppets(2), threading.Event()
    ranks.end_waits_of(SimpleNamespace(stop_waiting=unblocked.set))
    with pytest.raises(WorkerError, match="the other ranks did not answer"), ranks.in_step(b"pass"):
        assert unblocked.wait(SECONDS)
        ranks.check()


def test_a_command_that_a_stopped_rank_does_not_read_is_an_error_that_names_it(puppets, limits):
    limits(ANSWER_SECONDS=1.0)
    with within_seconds():
        ranks = puppets(4)
        ranks.send(b"if rank == 2: stop()")
        with pytest.raises(WorkerError, match="rank 2 of 4 is stopped and did not answer within 1 s"):
            for _ in range(100):
                with ranks.in_step(b"#" * 2**20):
                    pass
        ranks.close()


def test_a_send_that_blocks_ends_when_its_worker_dies(puppets):
    before = children()
    ranks = puppets(2)
    [process] = children() - before
    ranks.send(b"stop()")
    with killed_soon(process), pytest.raises(WorkerError, match="rank 1 of 2 died"):
        for _ in range(100):
            ranks.send(bytes(2**20))


def connected(ranks: Workers) -> RankGroup:
    """Rank 0's group of ranks that are puppets, which have one too."""
    ranks.send(b"group = RankGroup(rendezvous, torch.device('cpu')); group.connect()")
    group = RankGroup(ranks.rendezvous, torch.device("cpu"), ranks)
    group.connect()
    return group


def test_a_wait_for_a_collective_on_cpus_is_left_when_a_rank_has_died(puppets):
    ranks = puppets(2)
    group = connected(ranks)
    ranks.send(DIE_AND_LEAVE_A_CHILD)  # gloo's connection does not break
    with pytest.raises(WorkerError, match="rank 1 of 2 died"):
        group.all_reduce(torch.ones(1))


def test_a_rank_whose_collective_broke_reports_that_it_lost_another_one(puppets):
    ranks = puppets(3)
    ranks.send(b"group = RankGroup(rendezvous, torch.device('cpu')); group.connect()")
    group = RankGroup(ranks.rendezvous, torch.device("cpu"))  # this rank does not learn what happened to the others
    group.connect()
    ranks.send(b"if rank == 2: " + DIE + b"\ntime.sleep(9)")
    with pytest.raises(BrokenCollective):
        group.all_reduce(torch.ones(1))


class Looks:
    """Stands in for the watching thread's waits: it looks at the ranks when a test lets it, and not by the clock."""

    def __init__(self) -> None:
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self.others = set(threading.enumerate())  # other tests' engines are watched, too

    def __call__(self, connections: object, seconds: float) -> list:
        if threading.current_thread() in self.others:
            return wait(connections, seconds)
        self.begun.release()  # and the look before has ended
        self.allowed.acquire(timeout=SECONDS)
        return []

    def let(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=SECONDS)
            self.allowed.release()
        assert self.begun.acquire(timeout=SECONDS)
        self.begun.release()


LOOKS = round(1 / workers_module.WATCH_INTERVAL)  # looks in a second


def test_a_long_step_in_which_the_ranks_answer_one_another_is_not_late_and_nobody_waits_after_it(puppets, limits):
    looks = Looks()
    limits(wait=looks, ANSWER_SECONDS=1.0)
    ranks = puppets(2)
    group = connected(ranks)
    with ranks.in_step(b"group.all_reduce(torch.ones(1))"):
        looks.let(LOOKS - 1)
        with ranks.awaited():  # what every collective does
            looks.let(LOOKS - 1)
        with pytest.raises(KeyboardInterrupt), ranks.awaited():
            raise KeyboardInterrupt
        group.all_reduce(torch.ones(1))
        looks.let(2 * LOOKS)  # what rank 0 computes then has no limit
    looks.let(2 * LOOKS)
    ranks.check()
    with pytest.raises(WorkerError, match="the other ranks did not answer within 1 s"), ranks.awaited():
        looks.let(LOOKS - 1)
        looks.allowed.release()
        error_of(ranks)
        ranks.check()


def test_time_in_which_rank_0_is_stopped_itself_does_not_count(puppets, limits):
    looks, clock = Looks(), time.monotonic
    limits(wait=looks)
    ranks = puppets(2)
    with ranks.awaited(100.0):
        limits(time=SimpleNamespace(monotonic=lambda: clock() + 1000))  # as after a long Ctrl-Z
        looks.let(4)
        ranks.check()


def test_an_error_that_rank_0_cannot_raise_because_a_call_does_not_end_is_printed(puppets, limits, capsys):
    limits(BLOCKED_SECONDS=0.1)
    ranks, told, end = puppets(2), "", time.monotonic() + SECONDS
    with ranks.awaited():
        ranks.send(DIE)
        while not told.endswith("\n"):
            assert time.monotonic() < end
            time.sleep(0.05)
            told += capsys.readouterr().err
    assert re.fullmatch("error: rank 1 of 2 died .* rank 0 has not come back .*\n", told)


def test_a_step_that_broke_because_a_rank_died_is_the_ranks_error(puppets):
    ranks = puppets(2)

    def explain() -> None:  # the death comes to light behind the step's own error
        del ranks.explain
        ranks.send(DIE)
        error_of(ranks)
        ranks.check()

    ranks.explain = explain
    with pytest.raises(WorkerError, match="rank 1 of 2 died"), ranks.in_step(b"pass"):
        raise RuntimeError("Connection closed by peer")


class Alarm(Exception):
    """What a signal's handler raises."""


def throw(*args: object) -> None:
    raise Alarm


@pytest.mark.parametrize("where", ["send", "fail"])
def test_a_step_that_rank_0_left_before_its_end_is_the_last(puppets, where):
    """In the sending of its command, and where the exception came while another one ended the engine."""
    ranks = puppets(2)
    setattr(ranks, where, throw)
    with pytest.raises((WorkerError, Alarm)), ranks.in_step(b"pass"):
        raise ZeroDivisionError
    delattr(ranks, where)
    begun, reason = [], "rank 0 (could not run a step|left a step before its end)"
    with pytest.raises(WorkerError, match=reason), ranks.in_step(b"pass"):
        begun.append(True)
    assert not begun


def test_an_end_that_is_interrupted_is_finished(puppets):
    with within_seconds():
        ranks, calls = puppets(2), []
        stop = lambda: calls.append(None) or (len(calls) == 1 and throw())  # noqa: E731
        ranks.end_waits_of(SimpleNamespace(stop_waiting=stop))
        with pytest.raises(Alarm), ranks.in_step(b"pass"):
            raise ZeroDivisionError
        with pytest.raises(WorkerError, match="rank 0 was interrupted; the engine cannot go on"):
            ranks.check()
        assert len(calls) == 2


@pytest.mark.parametrize("number", [1, 3], ids=["twice", "missing"])
def test_a_command_that_is_missing_or_comes_twice_is_an_error_of_the_rank(number):
    rendezvous = open_rendezvous(2)  # its store, which the rank joins
    process, connection = fork_worker(rendezvous, 1, puppet)
    try:
        for sent in (0, 1, number):
            connection.send_bytes(NUMBER.pack(sent) + b"pass")
        assert connection.poll(SECONDS / 4), "no report"
        report = connection.recv_bytes().decode()
        assert f"the ranks are out of step: command {number} came where command 2 was expected" in report
    finally:
        process.kill()


def test_a_forked_child_does_not_end_its_parents_workers(puppets):
    ranks = puppets(2)
    child = os.fork()
    if child == 0:
        try:
            ranks.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.1)
    ranks.check()


# ---- ranks without an engine -----------------------------------------------------------------------------------------


def fail_as_cuda_does(rendezvous: Rendezvous, message: bytes) -> Callable[[bytes], None]:
    """Raise an error of several lines; the first line says what happened."""
    told = " ".join(os.environ[name] for name in ("OMP_NUM_THREADS", "TQDM_DISABLE"))
    raise RuntimeError(f"CUDA error: no such address\nWith {told} compile with `TORCH_USE_CUDA_DSA`")


def test_a_worker_that_raises_reports_it_rank_0_says_what_it_was_first_and_the_ranks_share_the_cores():
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        ranks = Workers(open_rendezvous(2), fail_as_cuda_does)
    finally:
        torch.set_num_threads(threads)
    try:
        ranks.send(b"job")
        first = f"rank 1 of 2 failed: RuntimeError: CUDA error: no such address; {workers_module.ADVICE}"
        last = "With 4 1 compile with `TORCH_USE_CUDA_DSA`"  # threads, and no progress bar
        assert re.fullmatch(rf"{first}\nTraceback.*\n{last}", error_of(ranks), re.DOTALL)
    finally:
        ranks.close()


def test_a_step_travels_as_numbers_and_bytes_of_the_right_length():
    shape = StepShape(3, 2, 2, 4, 1, 2, 9)
    command = StepCommand(shape, 1, ~1, bytes(shape.num_bytes))
    message = command.encode()
    assert StepCommand.decode(message) == command
    for wrong in (message + b"x", message[:-1], message[:20], b""):
        with pytest.raises((ValueError, struct.error)):
            StepCommand.decode(wrong)


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


def test_what_is_received_is_never_unpickled():
    for path in Path(stage_f_graph_tp.__file__).parent.rglob("*.py"):
        assert not re.search(r"(import|from) pickle|\.recv\(\)", path.read_text()), path


def listening() -> set[str]:
    """The addresses on which this process and its children accept connections."""
    own_sockets, found = set(), set()
    for process in [os.getpid(), *children()]:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                own_sockets.add(os.readlink(link))
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own_sockets:
                found.add(address)
    return found


def test_ranks_of_one_machine_listen_on_the_loopback_address_only(two_ranks):
    assert {address.partition(":")[0] for address in listening()} == {"0100007F"}


def test_one_rank_has_no_group_no_process_and_no_port():
    gc.collect()  # what other tests left
    before = children(), listening()
    llm = stage_f_graph_tp.LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=16)
    ask(llm, [[1, 2, 3]])
    assert type(llm.runner) is StepRunner
    assert not dist.is_initialized() and children() == before[0] and listening() <= before[1]
    llm.close()
    llm.close()


PARENT = """
import os, sys, time
from stage_f_graph_tp.ranks import build_worker
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import open_rendezvous
from stage_f_graph_tp.tensor_parallel.watch.workers import Workers
ranks = Workers(open_rendezvous(2), build_worker)
[worker] = open(f"/proc/self/task/{os.getpid()}/children").read().split()
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
