"""Random load on stage E for as long as asked, watching what must not grow: blocks, host memory, device memory.

    python -m tests.soak --minutes 3
    python -m tests.soak --minutes 3 --publish cpu      # also into benchmarks/results/soak-cpu.json

Requests of random lengths arrive at random, some sharing prefixes; some are aborted while they wait or run, some calls
are given up half-way, some steps raise. Greedy answers are compared with the answer that the same prompt got when it
was alone, so a block that was mixed up would show. Every few seconds the engine is drained: then no block may be in
use, and what the host's process and the device's allocator hold is noted. The run fails if an answer differed, if a
block stayed in use, or if memory grew after the first quarter of the time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.results import LOCAL, RESULTS, environment, write
from stage_a_naive.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching import LLM

HOST_GROWTH = 16 * 2**20  # bytes of resident memory that the allocator's own noise may add
DEVICE_GROWTH = 2**20  # the tables of the penalties double when more requests than ever before ask for one
DRAIN_SECONDS = 10.0


class InjectedError(RuntimeError):
    """A failure that the soak makes on purpose."""


@dataclass
class Sample:
    """The engine's memory at a moment when nothing runs."""

    seconds: float
    requests: int
    resident_bytes: int
    device_allocated_bytes: int
    device_reserved_bytes: int
    used_blocks: int


@dataclass
class Tally:
    """What has happened so far."""

    finished: int = 0
    aborted: int = 0
    errors: int = 0
    compared: int = 0
    different: int = 0
    samples: list[Sample] = field(default_factory=list)


class Soak:
    """Random load on one engine."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.mailbox = llm.engine.new_mailbox()
        self.expected: dict[int, list[int]] = {}  # request id -> the answer it got alone
        self.live: list[int] = []
        self.fail_next = False
        limit = llm.max_model_len // 2
        bases = [self._tokens(limit) for _ in range(3)]
        self.prompts = [bases[i % 3][: self.rng.randrange(1, limit)] + self._tokens(5) for i in range(24)]
        self.greedy = SamplingParams(temperature=0, max_tokens=128)
        self.answers = [llm.generate([prompt], self.greedy, False)[0]["token_ids"] for prompt in self.prompts]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, self.llm.vocab_size) for _ in range(count)]

    def run(self, minutes: float) -> None:
        start = last_drain = time.perf_counter()
        end = start + 60 * minutes
        while time.perf_counter() < end:
            self._arrive()
            self._disturb()
            self._step()
            if time.perf_counter() - last_drain > DRAIN_SECONDS:
                self._drain()
                self._note(time.perf_counter() - start)
                last_drain = time.perf_counter()
        self._drain()
        self._note(time.perf_counter() - start)

    def _arrive(self) -> None:
        if len(self.live) > 2 * self.llm.options.max_num_seqs or self.rng.random() < 0.5:
            return
        which = self.rng.randrange(len(self.prompts))
        params = self.greedy
        if self.rng.random() < 0.4:
            params = SamplingParams(
                temperature=self.rng.choice([0.5, 1.0]),
                top_p=self.rng.choice([1.0, 0.9]),
                repetition_penalty=self.rng.choice([1.0, 1.1]),
                logprobs=self.rng.choice([None, 2]),
                max_tokens=self.rng.randrange(1, 64),
            )
        request = Request(0, self.prompts[which], params, self.rng.getrandbits(64))
        request_id = self.llm.engine.add_request(request, self.mailbox, streams=self.rng.random() < 0.5)
        self.live.append(request_id)
        if params is self.greedy:
            self.expected[request_id] = self.answers[which]

    def _disturb(self) -> None:
        """An abort, or a call that is given up, or a step that is going to fail."""
        if self.live and self.rng.random() < 0.02:
            self._abort(self.rng.choice(self.live))
        if self.rng.random() < 0.002:
            stream = self.llm.stream([self.rng.choice(self.prompts)], self.greedy)
            next(stream, None)
            stream.close()
        self.fail_next = self.rng.random() < 0.002

    def _abort(self, request_id: int) -> None:
        self.tally.aborted += self.llm.engine.abort(request_id)
        self.live.remove(request_id)
        self.expected.pop(request_id, None)

    def _step(self) -> None:
        runner = self.llm.runner
        name = "launch" if hasattr(runner, "launch") else "run"  # stage F's runner does not wait
        run = getattr(runner, name)
        if self.fail_next:
            setattr(runner, name, self._failing)
        try:
            self.llm.engine.step()
        except InjectedError:
            self.tally.errors += 1
        finally:
            setattr(runner, name, run)
        self._read_mail()

    def _failing(self, step: object) -> None:
        raise InjectedError("made by the soak")

    def _read_mail(self) -> None:
        for event in self.mailbox.take():
            if event.output is None or event.request_id not in self.live:
                continue
            self.live.remove(event.request_id)
            self.tally.finished += 1
            expected = self.expected.pop(event.request_id, None)
            if expected is not None:
                self.tally.compared += 1
                self.tally.different += event.output["token_ids"] != expected

    def _drain(self) -> None:
        while self.llm.engine.has_unfinished():
            self.llm.engine.step()
            self._read_mail()

    def _note(self, seconds: float) -> None:
        gc.collect()
        on_gpu = self.llm.device.type == "cuda"
        stats = torch.cuda.memory_stats(self.llm.device) if on_gpu else {}
        self.tally.samples.append(
            Sample(
                seconds,
                self.tally.finished,
                resident_bytes(),
                stats.get("allocated_bytes.all.current", 0),
                stats.get("reserved_bytes.all.current", 0),
                self.llm.engine.stats()["num_used_blocks"],
            )
        )


def resident_bytes() -> int:
    """Resident memory of this process, once the C library has given back what it only keeps for later."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise SystemExit(f"resident memory is read from /proc, which is not here: {error}") from error


def verdict(tally: Tally) -> list[str]:
    """What went wrong; empty if nothing did."""
    wrong = []
    if tally.different:
        wrong.append(f"{tally.different} of {tally.compared} answers differ from the answer alone")
    if any(sample.used_blocks for sample in tally.samples):
        wrong.append("blocks were in use while nothing ran")
    settled = tally.samples[len(tally.samples) // 4 :]
    grown = settled[-1].resident_bytes - settled[0].resident_bytes
    if grown > HOST_GROWTH:
        wrong.append(f"resident memory grew by {grown / 2**20:.1f} MiB after the first quarter")
    if settled[-1].device_allocated_bytes - settled[0].device_allocated_bytes > DEVICE_GROWTH:
        wrong.append("the device's allocated memory grew after the first quarter")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--model", default="tutor")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--publish", metavar="MACHINE", help="also write benchmarks/results/soak-MACHINE.json")
    arguments = parser.parse_args()
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "kvcache_block_size": 8}
    options["num_kvcache_blocks"] = 128  # an eighth of what sixteen of the longest would take: preemption is usual
    # In float32, because random prompts give narrow margins: in bfloat16 the batch's size alone may change an answer.
    llm = LLM(arguments.model, device=arguments.device, dtype="float32", **options)
    soak = Soak(llm, arguments.seed)
    soak.run(arguments.minutes)
    wrong = verdict(soak.tally)
    tally = asdict(soak.tally)
    result = {
        "kind": "soak", "environment": environment(), "tally": tally, "wrong": wrong, "rows": tally.pop("samples"),
        "options": {"minutes": arguments.minutes, "model": llm.source.name, "device": str(llm.device), **options},
        "counters": asdict(llm.engine.counters),
    }  # fmt: skip
    for folder, name in ((LOCAL, "soak"), (RESULTS, f"soak-{arguments.publish}" if arguments.publish else "")):
        if name:
            write(result, folder / f"{name}.json")
    last = result["rows"][-1]
    print(
        f"{tally['finished']} requests finished, {tally['aborted']} aborted, {tally['errors']} steps failed on purpose,"
        f" {result['counters']['num_preemptions']} preemptions; {tally['compared']} answers compared, "
        f"{tally['different']} different; resident {last['resident_bytes'] / 2**20:.0f} MiB, "
        f"device {last['device_allocated_bytes'] / 2**20:.1f} MiB, blocks in use {last['used_blocks']}"
    )
    print("failed: " + "; ".join(wrong) if wrong else "nothing grew, nothing differed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
