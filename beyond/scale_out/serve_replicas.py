"""`python -m beyond.scale_out.serve_replicas`: serve several engines over HTTP, from the command line.

It takes the options of `python -m beyond.serving`, and `--replicas`. SIGUSR1 replaces the replicas one by one, while
the others serve; if a new one does not start, the old ones stay. Ctrl-C or SIGTERM ends them all as it ends a single
server: running answers are finished, for `--deadline` seconds, and a second signal does not wait. It joins the cluster
that `ray start` has made on this machine, or makes one.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from beyond.serving.__main__ import STAGES, parse
from beyond.serving.address import listen
from stage_a_naive.contract.errors import one_line
from stage_a_naive.entrypoints.interrupts import run_command

DEFAULTS_SECONDS = 60  # for the router's answer, which comes at once unless the machine is very busy

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ServeStatus


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit code: 0, or 2 after a one-line error."""
    try:
        return run(argv)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while Ray started
        print("\ninterrupted", file=sys.stderr)
        return 130


def run(argv: list[str] | None) -> int:
    """As `main`, but raise errors in the arguments."""
    own = argparse.ArgumentParser(prog="python -m beyond.scale_out.serve_replicas", add_help=False)
    own.add_argument("--replicas", type=int, default=2, metavar="N", help="engines (default: %(default)s)")
    options, engine_options = parse(argv, own)
    if options.replicas < 1:
        raise ValueError(f"--replicas must be 1 or more, got {options.replicas}")
    for name in ("max_connections", "health_seconds", "allowed_origin"):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} is for a single server: Ray listens here; leave it out")
    if engine_options.get("trace"):
        raise ValueError("--trace is one file, and each replica would write over it: trace a single server")
    with listen(options.host, options.port) as free:  # Ray would detect a used port late
        port = free.getsockname()[1]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve

        from beyond.serving.server import say
    except ImportError as error:
        raise ImportError(f"replicas need Ray Serve: pip install 'ray[serve]' ({error})") from error
    say(f"[replicas] starting Ray and {options.replicas} engines")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(log_to_driver=False, include_dashboard=False, logging_level="warning")
    serve.start(http_options={"host": options.host, "port": port})
    try:
        return serve_releases(options, engine_options, port)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # at once: Ray may take half a minute to start
        serve.shutdown()


def serve_releases(options: argparse.Namespace, engine_options: dict[str, Any], port: int) -> int:
    """Serve until a signal comes, replacing the replicas at every SIGUSR1; returns the exit code.

    Raises:
        KeyboardInterrupt: the signal came while the first replicas started.
        ValueError: there are too few GPUs; Ray would wait for more of them.
    """
    import ray
    from ray import serve

    from beyond.scale_out.replicas import application
    from beyond.serving.defaults import in_words
    from beyond.serving.reasoning import ChatOptions
    from beyond.serving.server import say

    ranks = engine_options.get("tensor_parallel_size", 1) * engine_options.get("pipeline_parallel_size", 1)
    there = 0 if engine_options["device"] == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    gpus = ranks if there else 0  # of each replica
    if options.replicas * gpus > there:
        raise ValueError(f"--replicas {options.replicas} takes {options.replicas * gpus} GPUs, and there are {there}")
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    starting = False  # whether replicas are starting, which never ends if the machines have no room

    def on_signal(number: int, _: object) -> None:
        if starting and number != signal.SIGUSR1:
            raise KeyboardInterrupt
        signals.put(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_signal)
    release = 0
    while True:
        app = application(
            options.engine or STAGES[options.stage],
            engine_options,
            replicas=options.replicas,
            gpus=gpus,
            max_queue=options.max_queue,
            api_key=options.api_key,
            generation_config=options.generation_config,
            deadline=options.deadline,
            release=release,
            model=options.served_model_name,
            hosts=[options.host, *options.allowed_host],
            request_log=options.request_log,
            chat=ChatOptions(options.chat_template_kwargs, options.reasoning_parser),
            has_room=ray.available_resources().get("GPU", 0) >= gpus,
        )
        try:
            try:
                starting = True
                serve.run(app)  # from the second call on, this replaces the old replicas one by one
            finally:
                starting = False
        except RuntimeError:
            print(f"error: the replicas of release {release} do not start: {reason(serve.status())}", file=sys.stderr)
            if release == 0:
                return 2
        except KeyboardInterrupt:
            if release == 0:
                raise
            break
        else:
            defaults = serve.get_app_handle("default").defaults.remote().result(timeout_s=DEFAULTS_SECONDS)
            say(f"[replicas] defaults {in_words(defaults)}")
            what = f"{options.replicas} engines at http://{options.host}:{port}/v1, release {release}"
            say(f"[replicas] {what} (kill -USR1 {os.getpid()} replaces them)")
        if signals.get() != signal.SIGUSR1:
            break
        release += 1
    say("[replicas] ending; running answers are finished (again to end at once)")
    finish(serve.get_app_handle("default"), options.deadline, signals)
    return 0


def finish(router: DeploymentHandle, seconds: float, signals: queue.SimpleQueue[int]) -> None:
    """Let the replicas finish their running answers, for `seconds` at most and until another signal comes."""
    from ray import serve

    ended = router.end.remote(seconds)
    while signals.empty():
        with suppress(TimeoutError):
            ended.result(timeout_s=0.2)
            serve.delete("default")  # waits until the last bytes are on their way; `shutdown` would cut them off
            break


def reason(status: ServeStatus) -> str:
    """Return why replicas do not start: the last line of Ray's message, which is the engine's error."""
    deployments = status.applications["default"].deployments.values()
    lines = [line for deployment in deployments for line in deployment.message.strip().splitlines()[-1:]]
    return lines[0] if lines else "Ray gives no reason"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
