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

from benchmarks.micro import caption
from benchmarks.text import markdown, number, times
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
            sizes = {backend.preferred_block_size}
            if name == "triton" and case.name.startswith(BLOCK_STUDY):
                sizes.update(BLOCK_SIZES)
            rows += [measure_case(case, backend, size) for size in sorted(sizes)]
            print(f"{case.name:40} {name:9}: {min(rows[-1]['samples']) * 1e6:9.1f} µs", flush=True)
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
    preferred = block_size == backend.preferred_block_size
    return {"case": case.name, "backend": backend.name, "block_size": block_size, "preferred": preferred,
            "relative_error": error, "samples": samples}  # fmt: skip


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
    backends = [name for name in BACKENDS if any(backend == name for _, backend in found)]
    names = [name for name in CASES if any((name, backend) in found for backend in backends)]
    lines = markdown(["case", *backends], [
        [name, *(f"{r.micros:.1f} µs, {r}" if (r := found.get((name, backend))) else "–" for backend in backends)]
        for name in names
    ])  # fmt: skip
    by_size = {(r["case"], r["block_size"]): rate_of(r, top) for r in result["rows"] if r["backend"] == "triton"}
    studied = [name for name, count in Counter(name for name, _ in by_size).items() if count > 1]
    sizes = sorted({size for name, size in by_size if name in studied})
    body = [[name, *(by_size.get((name, size), "–") for size in sizes)] for name in studied]
    note = (
        f"100 % of copy is {top['copy_bytes_per_s'] / 1e12:.2f} TB/s, 100 % of matmul "
        f"{top['matmul_operations_per_s'] / 1e12:.0f} TFLOP/s, measured in the same run; median of {REPEATS} samples, "
        "in a CUDA graph (the reference: eager); a decode only reads and a copy also writes, so a decode can pass 100 %"
    )
    short = [
        [name, number(found[name, "triton"].floor_micros),
         *(f"{number(r.micros)}, {times(1 / r.share)}" if (r := found.get((name, backend))) else "–"
           for backend in BACKENDS)]
        for name in SHORT if (name, "triton") in found
    ]  # fmt: skip
    heads = ["case", "floor, µs", *(f"`{backend}`, µs, × the floor" for backend in BACKENDS)]
    blocks = markdown(["Triton, block size", *map(str, sizes)], body)
    return {
        "attention-table": [*lines, "", *blocks, "", caption(result, note)],
        "attention-short": [*markdown(heads, short), "", caption(result)],
    }


class Rate(NamedTuple):
    """What a backend reached in a case: bandwidth in a decode, arithmetic otherwise."""

    micros: float
    achieved: float  # TB/s or TFLOP/s
    share: float  # of what the device does at best
    is_decode: bool

    @property
    def floor_micros(self) -> float:
        return self.micros * self.share

    def __str__(self) -> str:
        if self.is_decode:
            return f"{self.achieved:.2f} TB/s ({self.share:.0%} of copy)"
        return f"{self.achieved:.0f} TFLOP/s ({self.share:.0%} of matmul)"


def rate_of(row: dict, ceilings: dict) -> Rate:
    case, seconds = CASES[row["case"]], statistics.median(row["samples"])
    work = case.bytes_moved if case.is_decode else case.operations
    top = ceilings["copy_bytes_per_s" if case.is_decode else "matmul_operations_per_s"]
    return Rate(1e6 * seconds, work / seconds / 1e12, work / seconds / top, case.is_decode)
