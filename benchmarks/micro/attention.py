"""Paged attention by each backend, next to what the chip can do (GPU).

Decode attention reads every key and value once, so its yardstick is bandwidth: bytes of K, V, query and output over the
time, next to a large copy. Prefill is arithmetic: 4 × head_dim × heads operations for every (query, visible key) pair,
next to a large matrix product. Each launch of the CUDA graph reads another part of the pool, `CYCLE_BYTES` in all:
several times the L2 cache, which would otherwise flatter. Every backend is compared with the reference first.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.micro import caption, timed
from benchmarks.text import grid, number, times
from benchmarks.timing import graph_seconds
from stage_d_paged.attention import AttentionBackend, AttentionMetadata, BackendUnavailable, pick_backend

README, MARKERS, NEEDS_GPU = "stage_d_paged/attention", ("attention-table", "attention-short"), True
SHORT = (  # the cases of the short table
    "decode 1 × 1024, 14/2 × 64", "decode 1 × 32768, 16/8 × 128", "decode 32 × 640, 16/8 × 128",
    "decode 32 × 4096, 14/2 × 64", "decode 32 × 4096, 16/8 × 128", "prefill 1 × 8192, 16/8 × 128",
)  # fmt: skip
CYCLE_BYTES, MAX_LAUNCHES, REPEATS = 1 << 30, 100, 20
TOLERANCE = 0.02  # relative to the reference, which itself computes in bfloat16
BACKENDS = ("reference", "triton", "flash")
BLOCK_STUDY = ("decode 32 × 4096", "prefill 1 × 8192")  # the cases measured at several block sizes
BLOCK_SIZES = (16, 64, 128, 256)
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One batch shape: sequence s has `query_lens[s]` new tokens and `context_lens[s]` keys, the new ones included."""

    name: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_moved(self) -> int:
        """Keys and values of the context once, queries in, outputs out; two bytes an element."""
        kv = 2 * sum(self.context_lens) * self.kv_heads * self.head_dim
        return 2 * (kv + 2 * sum(self.query_lens) * self.heads * self.head_dim)

    @property
    def operations(self) -> int:
        """A multiply and an add for each element of q·k and of p·v, at each visible pair."""
        pairs = sum(q * (c - q) + q * (q + 1) // 2 for q, c in zip(self.query_lens, self.context_lens, strict=True))
        return 4 * pairs * self.heads * self.head_dim

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1


SHAPES = {  # lengths of the queries and of the contexts, by sequence
    "decode 1 × 128": ((1,), (128,)),
    "decode 1 × 1024": ((1,), (1024,)),
    "decode 1 × 32768": ((1,), (32768,)),
    "decode 32 × 640": ((1,) * 32, (640,) * 32),
    "decode 32 × 4096": ((1,) * 32, (4096,) * 32),
    "decode 128 × 100–2000": ((1,) * 128, tuple(100 + 37 * i % 1901 for i in range(128))),
    "prefill 1 × 1024": ((1024,), (1024,)),
    "prefill 1 × 8192": ((8192,), (8192,)),
    "prefill 16 × 512": ((512,) * 16, (512,) * 16),
    "prefill 32 × 32 after 1024": ((32,) * 32, (1056,) * 32),
    "mixed 2048 + 64 × 1024": ((2048,) + (1,) * 64, (2048,) + (1024,) * 64),
}
HEADS = {"16/8 × 128": (16, 8, 128), "14/2 × 64": (14, 2, 64)}  # of Qwen3-0.6B and of Qwen2.5-0.5B


def make_cases(shapes: Iterable[str], heads: Mapping[str, tuple[int, int, int]]) -> dict[str, Case]:
    """By name, each of these shapes with each of these numbers of heads."""
    names = {f"{shape}, {model}": (*SHAPES[shape], *counts) for shape in shapes for model, counts in heads.items()}
    return {name: Case(name, *sizes) for name, sizes in names.items()}


CASES = make_cases(SHAPES, HEADS)


def measure() -> dict:
    """Every case by every backend that is installed, and Triton at several block sizes."""
    rows, skipped = [], {}
    for case in CASES.values():
        for name in BACKENDS:
            try:
                backend = pick_backend(name, torch.device("cuda"), DTYPE, case.head_dim)
            except BackendUnavailable as error:
                skipped[name] = str(error)
                continue
            studied = name == "triton" and case.name.startswith(BLOCK_STUDY)
            sizes = {backend.preferred_block_size, *(BLOCK_SIZES if studied else ())}
            rows += [measure_case(case, backend, size) for size in sorted(sizes)]
            torch.cuda.empty_cache()
    return {"rows": rows, "skipped": skipped}


def measure_case(case: Case, backend: AttentionBackend, block_size: int) -> dict:
    """One row of the file."""
    arguments, scale = arguments_of(case, block_size), case.head_dim**-0.5
    reference = pick_backend("reference", torch.device("cuda"), DTYPE, case.head_dim)
    expected = reference.attend(*arguments[0], scale).float()
    error = ((backend.attend(*arguments[0], scale).float() - expected).norm() / expected.norm()).item()
    if not error < TOLERANCE:
        raise RuntimeError(f"{backend.name}, {case.name}, blocks of {block_size}: relative error {error} > {TOLERANCE}")
    launches = [lambda a=a: backend.attend(*a, scale) for a in arguments]
    capture = backend.name != "reference"  # it asks the device for the longest context
    samples = graph_seconds(launches if capture else launches[:4], REPEATS, capture=capture)
    row = {"case": case.name, "backend": backend.name, "block_size": block_size}
    return timed(samples, **row, preferred=block_size == backend.preferred_block_size, relative_error=error)


def arguments_of(case: Case, block_size: int) -> list[tuple]:
    """Argument sets (query, k_cache, v_cache, metadata), each with blocks of its own in one pool, shuffled."""
    blocks = [-(-context // block_size) for context in case.context_lens]
    sets = max(2, min(MAX_LAUNCHES, CYCLE_BYTES // case.bytes_moved))
    device, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    shape = (2, sets * sum(blocks), block_size, case.kv_heads, case.head_dim)
    pool = torch.empty(shape, dtype=DTYPE, device=device).normal_(generator=generator)
    order = torch.randperm(sets * sum(blocks), generator=generator, device=device).int().split(sum(blocks))
    starts = torch.tensor((0, *case.query_lens), device=device).cumsum(0, dtype=torch.int32)
    contexts = torch.tensor(case.context_lens, dtype=torch.int32, device=device)
    slots = torch.full((sum(case.query_lens),), -1, device=device)
    arguments = []
    for own in order:
        tables = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int32, device=device)
        for row, part in enumerate(own.split(blocks)):
            tables[row, : blocks[row]] = part
        metadata = AttentionMetadata(starts, contexts, slots, tables, max(case.query_lens), max(case.context_lens))
        query = torch.randn(sum(case.query_lens), case.heads, case.head_dim, dtype=DTYPE, device=device)
        arguments.append((query, pool[0], pool[1], metadata))
    return arguments


def table(results: list[dict]) -> dict[str, list[str]]:
    """Every case by every backend, then Triton's block sizes; and the few cases of the lesson with their floor."""
    result, top = results[0], results[0]["ceilings"]
    found = {(row["case"], row["backend"]): rate_of(row, top) for row in result["rows"] if row["preferred"]}
    full = {key: f"{rate.micros:.1f} µs, {rate.text}" for key, rate in found.items()}
    short = {(case, "floor"): number(r.micros * r.share) for case in SHORT if (r := found.get((case, "triton")))}
    short |= {key: f"{number(r.micros)}, {times(1 / r.share)}" for key, r in found.items() if key[0] in SHORT}
    by_size = {(r["case"], r["block_size"]): rate_of(r, top).text for r in result["rows"] if r["backend"] == "triton"}
    sizes_of = Counter(case for case, _ in by_size)
    studied = {key: text for key, text in by_size.items() if sizes_of[key[0]] > 1}
    note = (
        f"100 % of copy is {top['copy_bytes_per_s'] / 1e12:.2f} TB/s, 100 % of matmul "
        f"{top['matmul_operations_per_s'] / 1e12:.0f} TFLOP/s, measured in the same run; median of {REPEATS} samples, "
        "in a CUDA graph (the reference: eager); a decode only reads and a copy also writes, so a decode can pass 100 %"
    )
    cases = grid("case", full, [name for name in BACKENDS if any(name == own for _, own in found)])
    blocks = grid("Triton, block size", studied, sorted({size for _, size in studied}))
    heads = {"floor": "floor, µs"} | {backend: f"`{backend}`, µs, × the floor" for backend in BACKENDS}
    return {
        "attention-table": [*cases, "", *blocks, "", caption(result, note)],
        "attention-short": [*grid("case", short, heads), "", caption(result)],
    }


class Rate(NamedTuple):
    """What a backend reached in a case."""

    micros: float
    share: float  # of what the device does at best: bandwidth in a decode, arithmetic otherwise
    text: str


def rate_of(row: dict, ceilings: dict) -> Rate:
    case, seconds = CASES[row["case"]], statistics.median(row["samples"])
    if case.is_decode:
        share = case.bytes_moved / seconds / ceilings["copy_bytes_per_s"]
        return Rate(1e6 * seconds, share, f"{case.bytes_moved / seconds / 1e12:.2f} TB/s ({share:.0%} of copy)")
    share = case.operations / seconds / ceilings["matmul_operations_per_s"]
    return Rate(1e6 * seconds, share, f"{case.operations / seconds / 1e12:.0f} TFLOP/s ({share:.0%} of matmul)")
