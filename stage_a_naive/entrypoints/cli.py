"""The command line that every stage shares: one question in, streamed text and a performance summary out.

A stage adds its own options through `add_options`; each is passed to its `LLM` under the option's name. The arguments
are read before anything slow is imported, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stage_a_naive.checkpoints.names import check_names
from stage_a_naive.checkpoints.presets import PRESETS
from stage_a_naive.checkpoints.tutor import is_known, nearest_questions, read_faq, read_open_ended, read_tool_calls
from stage_a_naive.contract.errors import EngineBroken, one_line
from stage_a_naive.entrypoints.interrupts import CANNOT_WRITE, cannot_write, drop_output, interrupts_end_the_process
from stage_a_naive.entrypoints.language import padded, tr

if TYPE_CHECKING:
    from stage_a_naive.contract.outputs import GenerationOutput, Metrics
    from stage_a_naive.entrypoints.frontend import Frontend

# The default question. Its answer mentions later stages, so stage A is asked about its own topic instead. The tutor
# knows all four.
DEFAULT_PROMPTS = {
    "zh": "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？",
    "en": "How do I build a mini vLLM inference loop from scratch? Answer in bullet points.",
}
FIRST_PROMPTS = {"zh": "什么是 KV cache？", "en": "What is a KV cache?"}
SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos")
AddOptions = Callable[[argparse._ArgumentGroup], None]
Idea = Callable[[Any, "Metrics"], str]  # says what the stage (its `LLM`) adds to the one before, with a count


def default_prompt(stage: str) -> str:
    """Return the default question for a stage: in Chinese if the locale is Chinese, else in English."""
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    prompts = FIRST_PROMPTS if stage == "stage_a_naive" else DEFAULT_PROMPTS
    return prompts["zh" if locale.startswith("zh") else "en"]


def build_parser(stage: str, description: str, add_options: AddOptions | None = None) -> argparse.ArgumentParser:
    """Make the parser of `python -m <stage>`; its option groups are named `model`, `sampling` and `stage`."""
    parser = argparse.ArgumentParser(prog=f"python -m {stage}", description=description)
    parser.add_argument("--prompt", default=default_prompt(stage), help="what to ask (default: %(default)s)")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    arguments = """of the chat template, as JSON: '{"enable_thinking": false}' for Qwen3"""
    parser.add_argument("--chat-template-kwargs", type=json_object, default={}, metavar="JSON", help=arguments)
    parser.add_argument("--list-questions", action="store_true", help="list what the tutor can be asked, and end")
    model = parser.add_argument_group("model")
    sources = f"tutor | random:PRESET | a directory | a hub id; PRESET is one of {', '.join(PRESETS)}"
    sampling = parser.add_argument_group("sampling")
    for group, name, kind, default, meaning in (
        (model, "model", str, "tutor", sources),
        (model, "device", str, "auto", "auto | cpu | cuda"),
        (model, "dtype", str, "auto", "auto | float32 | float16 | bfloat16"),
        (model, "seed", int, 0, "seed of random weights and unseeded requests"),
        (sampling, "max-tokens", int, 256, "the most tokens to generate"),
        (sampling, "temperature", float, 0.0, "0 takes the best token; higher is more random"),
        (sampling, "top-k", int, 0, "sample from the K best tokens; 0 is off"),
        (sampling, "top-p", float, 1.0, "sample from the best tokens that have this probability together"),
        (sampling, "min-p", float, 0.0, "drop tokens less likely than this share of the best token's probability"),
        (sampling, "repetition-penalty", float, 1.0, "above 1 avoids tokens that are in the text already"),
    ):
        group.add_argument(f"--{name}", type=kind, default=default, help=f"{meaning} (default: %(default)s)")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens whatever the model says")
    if add_options is not None:
        add_options(parser.add_argument_group("stage"))
    return parser


def json_object(text: str) -> dict[str, Any]:
    """Read the value of an option that is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object, such as '{{\"enable_thinking\": false}}', got {text!r}"
        )
    return value


def run(
    stage: str,
    description: str,
    add_options: AddOptions | None = None,
    argv: list[str] | None = None,
    idea: Idea | None = None,
) -> int:
    """Answer one prompt with the package `stage`.

    Returns:
        The exit code: 0, also if the reader of a pipe has gone; 2 after a one-line error; 130 after Ctrl-C.
    """
    if sys.stdout is None:  # closed by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it stays open)
    try:
        try:
            # Characters that the terminal cannot show become question marks. (An ordinary stdout is a `TextIOWrapper`.)
            sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
            if not sys.stderr.isatty():  # a log file
                os.environ.setdefault("TQDM_MININTERVAL", "1")  # other libraries' bars: once a second
            options = vars(build_parser(stage, description, add_options).parse_args(argv))
            check_names(options["model"], options["device"], options["dtype"])  # before the imports, which take seconds
            if options.pop("list_questions"):
                _list_questions()
            else:
                _answer(importlib.import_module(stage), options, idea)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of `| head -1`
        drop_output()
    except OSError as error:
        print(f"error: {cannot_write(error) if error.errno in CANNOT_WRITE else one_line(error)}", file=sys.stderr)
        return 2
    except (ValueError, MemoryError, NotImplementedError) as error:
        unwritten = " (this exercise is not written yet)" if str(error).startswith("Lab ") else ""
        print(f"error: {one_line(error)}{unwritten}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        advice = "`make doctor` says what else is missing, and how to get it"
        print(f"error: {sys.executable} lacks the package {error.name!r}; {advice}", file=sys.stderr)
        return 2
    except EngineBroken as error:
        print(f"error: {error}", file=sys.stderr)  # what happened, then what the part that died reported
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _list_questions() -> None:
    open_ended, tool_call = "# open-ended, with many answers: try --temperature 0.8", "# answered with a tool call"
    print(*(entry["question"] for entry in read_faq()), sep="\n")
    print("", open_ended, *(entry["question"] for entry in read_open_ended()), sep="\n")
    print("", tool_call, *(entry["question"] for entry in read_tool_calls()), sep="\n")


def _answer(stage: Any, options: dict, idea: Idea | None) -> None:
    prompt, raw, model, of_template = map(options.pop, ("prompt", "raw", "model", "chat_template_kwargs"))
    if raw and of_template:
        raise ValueError("--raw uses no chat template; leave --chat-template-kwargs out")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        if sys.getfilesystemencoding() != "utf-8":
            advice = "set LC_ALL=C.UTF-8, or another locale in UTF-8"
            raise ValueError(f"this locale's encoding is {sys.getfilesystemencoding()}: {advice}") from None
        raise ValueError(f"the prompt is not valid UTF-8: {prompt.encode(errors='surrogateescape')!r}") from None
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # average of the last minute: mostly other programs
    with interrupts_end_the_process():
        params = stage.SamplingParams(**{name: options.pop(name) for name in SAMPLING_OPTIONS})
        llm = stage.LLM(model, **options)
    if model == "tutor" and not raw:
        _explain_unknown(prompt)
    print(f"[prompt]\n{prompt}\n\n[answer]", flush=True)
    prompts = prompt if raw else llm.chat_prompts([{"role": "user", "content": prompt}], of_template)
    [output] = llm.generate(prompts, params, use_tqdm=False, on_text=_print_piece)
    print("\n" + performance_summary(llm, output, idea, load))
    llm.close()


def _print_piece(index: int, piece: str) -> None:
    print(piece, end="", flush=True)


def _explain_unknown(question: str) -> None:
    """Print on stderr that the tutor was not trained on this question, and the nearest ones."""
    entries = read_faq() + read_open_ended() + read_tool_calls()
    if is_known(question, entries):
        return
    unknown = tr("note: the tutor is a teaching prop that knows one FAQ by heart; this question is not in it")
    print(unknown, file=sys.stderr)
    nearest = nearest_questions(question, entries)
    if nearest:
        found = tr("note: nearest questions: {questions} (all: --list-questions)").format(questions=" | ".join(nearest))
        print(found, file=sys.stderr)


def _busy_line(load: float) -> str:
    """Return a note that other programs use the processors; empty if enough are free."""
    processors = os.cpu_count() or 1
    if load < 0.75 * processors:
        return ""
    text = tr("this machine is busy (load {load:.1f} on {processors} processors): an idle one is faster")
    return text.format(load=load, processors=processors)


def performance_summary(llm: Frontend, output: GenerationOutput, idea: Idea | None = None, load: float = 0.0) -> str:
    """Return the figures of one request, as the command line prints them.

    Args:
        load: runnable processes before the request ran, from `os.getloadavg`.
    """
    m = output["metrics"]
    generated = m["num_generated_tokens"]
    prefill_rate = m["num_prompt_tokens"] / m["prefill_time"] if m["prefill_time"] else 0.0
    tokens, dtype = tr("tokens"), str(llm.dtype).removeprefix("torch.")
    total = tr("{rate:.1f} generated tokens/s, finished by {reason!r}")
    rows = [
        (tr("model"), tr("{name} on {device} in {dtype}").format(name=llm.source.name, device=llm.device, dtype=dtype)),
        (tr("build"), f"{llm.build_time:9.3f} s"),
        (
            tr("prefill"),
            f"{m['prefill_time']:9.3f} s   {m['num_prompt_tokens']:5d} {tokens}   {prefill_rate:9.1f} {tokens}/s",
        ),
        (
            tr("decode"),
            f"{m['decode_time']:9.3f} s   {generated:5d} {tokens}   {m['tpot'] * 1e3:9.2f} {tr('ms per token')}",
        ),
        (tr("memory"), llm.memory_line(m)),
        (tr("idea"), idea and idea(llm, m)),
        (tr("total"), total.format(rate=m["tokens_per_sec"], reason=output["finish_reason"])),
        (tr("note"), _busy_line(load)),
    ]
    return "\n".join(["", tr("[performance]")] + [f"{padded(name, 8)} {text}" for name, text in rows if text])
