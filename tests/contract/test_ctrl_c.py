"""Ctrl-C ends every command with one word and the exit status 130: from its first import on, and in its work."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from contract.engines import python
from stage_a_naive.entrypoints import interrupts

# What Python imports when it starts: sends the signal when a module is looked for that only the command wants.
SITECUSTOMIZE = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name in os.environ["AT"].split():
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
COMMANDS = [
    *(["-m", name] for name in ("stage_a_naive", "stage_b_decode_step", "stage_c_fused_mlp", "stage_d_paged")),
    *(["-m", name] for name in ("stage_e_batching", "stage_f_graph_tp", "stage_c_fused_mlp.extension", "tools.doctor")),
    *(["-m", f"beyond.{name}"] for name in ("serving", "quantization", "speculation", "scale_out")),
    *(["-m", f"labs.{name}"] for name in ("starter", "grade", "progress", "hint", "pack")),
    *(["-m", f"benchmarks.{name}"] for name in ("run", "report", "pictures", "micro", "serve")),
    ["-m", "tools.soak"],
    ["notebooks/run.py"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-1])
def test_a_command_that_is_interrupted_while_it_starts_says_so_and_nothing_else(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    done = python(*command, first_on_path=tmp_path, AT="argparse labs.exercises benchmarks.engines")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_a_program_that_imports_an_engine_keeps_its_own_interrupts(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "import stage_a_naive\ntry:\n    import argparse\nexcept KeyboardInterrupt:\n    print('theirs')\n"
    )
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    done = python("-m", "theirs", first_on_path=tmp_path, AT="argparse")
    assert (done.returncode, done.stdout, done.stderr) == (0, "theirs\n", "")


def test_in_a_commands_work_ctrl_c_is_an_exception_and_then_the_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    def work() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            closed.append(True)
        return 0

    before = signal.signal(signal.SIGINT, interrupts.end_at_once)
    try:
        assert interrupts.run_command(work) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert closed and capsys.readouterr().err == "\ninterrupted\n"
    assert interrupts.run_command(lambda: 3) == 3


def test_a_command_in_the_background_of_a_shell_stays_uninterrupted() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.interrupts_end_the_process():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert interrupts.run_command(lambda: None) is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
