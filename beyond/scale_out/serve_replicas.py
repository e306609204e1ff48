"""`python -m beyond.scale_out.serve_replicas`: serve several engines over HTTP, from the command line.

All options but `--replicas` are those of `python -m beyond.serving`. SIGUSR1 replaces the replicas one by one, while
the others serve; Ctrl-C or SIGTERM ends them all. It joins the cluster that `ray start` has made on this machine, or
makes one.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
from typing import TYPE_CHECKING

from beyond.serving.__main__ import STAGES, parse

if TYPE_CHECKING:
    from ray.serve.schema import ServeStatus


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit code: 0, or 2 after a one-line error."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--replicas", type=int, default=2, metavar="N")
    own, rest = first.parse_known_args(argv)
    options, engine_options = parse(rest)
    if own.replicas < 1:
        print(f"error: --replicas must be 1 or more, got {own.replicas}", file=sys.stderr)
        return 2
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve

        from beyond.scale_out.replicas import application
    except ImportError as error:
        print(f"error: replicas need Ray Serve: pip install 'ray[serve]' ({error})", file=sys.stderr)
        return 2
    print(f"[replicas] starting Ray and {own.replicas} engines", flush=True)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(log_to_driver=False, include_dashboard=False, logging_level="warning")
    serve.start(http_options={"host": options.host, "port": options.port})
    uses_gpu = engine_options["device"] != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    ranks = engine_options.get("tensor_parallel_size", 1) * engine_options.get("pipeline_parallel_size", 1)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.put(number))
    release = 0
    while True:
        app = application(
            options.engine or STAGES[options.stage],
            engine_options,
            replicas=own.replicas,
            gpus=ranks * uses_gpu,
            max_queue=options.max_queue,
            api_key=options.api_key,
            deadline=options.deadline,
            release=release,
        )
        try:
            serve.run(app)  # from the second time on: a new replica in the place of each old one, one after another
        except RuntimeError:
            print(f"error: the replicas of release {release} do not start: {reason(serve.status())}", file=sys.stderr)
            if release == 0:
                serve.shutdown()
                return 2
        else:
            what = f"{own.replicas} engines at http://{options.host}:{options.port}/v1, release {release}"
            print(f"[replicas] {what} (kill -USR1 {os.getpid()} replaces them)", flush=True)
        if signals.get() != signal.SIGUSR1:
            break
        release += 1
    serve.shutdown()
    return 0


def reason(status: ServeStatus) -> str:
    """Why replicas do not start: the last line of what Ray says about them, which is the engine's error."""
    deployments = status.applications["default"].deployments.values()
    lines = [line for deployment in deployments for line in deployment.message.strip().splitlines()[-1:]]
    return lines[0] if lines else "Ray gives no reason"


if __name__ == "__main__":
    raise SystemExit(main())
