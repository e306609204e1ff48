"""The command line as a newcomer meets it."""

from __future__ import annotations

import pytest

from stage_a_naive import LLM
from stage_a_naive.cli import DEFAULT_PROMPT, run


def ask(*argv: str) -> int:
    return run(LLM, "stage_a_naive", "test", argv=["--device", "cpu", *argv])


def test_the_default_question_is_answered_with_a_performance_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask() == 0
    printed = capsys.readouterr().out
    answer, summary = printed.split("[performance]")
    assert "KV" in answer and len(answer) > 100
    for name in ("build", "prefill", "decode", "generated tokens/s"):
        assert name in summary
    assert DEFAULT_PROMPT.startswith("用要点概述")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "/nowhere"], "no such directory"),
        (["--model", "random:nothing"], "no preset"),
        (["--prompt", "", "--raw"], "empty"),
        (["--temperature", "-1"], "temperature"),
        (["--device", "cuda:77"], "device|GPU"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(*argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and any(word in error for word in says.split("|"))


def test_a_raw_prompt_is_continued_without_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--model", "random:llama-tiny", "--raw", "--prompt", "abc", "--max-tokens", "3", "--ignore-eos") == 0
    assert "    3 tokens" in capsys.readouterr().out
