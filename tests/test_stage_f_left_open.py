"""A program that never closes its engines of several ranks ends quietly, with status 0, and leaves no process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

BEGINNING = """
import atexit, os, signal, sys, threading

def wait_for_threads():
    # Python does not survive the end of a daemon thread in the middle of PyTorch's code.
    for thread in threads:
        thread.join(60)
        if thread.is_alive():
            print("Error: the engine has not ended the step", file=sys.stderr)

threads = []
atexit.register(wait_for_threads)  # the first of all, so it runs last: when the engines have been closed
import stage_f_graph_tp
from beyond import scale_out
from stage_a_naive.contract.errors import EngineBroken
from stage_a_naive.sampling import SamplingParams

OPTIONS = {"device": sys.argv[1], "num_kvcache_blocks": 64, "max_num_seqs": 4}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

def workers():
    return open(f"/proc/self/task/{os.getpid()}/children").read().split()

def ranks():
    return stage_f_graph_tp.LLM("random:qwen2-tiny", tensor_parallel_size=2, **OPTIONS)

def stages():
    return scale_out.LLM("random:qwen2-tiny", pipeline_parallel_size=2, **OPTIONS)
"""
PROGRAMS = {
    "in the middle of requests": """
engines = ranks(), stages()
streams = [llm.stream(PROMPTS, PARAMS) for llm in engines]
for llm, stream in zip(engines, streams):
    next(stream)
    llm.add_request(PROMPTS[0], PARAMS)
    llm.step()
print(*workers())
""",
    "a thread in a step": """
def answer():
    try:
        while True:
            llm.generate(PROMPTS, PARAMS, False, lambda *_: begun.set())
    except EngineBroken:
        pass

begun = threading.Event()
llm = ranks()
threads.append(threading.Thread(target=answer, daemon=True))
threads[0].start()
begun.wait()
print(*workers())
""",
    "failed, in a cycle, with a global that the interpreter drops last": """
def alarm(*_):
    raise TimeoutError

class Owner:
    pass

owner = Owner()
owner.itself, owner.llm = owner, stages()
owner.llm.sampling_fn = lambda logits, params, owner=owner: logits.argmax(-1)
owner.llm.generate(PROMPTS, PARAMS, False)
sys.kept = ranks()
print(*workers())
signal.signal(signal.SIGALRM, alarm)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    while True:
        owner.llm.generate(PROMPTS, PARAMS, False)
except (EngineBroken, TimeoutError):
    pass
os.kill(int(workers()[-1]), signal.SIGKILL)
try:
    while True:
        sys.kept.generate(PROMPTS, PARAMS, False)
except EngineBroken:
    pass
del owner
sys.exit(0)
""",
}


def run_and_leave_open(program: str, device: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", BEGINNING + PROGRAMS[program], device],
        cwd=ROOT,
        env=os.environ | {"TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert not re.search("terminate called|Traceback|Error|Exception|Warning", process.stderr), process.stderr
    workers = process.stdout.split()
    assert workers and not any(Path(f"/proc/{number}").exists() for number in workers)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=[pytest.mark.slow] * (name != "a thread in a step")) for name in PROGRAMS]
)
def test_a_program_that_leaves_its_engines_open_ends_quietly(program):
    run_and_leave_open(program, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_leaves_its_engines_open_on_two_gpus_ends_quietly(program):
    for _ in range(int(os.environ.get("LEFT_OPEN_RUNS", "2"))):
        run_and_leave_open(program, "cuda")
