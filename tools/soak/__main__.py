"""Apply random load for some minutes and check that blocks, host memory and device memory do not grow.

    python -m tools.soak --minutes 3                    # on stage E
    python -m tools.soak --minutes 3 --http             # on the server of `beyond/serving`
    python -m tools.soak --minutes 3 --publish cpu      # also into benchmarks/results/soak-cpu.json

Requests of random lengths arrive at random, some sharing prefixes; some are aborted while they wait or run, some calls
are abandoned half-way, some steps raise. Over HTTP some clients stream and some do not, some ask for several answers,
some disconnect, and some send invalid requests. Greedy answers are compared with the answer to the same prompt alone,
so a mix-up of blocks would be noticed. Every few seconds the engine is drained: then no block may be in use, and the
memory of the process and of the device's allocator is recorded. The run fails if an answer differed, if a block or a
request was left over, or if memory grew after the first quarter of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict

from benchmarks.local_server import local_server
from benchmarks.results import LOCAL, RESULTS, command, environment, write
from benchmarks.sources import code_of
from stage_a_naive.entrypoints.interrupts import run_command
from stage_e_batching import LLM

from .engine import Soak
from .tally import Tally, verdict

OPTIONS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "kvcache_block_size": 8,
    "num_kvcache_blocks": 128,  # an eighth of what sixteen of the longest would take: preemption is usual
}
MAX_QUEUE = 24  # of the server: some clients find it full


def main() -> int:
    """Run a soak, print and write its result, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--model", default="tutor")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http", action="store_true", help="load a server instead of an engine")
    parser.add_argument("--publish", metavar="MACHINE", help="also write benchmarks/results/soak[-http]-MACHINE.json")
    arguments = parser.parse_args()
    where = environment()  # now: the tree may change while the soak runs
    where |= {"code": code_of("stage_e_batching:LLM", *["beyond.serving.__main__"] * arguments.http)}
    where["command"] = command()
    # In float32, because random prompts give narrow margins: in bfloat16 the batch's size alone may change an answer.
    llm = LLM(arguments.model, device=arguments.device, dtype="float32", **OPTIONS)
    tally, counters = (over_http if arguments.http else on_engine)(llm, arguments)
    wrong = verdict(tally)
    counted = asdict(tally)
    kind = "soak-http" if arguments.http else "soak"
    result = {
        "kind": "soak",
        "environment": where,
        "tally": counted,
        "wrong": wrong,
        "rows": counted.pop("samples"),
        "options": {
            "minutes": arguments.minutes,
            "model": llm.source.name,
            "device": str(llm.device),
            "http": arguments.http,
            **OPTIONS,
        },
        "counters": counters,
    }
    for folder, name in ((LOCAL, kind), (RESULTS, f"{kind}-{arguments.publish}" if arguments.publish else "")):
        if name:
            write(result, folder / f"{name}.json")
    print("; ".join(f"{name} {value}" for name, value in counted.items() if value != []))
    print("; ".join(f"{name} {value:g}" for name, value in counters.items()))
    last = tally.samples[-1]
    print(
        f"resident {last.resident_bytes / 2**20:.0f} MiB, device {last.device_allocated_bytes / 2**20:.1f} MiB, "
        f"blocks in use {last.used_blocks}"
    )
    print("failed: " + "; ".join(wrong) if wrong else "nothing grew, nothing differed")
    return 1 if wrong else 0


def on_engine(llm: LLM, arguments: argparse.Namespace) -> tuple[Tally, dict[str, float]]:
    """Apply the load to the engine itself."""
    soak = Soak(llm, arguments.seed)
    soak.run(arguments.minutes)
    return soak.tally, asdict(llm.engine.counters)


def over_http(llm: LLM, arguments: argparse.Namespace) -> tuple[Tally, dict[str, float]]:
    """Apply the load to a server with the same kind of engine; `llm` gives the expected answers and is closed."""
    from .over_http import HttpSoak, questions  # here: the engine alone needs no HTTP client

    asked, device = questions(llm, arguments.seed, most_tokens=128), str(llm.device)
    llm.close()
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (OPTIONS | {"max_queue": MAX_QUEUE}).items()]
    with local_server("--model", arguments.model, "--device", device, "--dtype", "float32", *options) as server:
        soak = HttpSoak(server.url, server.pid, OPTIONS["num_kvcache_blocks"], asked, arguments.seed)
        asyncio.run(soak.run(arguments.minutes))
    return soak.tally, soak.counters


if __name__ == "__main__":
    sys.exit(run_command(main))
