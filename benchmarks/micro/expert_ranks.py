"""Experts on several ranks: bytes read and sent with parts of experts or whole ones, and how balanced the load is.

    python -m benchmarks.micro expert_ranks                   # bytes read and sent on eight ranks; `part=bytes`
    python -m benchmarks.micro expert_ranks part=crossing     # from how many tokens in a step whole experts win
    python -m benchmarks.micro expert_ranks part=balance      # a router with preferences, and copies of popular experts

Nothing is timed. Steps of one layer are simulated: each token chooses its experts at random, and the study counts what
every rank would read and send. The assumptions:

- The tokens of a step are divided evenly among the ranks, and a row has `hidden` numbers of two bytes.
- With a part of every expert, a row goes to all other ranks, and a sum comes back from each of them (an all-reduce of
  all tokens sends as much). With whole experts, both happen only for the ranks of its experts.
- A rank reads an expert once per step if a token chose it. A step takes as long as its slowest rank.
- Router: a token's experts are sampled one after another, without repetition; the expert that is the i-th most popular
  has a probability in proportion to `1 / i ** zipf`. 0 is a router without preferences.
- Without copies, experts are given to the ranks in a random order. With copies, the popularity of every expert is
  known. The expert with the most rows per copy gets the next copy. Then the experts are placed in the order of their
  rows per copy, the most first, each on the rank with the least load that has room and does not have it yet. The copies
  of an expert share its rows evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import torch
from torch import Tensor

from benchmarks.floor import ModelCost
from benchmarks.micro import chosen
from stage_a_naive.checkpoints.presets import preset_config

CONFIG = preset_config("qwen3-30b-a3b")
EXPERTS = ModelCost(CONFIG, 2).experts
ROW = 2 * CONFIG.hidden_size  # bytes
EXPERT = 3 * EXPERTS.size * ROW  # bytes of gate, up and down
STEPS = 50  # simulated per number of tokens
RANKS, TOKENS = (2, 4, 8, 16), (8, 32, 128, 512, 2048)
DOUBLED = tuple(2**i for i in range(4, 13))  # numbers of tokens at which the two ways are compared
MEMORY = 4.25e12  # bytes read per second: about what copies of an H200 measure
LINKS = {"NVLink": 450e9, "network": 50e9}  # bytes sent per second in each direction, by the data sheets
FEW, MANY, BALANCED = 32, 512, 8  # tokens of a step of decodes, and of one with prompts; ranks
ZIPF, COPIES = (0.0, 0.5, 1.0), (0, 8, 32)


def measure(part: str = "bytes") -> dict:
    """One part of the study.

    Raises:
        ValueError: there is no such part.
    """
    parts: dict[str, Callable[[], list[dict]]] = {"bytes": by_tokens, "crossing": by_ranks, "balance": by_router}
    return {"part": part, "rows": chosen(parts, part)()}


def by_tokens() -> list[dict]:
    return [count_bytes(tokens, BALANCED) for tokens in TOKENS]


def by_ranks() -> list[dict]:
    """For each number of ranks: how many rows another rank needs, and from how many tokens on whole experts win."""
    rows = []
    for ranks in RANKS:
        counted = [count_bytes(tokens, ranks) for tokens in DOUBLED if tokens >= ranks]
        wins = {link: first_win(counted, rate) for link, rate in LINKS.items()}
        rows.append({"ranks": ranks, "needed": needed(ranks)} | wins)
    return rows


def first_win(counted: list[dict], link: float) -> int | None:
    """The fewest tokens from which on whole experts take less time than a part of each; None: they never do."""
    found = None
    for row in reversed(counted):
        part, whole = (row[f"read_{way}"] / MEMORY + row[f"sent_{way}"] / link for way in ("part", "whole"))
        if whole >= part:
            break
        found = row["tokens"]
    return found


def by_router() -> list[dict]:
    """For each router: the experts that a rank reads, and the rows of the slowest rank, without and with copies."""
    rows = []
    for zipf in ZIPF:
        few, many = ([choose(tokens, zipf, seed) for seed in range(STEPS)] for tokens in (FEW, MANY))
        read = torch.stack([touched_by_rank(step, scattered(BALANCED), BALANCED) for step in few])
        row = {"zipf": zipf, "read_mean": read.mean().item(), "read_slowest": read.max(1).values.mean().item()}
        popularity = torch.stack([rows_of_experts(step) for step in many]).mean(0)
        for copies in COPIES:
            holds = placed(popularity, copies) if copies else torch.eye(BALANCED)[scattered(BALANCED)].T
            share = holds / holds.sum(0)  # of each expert's rows: every copy the same
            loads = torch.stack([share @ rows_of_experts(step) for step in many])  # [steps, ranks]
            row[f"copies_{copies}"] = (loads.max(1).values / loads.mean(1)).mean().item()
        rows.append(row)
    return rows


def count_bytes(tokens: int, ranks: int) -> dict:
    """Bytes that a rank reads and sends in a step: with a part of every expert, and with whole ones (slowest rank)."""
    touched, reads, sends, home = [], [], [], torch.arange(tokens) % ranks
    for seed in range(STEPS):
        step = choose(tokens, 0.0, seed)
        rank_of = torch.arange(EXPERTS.count) * ranks // EXPERTS.count
        by_rank = touched_by_rank(step, rank_of, ranks)
        goes = torch.zeros(tokens, ranks).scatter_(1, rank_of[step], 1.0)  # whether a row is needed by a rank
        goes[torch.arange(tokens), home] = 0
        sent = torch.zeros(ranks).index_add_(0, home, goes.sum(1)) + goes.sum(0)  # rows that go, and sums that return
        touched.append(by_rank.sum())
        reads.append(by_rank.max())
        sends.append(sent.max())
    read_part = torch.stack(touched).mean().item() / ranks * EXPERT
    sent_part = 2 * (ranks - 1) * tokens / ranks * ROW
    return {
        "tokens": tokens,
        "ranks": ranks,
        "read_part": read_part,
        "read_whole": torch.stack(reads).mean().item() * EXPERT,
        "sent_part": sent_part,
        "sent_whole": torch.stack(sends).mean().item() * ROW,
        "sent_formula": sent_part * needed(ranks),
    }


def needed(ranks: int) -> float:
    """The probability that a token has an expert on a given rank, under a router without preferences."""
    count, others = EXPERTS.count, EXPERTS.count - EXPERTS.count // ranks
    return 1 - comb(others, EXPERTS.per_token) / comb(count, EXPERTS.per_token)


def choose(tokens: int, zipf: float, seed: int) -> Tensor:
    """Sample the experts of every token, `[tokens, per_token]`; expert 0 is the most popular.

    The largest sums of log-probability and Gumbel noise are a sample without repetition.
    """
    uniform = torch.rand(tokens, EXPERTS.count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    popularity = -zipf * torch.arange(1, EXPERTS.count + 1).log()
    return (popularity - (-uniform.log()).log()).topk(EXPERTS.per_token).indices


def scattered(ranks: int) -> Tensor:
    """The rank of every expert, as many on each, in a random order."""
    order = torch.randperm(EXPERTS.count, generator=torch.Generator().manual_seed(0))
    return order * ranks // EXPERTS.count


def rows_of_experts(step: Tensor) -> Tensor:
    return torch.bincount(step.flatten(), minlength=EXPERTS.count).float()


def touched_by_rank(step: Tensor, rank_of: Tensor, ranks: int) -> Tensor:
    """How many different experts each rank reads, `[ranks]`."""
    return torch.bincount(rank_of[step.unique()], minlength=ranks).float()


def placed(popularity: Tensor, copies: int, ranks: int = BALANCED) -> Tensor:
    """Which ranks hold which experts, `[ranks, experts]` of 0 and 1, with this many copies more than experts."""
    count = torch.ones(len(popularity))
    for _ in range(copies):
        most = torch.where(count < ranks, popularity / count, -1.0).argmax()
        count[most] += 1
    holds, load, room = torch.zeros(ranks, len(popularity)), torch.zeros(ranks), (len(popularity) + copies) // ranks
    for expert in (popularity / count).argsort(descending=True, stable=True).tolist():
        for _ in range(int(count[expert])):
            is_free = (holds[:, expert] == 0) & (holds.sum(1) < room)
            rank = torch.where(is_free, load, float("inf")).argmin()
            holds[rank, expert] = 1
            load[rank] += popularity[expert] / count[expert]
    return holds
