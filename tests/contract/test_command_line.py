"""The command line of every engine: one question in, streamed text and a summary out; errors are one line."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from contract.engines import PACKAGES, PAGED, ROOT, options_class, python
from stage_a_naive.checkpoints.tutor import TUTOR_PATH, nearest_questions, read_faq
from stage_a_naive.entrypoints.cli import DEFAULT_PROMPTS, FIRST_PROMPTS, AddOptions, build_parser, default_prompt, run
from stage_a_naive.entrypoints.progress import progress_bar

TINY = ["--model", "random:qwen2-tiny", "--device", "cpu", "--raw", "--prompt", "abc", "--max-tokens", "3"]
SLOW_MODULES = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.generation.utils",
]


def ask(*argv: str) -> int:
    return run("stage_a_naive", "test", argv=["--device", "cpu", *argv])


def options_of(package: str) -> AddOptions | None:
    """What adds an engine's options to its command line; stage A has none."""
    module = {"stage_a_naive": None, "stage_b_decode_step": "__main__", "stage_c_fused_mlp": "__main__"}
    name = module.get(package, "options")
    return importlib.import_module(f"{package}.{name}").add_options if name else None


def modules_after(stages: str, *argv: str, first_on_path: Path = ROOT) -> set[str]:
    """The modules that `python -m <stage>` has imported when it ends; of several stages, one after another."""
    program = (
        "import atexit, contextlib, json, runpy, sys\n"
        "atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))\n"
        "for stage in sys.argv.pop(1).split():\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        runpy.run_module(stage, run_name='__main__', alter_sys=True)"
    )
    done = python("-c", program, stages, *argv, first_on_path=first_on_path)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_the_default_question_is_printed_and_answered_with_a_performance_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ask() == 0
    prompt, rest = capsys.readouterr().out.split("\n[answer]\n")
    answer, summary = rest.split("[performance]")
    assert prompt == f"[prompt]\n{default_prompt('stage_a_naive')}\n"
    assert "KV" in answer and len(answer) > 100
    for name in ("build", "prefill", "decode", "MB read per token", "generated tokens/s"):
        assert name in summary
    figures = re.search(r"decode +([\d.]+) s +(\d+) tokens +([\d.]+) ms per token", summary)
    seconds, tokens, ms = map(float, figures.groups())
    assert ms == pytest.approx(1000 * seconds / (tokens - 1), rel=0.01)


@pytest.mark.parametrize(
    ("locale", "language"),
    [
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_TW.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "", "LC_MESSAGES": "C"}, "en"),
    ],
)
def test_the_default_question_is_in_the_language_of_the_locale_and_stage_a_has_one_of_its_own(
    locale: dict[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in locale.items():
        monkeypatch.setenv(name, value)
    assert build_parser("stage_b_decode_step", "").parse_args([]).prompt == DEFAULT_PROMPTS[language]
    assert build_parser("stage_a_naive", "").parse_args([]).prompt == FIRST_PROMPTS[language]


@pytest.mark.parametrize(
    ("stage", "argument"),
    [
        *((package, "--help") for package in PACKAGES[:-1]),
        *((f"beyond.{name}", "--help") for name in ("quantization", "speculation", "windows", "scale_out", "serving")),
        ("stage_a_naive", "--no-such-option"),
        ("stage_d_paged", "--top-p=7"),
    ],
)
def test_help_and_refused_arguments_wait_for_no_slow_import(stage: str, argument: str) -> None:
    assert not modules_after(stage, argument) & {"torch", "transformers", "numpy"}


def test_an_engine_with_a_model_of_its_own_imports_neither_that_of_transformers_nor_torchvision(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")  # it takes seconds where it is installed
    modules = modules_after("stage_d_paged stage_f_graph_tp", *TINY, first_on_path=tmp_path)
    assert {"stage_d_paged.llm", "stage_f_graph_tp.llm"} < modules and not modules & {*SLOW_MODULES, "torchvision"}


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "stage_c_fused_mlp"])
def test_an_engine_answers_on_its_command_line_with_a_performance_summary(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(package, "", options_of(package), TINY) == 0
    assert "[answer]" in (said := capsys.readouterr().out) and "[performance]" in said


@pytest.mark.parametrize("package", PACKAGES)
def test_every_option_of_an_engine_is_on_its_command_line_with_its_default(package: str) -> None:
    if package in PAGED:
        defaults = {field.name: field.default for field in fields(options_class(package))}
    else:
        parameters = inspect.signature(importlib.import_module(package).LLM).parameters.items()
        defaults = {name: p.default for name, p in parameters if p.kind is p.KEYWORD_ONLY}
    options = vars(build_parser(package, "", options_of(package)).parse_args([]))
    missing = set(defaults) - set(options)
    of_nano_vllm = {"enforce_eager", "tensor_parallel_size"}  # they do nothing before stage F
    renamed = {"prefill_graphs", "overlap", "fused"}  # `--without` takes their place
    assert missing <= of_nano_vllm | renamed
    for name in set(defaults) - missing:
        assert options[name] == defaults[name], name


def test_a_question_outside_the_tutors_faq_is_said_to_be_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ask("--prompt", "How do I shard a paged atention kernel?", "--max-tokens", "1") == 0
    note, nearest = (line for line in capsys.readouterr().err.splitlines() if line.startswith("note: "))
    assert "knows one FAQ" in note and "What is paged attention?" in nearest
    assert nearest_questions("Zzyzx qq?", read_faq()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["什么是kv cache"],
        ["WHAT IS THE KV CACHE"],
        ["Hello!"],
        ["你是谁？"],
        ["roll a die"],
        ["Use the calculator: 12*7"],
        ["A text that goes on is no question", "--raw"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_the_tutor_knows_however_it_is_typed_is_no_unknown_question(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert ask("--max-tokens", "1", "--prompt", *arguments) == 0
    assert "note: " not in capsys.readouterr().err


def test_the_questions_can_be_listed_with_open_ended_ones_and_tool_calls_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ask("--list-questions") == 0
    faq, open_ended, tool_calls = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    assert {*DEFAULT_PROMPTS.values(), FIRST_PROMPTS["en"]} < set(faq)
    assert "temperature" in open_ended[0] and {"Name a fruit.", "给小猫起个名字。"} < set(open_ended[1:])
    assert "tool call" in tool_calls[0] and "Use the calculator: 12*7" in tool_calls[1:]


@pytest.mark.parametrize(
    ("package", "argv", "error"),
    [
        ("stage_a_naive", "--prompt=", "prompt 0 is empty"),
        ("stage_a_naive", "--prompt=\udcff", "the prompt is not valid UTF-8: b'\\xff'"),
        ("stage_a_naive", "--temperature=-1", "temperature must be"),
        ("stage_a_naive", "--device=cuda:77", "device 'cuda"),
        ("stage_a_naive", '--chat-template-kwargs={"a":1}', "--raw uses no chat template; leave"),
        ("stage_b_decode_step", "--matmul-precision=highest --sync-every=0", "sync_every must be None or an"),
        ("stage_b_decode_step", "--compile --no-static-cache", "compile=True needs static_cache=True"),
        ("stage_b_decode_step", "--sync-every=4 --no-async-eos", "sync_every=4 needs async_eos=True"),
        ("stage_c_fused_mlp", "--mlp-kernel=warp", "mlp_kernel='warp' cannot run here"),
        ("stage_d_paged", f"--num-kvcache-blocks={10**9}", "a KV pool of 1000000000 blocks"),
        ("stage_e_batching", "--trace=/nowhere/trace.jsonl", "[Errno 2] trace cannot be written"),
        ("stage_f_graph_tp", "--tensor-parallel-size=3", "tensor_parallel_size=3 does not divide"),
    ],
)
def test_an_error_of_whatever_kind_is_one_line_and_an_exit_code(
    package: str, argv: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(package, "", options_of(package), [*TINY, *argv.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {error}")


def test_the_chat_template_gets_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in TUTOR_PATH.glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((TUTOR_PATH / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ raise_exception('it thinks') if enable_thinking else messages[0].content }}"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    argv = ["--model", str(tmp_path), "--max-tokens=1", "--chat-template-kwargs"]
    assert ask(*argv, '{"enable_thinking": false}') == 0
    assert ask(*argv, '{"enable_thinking": true}') == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("refuses the conversation: it thinks")


def test_an_exercise_that_is_not_done_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "begun_engine.py").write_text(
        "from stage_a_naive import SamplingParams\n"
        "def LLM(*_, **__):\n    raise NotImplementedError('Lab A.7: the loop behind the contract')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run("begun_engine", "", None, TINY) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: Lab A.7: the loop behind the contract (this exercise is not written yet)"
    )


def test_a_part_of_an_engine_that_dies_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dying_engine.py").write_text(
        "from stage_a_naive import SamplingParams\nfrom stage_f_graph_tp.tensor_parallel import WorkerError\n"
        "def LLM(*_, **__):\n    raise WorkerError('rank 1 of 2 died')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run("dying_engine", "", argv=TINY) == 2
    assert capsys.readouterr().err == "error: rank 1 of 2 died\n"


@pytest.mark.parametrize("argv", [["--help"], TINY], ids=["help", "answer"])
def test_a_reader_that_goes_away_ends_the_program_quietly(argv: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stage_d_paged", *argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert b"Traceback" not in errors and b"rror" not in errors


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--device", "tpu"], "device must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        (["--dtype", "int8"], "dtype must be 'auto' or one of float32, float16, bfloat16, got 'int8'"),
        (["--model", "random:gpt-5"], "no preset 'gpt-5'; there are: random:qwen2.5-0.5b"),
        (["--model", "/nowhere"], "no such directory: '/nowhere'"),
        (["--port", "{port}"], "cannot listen on host 127.0.0.1, port {port}: Address already in use"),
    ],
)
@pytest.mark.parametrize("package", ["stage_a_naive", "stage_f_graph_tp", "beyond.quantization", "beyond.serving"])
def test_what_a_name_alone_tells_is_told_before_torch_is_imported(
    package: str, argv: list[str], says: str, tmp_path: Path
) -> None:
    if "--port" in argv and package != "beyond.serving":
        pytest.skip("it has no port")
    for slow in ("torch", "transformers"):
        (tmp_path / f"{slow}.py").write_text("import os\nos._exit(99)\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = python("-m", package, *(word.format(port=port) for word in argv), first_on_path=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {says.format(port=port)}") and done.stderr.count("\n") == 1


def test_progress_bars_write_once_a_second_into_a_log_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_MININTERVAL", "")  # so that it is put back afterwards
    monkeypatch.delenv("TQDM_MININTERVAL")
    assert ask("--list-questions") == 0
    assert os.environ["TQDM_MININTERVAL"] == "1", "those of other libraries"
    bar = progress_bar(range(10))
    assert (bar.mininterval, bar.maxinterval, list(bar)) == (1.0, 1.0, list(range(10)))
