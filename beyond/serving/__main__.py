"""`python -m beyond.serving`: serve an engine over HTTP, from the command line."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from beyond.serving.address import listen
from beyond.serving.engine_process import EngineProcess, freeze_heap, load_class
from stage_a_naive.checkpoints.names import check_names
from stage_a_naive.contract.errors import one_line
from stage_a_naive.entrypoints.cli import json_object
from stage_a_naive.entrypoints.interrupts import end_at_once

if TYPE_CHECKING:
    from beyond.serving.remote_engine import RemoteLLM
    from beyond.serving.server import Server
    from stage_e_batching.llm import LLM

STAGES = {"e": "stage_e_batching:LLM", "f": "stage_f_graph_tp:LLM"}


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit code: 0, 1 if the engine died, or 2 after another one-line error."""
    try:
        options, engine_options = parse(argv)
        listen(options.host, options.port).close()  # a port that is taken is told before PyTorch is imported
        with closing(EngineProcess(options.engine or STAGES[options.stage], engine_options)) as process:
            return serve_process(process, options)
    except (ValueError, OSError, MemoryError, ImportError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def parse(
    argv: list[str] | None, own: argparse.ArgumentParser | None = None
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Read the command line: the server's options, and those of the engine that it names.

    Args:
        own: name and options of another program, in addition to these.
    """
    name = own.prog if own else "python -m beyond.serving"
    first = argparse.ArgumentParser(prog=name, add_help=False, allow_abbrev=False)
    which = first.add_mutually_exclusive_group()
    which.add_argument("--stage", choices=STAGES, default="e", help="which engine (default: %(default)s)")
    which.add_argument("--engine", metavar="MODULE:LLM", help="another engine, such as beyond.quantization:LLM")
    chosen, _ = first.parse_known_args(argv)

    parents = [own, first] if own else [first]
    parser = argparse.ArgumentParser(prog=name, description="An engine behind the OpenAI API.", parents=parents)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    server.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    key = os.environ.get("API_KEY") or None
    server.add_argument("--api-key", default=key, help="clients must send it (default: $API_KEY)")
    server.add_argument("--max-queue", type=int, default=256, help="requests that may wait (default: %(default)s)")
    deadline = "seconds that running answers have when the server ends (default: %(default)s)"
    server.add_argument("--deadline", type=float, default=30, help=deadline)
    server.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="without a key: answer requests to this name too, beside localhost and numbers; may be repeated",
    )
    most = "connections that may be open; further ones get 503 (default: 4096)"
    server.add_argument("--max-connections", type=int, help=most)
    silent = "seconds without a sign of the engine after which /health says 503 (default: 60)"
    server.add_argument("--health-seconds", type=float, help=silent)
    origin = "a web page of this origin may ask (CORS); * for all; may be repeated"
    server.add_argument("--allowed-origin", action="append", default=[], metavar="URL", help=origin)
    server.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: its own name)"
    )
    template = 'of chats that name none: {"enable_thinking": false} for Qwen3'
    server.add_argument("--chat-template-kwargs", type=json_object, default={}, metavar="JSON", help=template)
    reasoning = "tell <think>…</think> apart from the answer, as `reasoning` (default: off)"
    server.add_argument("--reasoning-parser", choices=("qwen3",), help=reasoning)
    parsers = "which format calls of tools have: auto looks into the model's chat template (default: %(default)s)"
    choices = {"choices": ("auto", "hermes", "llama3_json"), "default": "auto"}
    server.add_argument("--tool-call-parser", **choices, help=parsers)
    server.add_argument("--no-request-log", dest="request_log", action="store_false", help="no line per request")
    defaults = "sampling parameters of requests that name none: auto takes them from the model's generation_config.json"
    choices = {"choices": ("auto", "vllm"), "default": "auto"}
    server.add_argument("--generation-config", **choices, help=f"{defaults} (default: %(default)s)")
    server.add_argument("--no-page", dest="page", action="store_false", help="no live page, and no buttons that pause")
    engine = parser.add_argument_group("engine")
    for name, kind, default, meaning in (
        ("model", str, "tutor", "tutor | random:PRESET | a directory | a hub id"),
        ("device", str, "auto", "auto | cpu | cuda"),
        ("dtype", str, "auto", "auto | float32 | float16 | bfloat16"),
        ("seed", int, 0, "for random weights and unseeded requests"),
    ):
        engine.add_argument(f"--{name}", type=kind, default=default, help=f"{meaning} (default: %(default)s)")
    importlib.import_module(_options_module(chosen)).add_options(engine)
    options = parser.parse_args(argv)
    if options.max_queue < 0 or not options.deadline >= 0:
        given = f"got {options.max_queue} and {options.deadline:g}"
        raise ValueError(f"--max-queue and --deadline must be 0 or more, {given}")
    if options.max_connections is not None and options.max_connections < 1:
        raise ValueError(f"--max-connections must be 1 or more, got {options.max_connections}")
    if options.health_seconds is not None and not options.health_seconds > 0:
        raise ValueError(f"--health-seconds must be above 0, got {options.health_seconds:g}")
    if options.host == "" or options.api_key == "":  # an empty host would be every address of this machine
        raise ValueError("--host and --api-key must not be empty")
    check_names(options.model, options.device, options.dtype)
    names = [action.dest for action in engine._group_actions]
    return options, {name: getattr(options, name) for name in names}


def _options_module(chosen: argparse.Namespace) -> str:
    """Return the module that adds the engine's options: the stage's, or that of the engine's `options_class`."""
    if chosen.engine is None:
        return STAGES[chosen.stage].partition(":")[0] + ".options"  # without PyTorch, which `--help` need not wait for
    return load_class(chosen.engine).options_class.__module__


def serve_process(process: EngineProcess, options: argparse.Namespace) -> int:
    """Serve the engine that another process is loading; returns the exit code."""
    from beyond.serving.remote_engine import EngineDied, RemoteLLM  # here: the process imports PyTorch meanwhile

    try:
        serve_llm(RemoteLLM(process), process.engine, options)
    except EngineDied as error:
        hint = "read what it printed, and see whether the machine has enough memory"
        print(f"error: {one_line(error)}; {hint}", file=sys.stderr)
        return 1
    return 0


def serve_llm(llm: LLM | RemoteLLM, engine: str, options: argparse.Namespace) -> None:
    """Serve an engine until a signal comes, and print its address.

    Args:
        engine: its name, `module:class`.

    Raises:
        ModelError: the model's `generation_config.json` is invalid.
        ValueError: an argument was given that the model's chat template does not have.
    """
    from uvicorn.loops.auto import auto_loop_factory

    from beyond.serving.async_llm import HEALTH_SECONDS
    from beyond.serving.defaults import in_words, sampling_defaults
    from beyond.serving.reasoning import ChatOptions
    from beyond.serving.server import say, serve

    chat = ChatOptions(options.chat_template_kwargs, options.reasoning_parser)
    llm.chat_prompts([{"role": "user", "content": "x"}], chat.template_kwargs)  # so that a wrong one is told now
    defaults = sampling_defaults(llm.source, options.generation_config)

    def tell(server: Server, port: int) -> None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        package, precision = engine.partition(":")[0], str(llm.dtype).removeprefix("torch.")
        say(f"[serving] {llm.source.name}, {package} on {llm.device} in {precision}")
        say(f"[serving] defaults {in_words(defaults)}")
        say(f"[serving] API      http://{host}:{port}/v1")
        if options.page:
            say(f"[serving] page     http://{host}:{port}/")
        say(f"[serving] metrics  http://{host}:{port}/metrics")

    work = serve(
        llm,
        host=options.host,
        port=options.port,
        model=options.served_model_name or llm.source.name,
        max_queue=options.max_queue,
        api_key=options.api_key,
        defaults=defaults,
        deadline=options.deadline,
        page=options.page,
        hosts=[options.host, *options.allowed_host],
        max_connections=options.max_connections or 4096,
        health_seconds=options.health_seconds or HEALTH_SECONDS,
        origins=options.allowed_origin,
        tool_call_parser=options.tool_call_parser,
        write_log=say if options.request_log else None,
        chat=chat,
        on_ready=tell,
    )
    freeze_heap()
    with asyncio.Runner(loop_factory=auto_loop_factory(use_subprocess=False)) as runner:  # uvloop, if it is installed
        runner.run(work)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, end_at_once)  # until the server runs, which has its own
    raise SystemExit(main())
