"""The workloads that every engine runs: token ids in, a fixed number of tokens out, the same work in every run.

The prompts are random ids from a seeded generator. The end-of-sequence token is ignored, so every engine does exactly
the same number of steps. The whole workload is hashed: two results with equal hashes come from equal work.

A workload consists of *rounds* of the same shape with different ids. A round is a list of *calls* of `generate`, and
gives one sample of every figure. No ids repeat between rounds or workloads, because an engine with a prefix cache would
rightly skip tokens that it has already seen (only `prefix` measures that).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from stage_a_naive.sampling import SamplingParams

SIZES = ("cpu", "gpu", "tiny")  # tiny: only to see that everything works
NUM_IDS = {"cpu": 4096, "gpu": 10001, "tiny": 4096}  # the tutor's vocabulary; as many as nano-vllm's benchmark takes
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of `generate`: requests that arrive together."""

    tag: str  # purpose of the call; selects how its figures are computed
    prompts: tuple[Ids, ...]
    max_tokens: tuple[int, ...]  # one per prompt

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    def steps(self, one_at_a_time: bool) -> int:
        """Decode steps, by an engine that serves one request after another or all of them together."""
        return self.output_tokens if one_at_a_time else max(self.max_tokens)

    def context_tokens_read(self, window: int = 0) -> int:
        """KV entries that must be read: each output token looks back at all before it, or at the last `window`."""
        pairs = zip(self.prompts, self.max_tokens, strict=True)
        if window:
            return sum(min(len(prompt) + made, window) for prompt, out in pairs for made in range(out))
        return sum(out * len(prompt) + out * (out - 1) // 2 for prompt, out in pairs)


@dataclass(frozen=True)
class Workload:
    """Work with a name; see the module's docstring."""

    name: str
    description: str
    num_ids: int  # prompts hold ids in [0, num_ids)
    rounds: tuple[tuple[Call, ...], ...]
    sampling: Mapping[str, float]  # the parameters of every request, by name

    @cached_property
    def hash(self) -> str:
        """sha256 over the canonical JSON of all prompts and parameters."""
        rounds = [[[call.tag, call.prompts, call.max_tokens] for call in calls] for calls in self.rounds]
        work = {"rounds": rounds, "ignore_eos": True, **self.sampling}
        return hashlib.sha256(json.dumps(work, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        calls = [call for calls in self.rounds for call in calls]
        return max(len(p) + out for call in calls for p, out in zip(call.prompts, call.max_tokens, strict=True))

    def sampling_params(self, call: Call) -> list[SamplingParams]:
        return [SamplingParams(max_tokens=n, ignore_eos=True, **self.sampling) for n in call.max_tokens]

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
        ValueError: the workload or size does not exist.
    """
    if name not in _MAKERS or size not in SIZES:
        raise ValueError(f"no workload {name!r} of size {size!r}; there are: {', '.join(_MAKERS)}; {', '.join(SIZES)}")
    make, sampling, *arguments = _MAKERS[name]
    description, rounds = make(_Ids(name, size), *arguments[SIZES.index(size)])
    how = ", ".join(f"{key} {value}" for key, value in sampling.items()) if sampling["temperature"] else "greedy"
    return Workload(name, f"{description}, {how}", NUM_IDS[size], tuple(rounds), sampling)


def workload_names() -> list[str]:
    return list(_MAKERS)


class _Ids(random.Random):
    """A generator of random token ids, seeded by the workload."""

    def __init__(self, name: str, size: str) -> None:
        # nano-vllm's bench.py to the letter: a length before its ids, prompts before outputs
        super().__init__(0 if (name, size) == ("mixed", "gpu") else f"{name}:{size}")
        self.size = size

    def take(self, length: int) -> Ids:
        return tuple(self.randint(0, NUM_IDS[self.size] - 1) for _ in range(length))


Made = tuple[str, list[tuple[Call, ...]]]  # a description, and rounds


def _batch(ids: _Ids, requests: int, prompt: int, output: int, rounds: int) -> Made:
    """The same work twice: for one token, and for all."""

    def call(tag: str, out: int) -> Call:
        return Call(tag, tuple(ids.take(prompt) for _ in range(requests)), (out,) * requests)

    made = [(call("first", 1), call("all", output)) for _ in range(rounds)]
    return f"{requests} request{'s' * (requests > 1)}, {prompt} in / {output} out", made


def _mixed(ids: _Ids, requests: int, least_in: int, most_in: int, least_out: int, most_out: int) -> Made:
    prompts = tuple(ids.take(ids.randint(least_in, most_in)) for _ in range(requests))
    if ids.size == "gpu":
        outputs = tuple(ids.randint(least_out, most_out) for _ in range(requests))
    else:  # most answers are short and a few are long, as people's are: evenly spread logarithms
        spread = (ids.uniform(math.log(least_out), math.log(most_out)) for _ in range(requests))
        outputs = tuple(round(math.exp(x)) for x in spread)
    text = f"{requests} requests, {least_in}-{most_in} in / {least_out}-{most_out} out"
    return text, [(Call("all", prompts, outputs),)]


def _prefix(ids: _Ids, requests: int, shared: int, own: int, output: int, rounds: int) -> Made:
    made = []
    for _ in range(rounds):
        prefix = ids.take(shared)
        made.append((Call("all", tuple(prefix + ids.take(own) for _ in range(requests)), (output,) * requests),))
    return f"{requests} requests that share {shared} tokens, {own} of their own / {output} out", made


def _ttft(ids: _Ids, short: int, long: int, rounds: int) -> Made:
    made = [tuple(Call(str(n), (ids.take(n),), (1,)) for n in (short, long)) for _ in range(rounds)]
    return f"prompts of {short} and {long} tokens, one token out", made


GREEDY, WARM = {"temperature": 0.0}, {"temperature": 0.6}
CHAT = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}  # Qwen2.5-Instruct's own
_MAKERS = {  # what makes it, how tokens are sampled, and its arguments for each of `SIZES`
    "single": (_batch, GREEDY, (1, 32, 64, 3), (1, 128, 512, 5), (1, 8, 8, 1)),
    "decode32": (_batch, GREEDY, (8, 64, 32, 2), (32, 512, 256, 3), (2, 8, 4, 1)),
    "chat32": (_batch, CHAT, (8, 64, 32, 2), (32, 512, 256, 3), (2, 8, 4, 1)),
    "chat": (_mixed, CHAT, (48, 16, 64, 4, 256), (256, 100, 1024, 100, 1024), (4, 4, 16, 2, 6)),
    "mixed": (_mixed, WARM, (48, 16, 64, 4, 256), (256, 100, 1024, 100, 1024), (4, 4, 16, 2, 6)),
    "prefix": (_prefix, GREEDY, (12, 512, 32, 8, 2), (64, 1024, 128, 64, 3), (3, 32, 8, 2, 1)),
    "ttft": (_ttft, GREEDY, (128, 1024, 3), (1024, 8192, 10), (16, 64, 1)),
}
