"""The command line that every stage shares: one question in, streamed text and a performance summary out.

A stage adds its own options through `add_options`; each is passed to its `LLM` under the option's name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from stage_a_naive.frontend import Frontend
from stage_a_naive.outputs import GenerationOutput
from stage_a_naive.sampling import SamplingParams

DEFAULT_PROMPT = "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？"
AddOptions = Callable[[argparse._ArgumentGroup], None]


def build_parser(stage: str, description: str, add_options: AddOptions | None = None) -> argparse.ArgumentParser:
    """The parser of `python -m <stage>`; option groups are named `model`, `sampling` and `stage`."""
    parser = argparse.ArgumentParser(prog=f"python -m {stage}", description=description)
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask (default: the course's own question)")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="tutor", help="tutor | random:<preset> | directory | hub id")
    model.add_argument("--device", default="auto", help="auto | cpu | cuda")
    model.add_argument("--dtype", default="auto", help="auto | float32 | float16 | bfloat16")
    model.add_argument("--seed", type=int, default=0, help="for random weights and unseeded requests")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens whatever the model says")
    if add_options is not None:
        add_options(parser.add_argument_group("stage"))
    return parser


def run(
    llm_class: Callable[..., Frontend],
    stage: str,
    description: str,
    add_options: AddOptions | None = None,
    argv: list[str] | None = None,
) -> int:
    """Answer one prompt on the command line. Returns the exit code: 0; 2 after a one-line error; 130 after Ctrl-C."""
    options = vars(build_parser(stage, description, add_options).parse_args(argv))
    prompt, raw = options.pop("prompt"), options.pop("raw")
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos")
    sampling_options = {name: options.pop(name) for name in names}
    try:
        params = SamplingParams(**sampling_options)
        llm = llm_class(options.pop("model"), **options)
        ask = prompt if raw else [{"role": "user", "content": prompt}]
        answer = llm.generate if raw else llm.chat
        [output] = answer(ask, params, use_tqdm=False, on_text=_print_piece)
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print("\n" + performance_summary(llm, output))
    close = getattr(llm, "close", None)
    if close is not None:
        close()
    return 0


def _print_piece(index: int, piece: str) -> None:
    print(piece, end="", flush=True)


def performance_summary(llm: Frontend, output: GenerationOutput) -> str:
    """The figures of one request, as the command line prints them."""
    m = output["metrics"]
    generated = m["num_generated_tokens"]
    prefill_rate = m["num_prompt_tokens"] / m["prefill_time"] if m["prefill_time"] else 0.0
    rows = [
        ("model", f"{llm.source.name} on {llm.device} in {str(llm.dtype).removeprefix('torch.')}"),
        ("build", f"{llm.build_time:9.3f} s"),
        ("prefill", f"{m['prefill_time']:9.3f} s   {m['num_prompt_tokens']:5d} tokens   {prefill_rate:9.1f} tokens/s"),
        ("decode", f"{m['decode_time']:9.3f} s   {generated:5d} tokens   {m['tpot'] * 1e3:9.2f} ms a token"),
        ("total", f"{m['tokens_per_sec']:.1f} generated tokens/s, finished by {output['finish_reason']!r}"),
    ]
    return "\n".join(["", "[performance]"] + [f"{name:8s} {text}" for name, text in rows])
