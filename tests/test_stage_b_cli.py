"""Stage B's command line: every idea has a switch, and what cannot work is one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stage_b_decode_step
from stage_a_naive.cli import build_parser, run
from stage_b_decode_step import LLM
from stage_b_decode_step.__main__ import add_options

QUICK = ["--model", "random:qwen2-tiny", "--device", "cpu", "--max-tokens", "5", "--raw", "--prompt", "abc"]


def test_every_option_of_the_engine_is_on_the_command_line_with_its_default() -> None:
    options = vars(build_parser("b", "", add_options).parse_args([]))
    for name, default in LLM.__init__.__kwdefaults__.items():
        assert options[name] == default, name


def test_switches_reach_the_engine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def build(*args: object, **options: object) -> LLM:
        made.append(LLM(*args, **options))
        return made[0]

    monkeypatch.setattr(stage_b_decode_step, "LLM", build, raising=False)
    arguments = [*QUICK, "--no-static-cache", "--no-async-eos", "--no-sdpa", "--matmul-precision", "highest"]
    assert run("stage_b_decode_step", "", add_options, arguments) == 0
    assert not (made[0].static_cache or made[0].async_eos or made[0].sdpa) and made[0].buffers
    assert "[performance]" in capsys.readouterr().out


def test_switches_that_exclude_each_other_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stage_b_decode_step", "", add_options, [*QUICK, "--compile", "--no-static-cache"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: compile=True needs static_cache=True") and error.count("\n") == 1


def test_the_stage_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "stage_b_decode_step", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "[performance]" in done.stdout, done.stderr
