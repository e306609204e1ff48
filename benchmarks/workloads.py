"""The work that every engine is given: token ids in, a fixed number of tokens out, nothing left to chance.

A benchmark of a language model is only as honest as its input. The prompts here are random ids from a seeded generator,
the end-of-sequence token is ignored, so every engine does exactly the same number of steps, and the whole of the work
is hashed: two results with equal hashes come from equal work.

A workload consists of *rounds* that are alike but use different ids. A round is a list of *calls* of `generate`. Each
round gives one sample of every figure. The ids never repeat from round to round or from workload to workload, because
an engine with a prefix cache would rightly skip what it has already seen (only `prefix` is about that).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import dataclass, replace
from functools import cache, cached_property

from stage_a_naive.sampling import SamplingParams

SIZES = ("cpu", "gpu", "tiny")  # tiny: only to see that everything works
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of `generate`: requests that arrive together.

    `tag` says what the call is for; the figures are computed by it.
    """

    tag: str
    prompts: tuple[Ids, ...]
    max_tokens: tuple[int, ...]  # one a prompt

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    def steps(self, one_at_a_time: bool) -> int:
        """Decode steps, by an engine that serves one request after another or all of them together."""
        return self.output_tokens if one_at_a_time else max(self.max_tokens)

    @property
    def context_tokens_read(self) -> int:
        """KV entries that must be read: each output token looks back at everything before it."""
        pairs = zip(self.prompts, self.max_tokens, strict=True)
        return sum(out * len(prompt) + out * (out - 1) // 2 for prompt, out in pairs)


@dataclass(frozen=True)
class Workload:
    """Work with a name; see the module's docstring."""

    name: str
    size: str
    description: str
    num_ids: int  # prompts hold ids in [0, num_ids)
    rounds: tuple[tuple[Call, ...], ...]
    temperature: float = 0.0

    @cached_property
    def hash(self) -> str:
        """sha256 over the canonical JSON of all prompts and parameters."""
        rounds = [[[call.tag, call.prompts, call.max_tokens] for call in calls] for calls in self.rounds]
        work = {"rounds": rounds, "temperature": self.temperature, "ignore_eos": True}
        return hashlib.sha256(json.dumps(work, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        calls = [call for calls in self.rounds for call in calls]
        return max(len(p) + out for call in calls for p, out in zip(call.prompts, call.max_tokens, strict=True))

    def sampling_params(self, call: Call) -> list[SamplingParams]:
        return [SamplingParams(temperature=self.temperature, max_tokens=n, ignore_eos=True) for n in call.max_tokens]

    def warm_up_round(self) -> tuple[Call, ...]:
        """The first round's shapes with other ids, so that nothing of the timed work is in a prefix cache."""
        return tuple(
            replace(call, prompts=tuple(tuple((i + 1) % self.num_ids for i in prompt) for prompt in call.prompts))
            for call in self.rounds[0]
        )


@cache
def make_workload(name: str, size: str) -> Workload:
    """One of the workloads by name, in one of `SIZES`.

    Raises:
        ValueError: there is no such workload or size.
    """
    if name not in _MAKERS:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(_MAKERS)}")
    if size not in SIZES:
        raise ValueError(f"no size {size!r}; there are: {', '.join(SIZES)}")
    # The tutor's vocabulary has 4096 entries; nano-vllm's benchmark draws from the first 10001 of a larger one.
    num_ids = 10001 if size == "gpu" else 4096
    workload = _MAKERS[name](size, num_ids, random.Random(f"{name}:{size}"))
    return replace(workload, size=size, num_ids=num_ids)


def workload_names() -> list[str]:
    return list(_MAKERS)


def _ids(rng: random.Random, length: int, num_ids: int) -> Ids:
    return tuple(rng.randint(0, num_ids - 1) for _ in range(length))


def _single(size: str, num_ids: int, rng: random.Random) -> Workload:
    prompt, output, rounds = {"gpu": (128, 512, 5), "cpu": (32, 64, 3), "tiny": (8, 8, 1)}[size]
    # The time of a decode step is (T(output) - T(1)) / (output - 1): whatever happens once a call cancels out.
    return Workload(
        "single",
        size,
        f"1 request, {prompt} in / {output} out, greedy",
        num_ids,
        tuple(
            tuple(Call(tag, (_ids(rng, prompt, num_ids),), (out,)) for tag, out in (("first", 1), ("all", output)))
            for _ in range(rounds)
        ),
    )


def _decode32(size: str, num_ids: int, rng: random.Random) -> Workload:
    requests, prompt, output, rounds = {"gpu": (32, 512, 256, 3), "cpu": (8, 64, 32, 2), "tiny": (2, 8, 4, 1)}[size]

    def call(tag: str, out: int) -> Call:
        return Call(tag, tuple(_ids(rng, prompt, num_ids) for _ in range(requests)), (out,) * requests)

    text = f"{requests} requests, {prompt} in / {output} out, greedy"
    return Workload(
        "decode32", size, text, num_ids, tuple((call("first", 1), call("all", output)) for _ in range(rounds))
    )


def _mixed(size: str, num_ids: int, rng: random.Random) -> Workload:
    requests, shortest_in, longest_in, shortest_out, longest_out = {
        "gpu": (256, 100, 1024, 100, 1024),
        "cpu": (48, 16, 64, 4, 256),
        "tiny": (4, 4, 16, 2, 6),
    }[size]
    if size == "gpu":
        # nano-vllm's published benchmark to the letter (its bench.py: a length before its ids, prompts before outputs).
        rng = random.Random(0)
    prompts = tuple(_ids(rng, rng.randint(shortest_in, longest_in), num_ids) for _ in range(requests))
    if size == "gpu":
        outputs = tuple(rng.randint(shortest_out, longest_out) for _ in range(requests))
    else:  # most answers are short and a few are long, as people's are: evenly spread logarithms
        spread = [rng.uniform(math.log(shortest_out), math.log(longest_out)) for _ in range(requests)]
        outputs = tuple(round(math.exp(x)) for x in spread)
    text = f"{requests} requests, {shortest_in}-{longest_in} in / {shortest_out}-{longest_out} out, temperature 0.6"
    return Workload("mixed", size, text, num_ids, ((Call("all", prompts, outputs),),), temperature=0.6)


def _prefix(size: str, num_ids: int, rng: random.Random) -> Workload:
    requests, shared, own, output, rounds = {
        "gpu": (64, 1024, 128, 64, 3),
        "cpu": (12, 512, 32, 8, 2),
        "tiny": (3, 32, 8, 2, 1),
    }[size]

    def call() -> Call:
        prefix = _ids(rng, shared, num_ids)
        prompts = tuple(prefix + _ids(rng, own, num_ids) for _ in range(requests))
        return Call("all", prompts, (output,) * requests)

    text = f"{requests} requests that share {shared} tokens, {own} of their own / {output} out, greedy"
    return Workload("prefix", size, text, num_ids, tuple((call(),) for _ in range(rounds)))


def _ttft(size: str, num_ids: int, rng: random.Random) -> Workload:
    lengths, rounds = {"gpu": ((1024, 8192), 10), "cpu": ((128, 1024), 3), "tiny": ((16, 64), 1)}[size]
    text = f"prompts of {' and '.join(map(str, lengths))} tokens, one token out"
    return Workload(
        "ttft",
        size,
        text,
        num_ids,
        tuple(
            tuple(Call(str(length), (_ids(rng, length, num_ids),), (1,)) for length in lengths) for _ in range(rounds)
        ),
    )


_MAKERS = {"single": _single, "decode32": _decode32, "mixed": _mixed, "prefix": _prefix, "ttft": _ttft}
