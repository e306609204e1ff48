"""On two GPUs: the tokens of one, right sums in any mixture, and an error when a rank is killed or stopped.

Everything that could hang runs in separate processes with a time limit, which then report where they were.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from contract.engines import ids
from stand_ins import forwards_of
from test_stage_f_gpu import ASKED, GREEDY, PARAMS, PROMPTS, SMALL

import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp.cuda_graph import DecodeGraphs

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def tutors_answers() -> list[list[int]]:
    return ids(stage_e_batching.LLM("tutor", device="cpu").chat(ASKED, PARAMS, False))


@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True, "without": "overlap,fused_layers,skinny_gemm"}], ids=str
)
def test_two_ranks_give_the_tutors_tokens(tutors_answers, options):
    options = SMALL | options | {"dtype": "bfloat16"}
    with contextlib.closing(stage_f_graph_tp.LLM("tutor", tensor_parallel_size=2, **options)) as llm:
        assert bool(forwards_of(llm.runner, DecodeGraphs)) != ("enforce_eager" in options)
        assert llm.runner.model.layers[0].mlp.down_proj.peers is llm.runner.ranks.group.one_shot.peers
        for _ in range(2):
            assert ids(llm.chat(ASKED, PARAMS, False)) == tutors_answers


@pytest.mark.parametrize("preset", ["qwen3-tiny", "llama-tiny"])
def test_two_ranks_give_one_gpus_tokens(preset):
    """Not a CPU's: random weights are other ones there."""
    options = SMALL | {"num_kvcache_blocks": 64, "dtype": "float32"}
    plain = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=8, ignore_eos=True) for i in range(5)]
    filtered = [SamplingParams(temperature=0.8, top_k=20, seed=i, max_tokens=8, ignore_eos=True) for i in range(5)]
    single = stage_e_batching.LLM(f"random:{preset}", **options)
    expected = [ids(single.generate(PROMPTS, params, False)) for params in (GREEDY, plain, filtered)]
    with contextlib.closing(stage_f_graph_tp.LLM(f"random:{preset}", tensor_parallel_size=2, **options)) as llm:
        assert [ids(llm.generate(PROMPTS, params, False)) for params in (GREEDY, plain, filtered)] == expected


def test_the_all_reduces_of_a_step_are_inside_its_graph_with_and_without_prefill_and_rank_0_alone_reports(capfd):
    with contextlib.closing(stage_f_graph_tp.LLM("tutor", tensor_parallel_size=2, **SMALL)) as llm:
        llm.generate([[5, 6, 7]], GREEDY, False)
        calls = []
        all_reduce = llm.runner.ranks.group.all_reduce
        llm.runner.ranks.group.all_reduce = lambda *x: calls.append(x) or all_reduce(*x)
        llm.generate([[5, 6, 7]], GREEDY, False)
        assert not calls
        assert capfd.readouterr().err.count(" for decode, ") == 1


def run(script: str, arguments: list[list[object]], seconds: int) -> list[str]:
    """The outputs of processes that run the same script at the same time, one for each list of arguments."""
    watchdog = f"import faulthandler; faulthandler.dump_traceback_later({seconds}, exit=True)\n"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", watchdog + script, *map(str, own)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for own in arguments
    ]
    outputs = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=seconds + 10)
        except subprocess.TimeoutExpired:
            output = "did not even write where it hung"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        outputs.append(output)
    return outputs


RANK = """
import random, sys, time
import torch
import torch.distributed as dist
from stage_f_graph_tp.kernels.skinny_gemm import Tiles, product_add
from stage_f_graph_tp.tensor_parallel import all_reduce
from stage_f_graph_tp.tensor_parallel.rank_group import RankGroup
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import Rendezvous

rank, port, ranks = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 2
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
group = RankGroup(Rendezvous(dist.TCPStore("127.0.0.1", port, is_master=False), rank, ranks), device)
"""

MIXTURE = f"""{RANK}
group.connect()
assert group.one_shot is not None, "these GPUs cannot write one another's memory"
chance = random.Random(0)  # the same on both ranks

def numbers(of_rank, count, seed):
    generator = torch.Generator(device).manual_seed(ranks * seed + of_rank)
    return torch.randint(-8, 9, (count,), generator=generator, device=device)  # whose sums no dtype rounds

counters = torch.zeros(4096, dtype=torch.int32, device=device)

class Call:
    def __init__(self, seed):
        dtype = chance.choice((torch.bfloat16, torch.float32))
        longest = all_reduce.CAPACITY // dtype.itemsize
        count = chance.choice((1, 896, 2048, 5 * 2048 + 3, longest // 2, longest, longest + 8))
        self.own = numbers(rank, count, seed).to(dtype)
        self.residual = chance.choice((None, 1.0))
        self.expected = sum(numbers(r, count, seed) for r in range(ranks)).to(dtype) + (self.residual or 0)
        self.one_shot = chance.choice((group.one_shot, group.one_shot, None))  # None leaves it to NCCL

    def run(self):
        residual = None if self.residual is None else torch.full_like(self.own, self.residual)
        own, group.one_shot = group.one_shot, self.one_shot
        total = group.all_reduce(self.own.clone(), residual)
        group.one_shot = own
        return (total != self.expected).any()

class Product:
    '''A skinny GEMM that adds up the ranks' products.'''
    def __init__(self, seed):
        tokens, out, columns = chance.choice((1, 5, 32)), chance.choice((896, 3584)), chance.choice((448, 2432))
        def part(of_rank):
            both = numbers(of_rank, (tokens + out) * columns, seed).to(torch.bfloat16)
            return both[: tokens * columns].view(tokens, columns), both[tokens * columns :].view(out, columns)
        self.x, self.weight = part(rank)
        self.residual = numbers(0, tokens * out, seed + 1).view(tokens, out).to(torch.bfloat16)
        sent = torch.bfloat16 if tokens > 16 else torch.float32
        sums = sum((x.float() @ weight.float().T).to(sent).float() for x, weight in map(part, range(ranks)))
        self.expected = (self.residual + sums).to(torch.bfloat16)
        self.tiles = chance.choice((None, Tiles(32, stages=12)))

    def run(self):
        residual, peers = self.residual.clone(), group.one_shot.peers
        total, squares = product_add(self.x, self.weight, residual, counters, self.tiles, peers)
        exact = self.expected.float().pow(2).sum(1)
        return (total != self.expected).any() | ((squares.sum(0) - exact).abs() > exact * 1e-5).any()

print("starts", flush=True)
wrong = torch.zeros((), dtype=torch.int64, device=device)
graphs = []
for seed in range(6):
    calls = [(Product if i % 3 == 2 else Call)(100 * seed + i) for i in range(7)]
    for call in calls:
        wrong += call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = torch.stack([call.run() for call in calls]).sum()
    graphs.append((graph, found, calls))
print("recorded", flush=True)
for turn in range(1000):
    if turn % 50 == 12 * rank:
        time.sleep(0.01)  # the other rank runs ahead
    if chance.random() < 0.5:
        graph, found, _ = chance.choice(graphs)
        graph.replay()
        wrong += found
    else:
        wrong += chance.choice((Call, Product))(1000 + turn).run()
torch.cuda.synchronize()
print("wrong:", int(wrong), flush=True)
del graph, graphs
group.stop_waiting()
group.wait_released(20)
print("done", flush=True)
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_short_and_long_tensors_are_added_up_in_graphs_and_out_in_any_mixture(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for output in run(MIXTURE, [[rank, store.port, ranks] for rank in range(ranks)], 150):
        assert output.split("wrong: ")[-1].split()[:2] == ["0", "done"], output


UNREADABLE = f"""{RANK}
all_reduce.TEST_SECONDS = 5.0
map_mailboxes = all_reduce.OneShotAllReduce._map
def map_another_mailbox(self, shared):
    map_mailboxes(self, shared)
    if rank == 1:
        self.another = torch.full_like(self._mailbox, 255)
        self.peers.addresses[0] = self.another.data_ptr()
all_reduce.OneShotAllReduce._map = map_another_mailbox
group.connect()
x = torch.full((8,), rank + 1.0, device=device)
group.all_reduce(x)
print("fell back:", group.one_shot is None, x.tolist() == [3.0] * 8, flush=True)
group.stop_waiting()
group.wait_released(20)
"""


def test_memory_that_reads_back_wrong_is_found_at_the_start_and_nccl_takes_over():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = run(UNREADABLE, [[rank, store.port] for rank in range(2)], 90)
    for output in outputs:
        assert "fell back: True True" in output, output
    assert "one-shot all-reduce: not used, NCCL adds up small tensors too (rank " in outputs[0]
    assert "not used" not in outputs[1], "one line, by rank 0"


KILLED = """
import os, signal, threading, time, traceback
from functools import partial
import torch
import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp import cuda_graph, ranks
from stage_f_graph_tp.tensor_parallel import WorkerError, all_reduce, rank_group
from stage_f_graph_tp.tensor_parallel.watch import rendezvous, workers as workers_module

workers_module.ANSWER_SECONDS = 10.0
ASKED = [[{"role": "user", "content": "What is a KV cache?"}]]
PARAMS = SamplingParams(temperature=0, max_tokens=24)
LONG = [(i * 7919) % 4000 + 5 for i in range(4000)]
OPTIONS = dict(device="cuda", dtype="bfloat16", num_kvcache_blocks=1024, max_num_seqs=4, tensor_parallel_size=2)

def workers():
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = open(f"/proc/{number}/stat").read().rpartition(")")[2].split()[:2]
            command = open(f"/proc/{number}/cmdline").read()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and "worker_process" in command:
            found.append(int(number))
    return found

killed_at = 0.0

def kill(by=signal.SIGKILL):
    global killed_at
    [worker] = workers()
    killed_at = time.monotonic()
    os.kill(worker, by)

def start_up(owner, name, number=1, **options):
    '''A start in which the worker is killed when rank 0 calls a function for the `number`-th time.'''
    def phase():
        original, calls = getattr(owner, name), []
        def replacement(*args, **kwargs):
            calls.append(None)
            if len(calls) == number:
                kill()
            return original(*args, **kwargs)
        setattr(owner, name, replacement)
        try:
            stage_f_graph_tp.LLM("tutor", **(OPTIONS | options)).close()
        finally:
            setattr(owner, name, original)
    return phase

def running(work):
    def phase():
        llm = stage_f_graph_tp.LLM("tutor", **OPTIONS)
        try:
            check_answer(llm)
            work(llm)
        finally:
            start = time.monotonic()
            llm.close()
            print(f"   closed in {time.monotonic() - start:.1f} s", flush=True)
    return phase

def check_answer(llm):
    assert [output["token_ids"] for output in llm.chat(ASKED, PARAMS, False)] == EXPECTED

def decode(llm, by=signal.SIGKILL, params=PARAMS):
    threading.Timer(0.5, kill, [by]).start()
    for _ in range(10_000):
        llm.chat(ASKED, params, False)

def prefill(llm):
    threading.Timer(0.5, kill).start()
    for start in range(10_000):
        llm.generate([LONG[start % 1000:], LONG[start % 1000 + 7:]], SamplingParams(max_tokens=1), False)

def full_queue(llm, by=signal.SIGKILL):
    x, y = torch.zeros(8, device="cuda"), torch.zeros(1024, 1024, device="cuda")
    with torch.inference_mode(), llm.runner.ranks.workers.awaited():
        llm.runner.ranks.group.all_reduce(x)  # the worker does not join
        threading.Timer(0.5, kill, [by]).start()
        for _ in range(10_000):
            y = y @ y
    torch.cuda.synchronize()
    llm.runner.ranks.workers.check()

def idle(llm):
    kill()
    time.sleep(1)
    llm.chat(ASKED, PARAMS, False)

PHASES = {
    "start-up": start_up(ranks, "resolve"),
    "loading": start_up(rendezvous.Rendezvous, "gather"),
    "connecting": start_up(rank_group, "_nccl_group"),
    "the first collective": start_up(rank_group.RankGroup, "_run"),
    "test of the all-reduce": start_up(all_reduce.OneShotAllReduce, "_test"),
    "warm-up": start_up(ranks, "choose_num_blocks", num_kvcache_blocks=-1, gpu_memory_utilization=0.1),
    "before a capture": start_up(cuda_graph.GraphRecorder, "__call__", 2),
    "capture": start_up(torch.cuda, "graph", 2),
    "decode": running(decode),
    "decode with NCCL's broadcasts": running(partial(decode, params=SamplingParams(top_k=5, max_tokens=24))),
    "prefill": running(prefill),
    "a full launch queue": running(full_queue),
    "idle": running(idle),
    "stopped in decode": running(partial(decode, by=signal.SIGSTOP)),
    "stopped, a full launch queue": running(partial(full_queue, by=signal.SIGSTOP)),
}

single = stage_f_graph_tp.LLM("tutor", **(OPTIONS | {"tensor_parallel_size": 1, "enforce_eager": True}))
EXPECTED = [output["token_ids"] for output in single.chat(ASKED, PARAMS, False)]
del single
for name, phase in PHASES.items():
    begin = time.monotonic()
    try:
        phase()
        print(f"{name}: NO ERROR", flush=True)
    except WorkerError as error:
        seconds = time.monotonic() - killed_at
        expected = "is stopped and did not answer within 10 s" if "stopped" in name else "died (SIGKILL)"
        verdict = "ok" if f"rank 1 of 2 {expected}" in str(error) and seconds < 25 and not workers() else "WRONG"
        print(f"{name}: {verdict}, {seconds:.1f} s after the kill, {time.monotonic() - begin:.1f} s in all", flush=True)
        print(error, flush=True)
    except BaseException:
        print(f"{name}: ANOTHER ERROR", flush=True)
        traceback.print_exc()
llm = stage_f_graph_tp.LLM("tutor", **OPTIONS)
check_answer(llm)
llm.close()
print("a new engine answers", flush=True)
"""


def test_a_rank_killed_or_stopped_at_any_time_is_an_error_within_seconds_and_a_new_engine_answers():
    [output] = run(KILLED, [[]], 450)
    assert output.count(": ok, ") == 15 and "a new engine answers" in output, output
