"""Paged attention by each backend, compared with the chip's limits (GPU).

    python -m benchmarks.micro attention                  # every backend
    python -m benchmarks.micro attention part=prefill     # a prefill, by who brings its keys

Decode attention reads every key and value once, so its limit is bandwidth: the bytes of K, V, query and output per
second, compared with a large copy. Prefill is limited by arithmetic: 4 × head_dim × heads operations for every (query,
visible key) pair, compared with a large matrix product. Each launch of the CUDA graph reads another part of the pool,
`CYCLE_BYTES` in all: several times the L2 cache, so that no read hits it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import torch

from benchmarks.micro import chosen, timed
from benchmarks.timing import graph_seconds
from stage_d_paged.attention import AttentionMetadata, BackendUnavailable, pick_backend

NEEDS_GPU = True
CYCLE_BYTES, MAX_LAUNCHES, REPEATS = 1 << 30, 100, 20
BACKENDS = ("reference", "triton", "flash")
CUDA, DTYPE = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A batch of sequences with `query` new tokens and `context` keys each, the new ones included."""

    name: str
    sequences: int
    query: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_moved(self) -> int:
        """Count the bytes: keys and values of the context once, queries in, outputs out; two bytes per element."""
        kv, query = 2 * self.context * self.kv_heads, self.query * self.heads
        return 2 * self.sequences * (kv + 2 * query) * self.head_dim

    @property
    def operations(self) -> int:
        """Count a multiply and an add for each element of q·k and of p·v, for each visible pair."""
        pairs = self.query * (self.context - self.query) + self.query * (self.query + 1) // 2
        return 4 * self.sequences * pairs * self.heads * self.head_dim

    def floor(self, ceilings: dict) -> float:
        """Return the seconds at the speed of a copy, or for a prefill at the speed of a matrix product."""
        if self.query == 1:
            return self.bytes_moved / ceilings["copy_bytes_per_s"]
        return self.operations / ceilings["matmul_operations_per_s"]


SHAPES = {  # sequences, new tokens and context of each
    "decode 1 × 1024": (1, 1, 1024),
    "decode 1 × 32768": (1, 1, 32768),
    "decode 32 × 640": (32, 1, 640),
    "decode 32 × 4096": (32, 1, 4096),
    "prefill 1 × 8192": (1, 8192, 8192),
}
HEADS = {"28/4 × 128": (28, 4, 128), "16/8 × 128": (16, 8, 128), "14/2 × 64": (14, 2, 64)}  # of three Qwen models


def make_case(shape: str, heads: str) -> Case:
    return Case(f"{shape}, {heads}", *SHAPES[shape], *HEADS[heads])


NARROW, WIDE = "14/2 × 64", "16/8 × 128"
CASES = [make_case("decode 1 × 1024", NARROW), make_case("decode 1 × 32768", WIDE), make_case("decode 32 × 640", WIDE)]
CASES += [make_case("decode 32 × 4096", heads) for heads in (NARROW, WIDE)] + [make_case("prefill 1 × 8192", WIDE)]
CASES = {case.name: case for case in CASES}


PREFILL = CASES[f"prefill 1 × 8192, {WIDE}"]
INSTRUCTIONS = {"products": "wgmma.mma_async", "bulk_copies": "cp.async.bulk.tensor", "small_copies": "cp.async.c"}


def measure(part: str = "backends") -> dict:
    """One part of the study.

    Raises:
        ValueError: there is no such part.
    """
    rows = chosen({"backends": time_backends, "prefill": time_copies}, part)()
    return {"rows": rows} if part == "backends" else {"part": part, "rows": rows}


def time_backends() -> list[dict]:
    """Time every case with every installed backend."""
    rows = []
    for case in CASES.values():
        for name in BACKENDS:
            try:
                rows.append(timed(time_case(case, name), case=case.name, backend=name))
            except BackendUnavailable:
                continue
            torch.cuda.empty_cache()
    return rows


def time_case(case: Case, name: str) -> list[float]:
    """Return seconds per launch.

    Raises:
        BackendUnavailable: the backend is not installed.
    """
    backend = pick_backend(name, CUDA, DTYPE, case.head_dim)
    arguments, scale = arguments_of(case, backend.preferred_block_size), case.head_dim**-0.5
    launches = [lambda a=a: backend.attend(*a, scale) for a in arguments]
    capture = name != "reference"  # it asks the device for the longest context
    return graph_seconds(launches if capture else launches[:4], REPEATS, capture=capture)


def time_copies() -> list[dict]:
    """Time a prefill by who brings its tiles of keys, and count instructions."""
    from stage_d_paged.attention import hopper_prefill, triton_prefill  # here: only GPUs need Triton

    in_triton = mock.patch.object(hopper_prefill, "takes", lambda *_: False)
    without = mock.patch.object(triton_prefill, "_descriptor", lambda *_: None)
    ways = {
        "the copy engine": (triton_prefill._prefill_kernel, [in_triton]),
        "ordinary loads": (triton_prefill._prefill_kernel, [in_triton, without]),
        "the copy engine, asked by a separate warp": (hopper_prefill.hopper_prefill_kernel, []),
    }
    rows = []
    for way, (kernel, patches) in ways.items():
        programs = kernel.device_caches[torch.cuda.current_device()][0]
        before = set(programs)
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            samples = time_case(PREFILL, "triton")
        [program] = [programs[key] for key in set(programs) - before]
        counts = {name: program.asm["ptx"].count(text) for name, text in INSTRUCTIONS.items()}
        rows.append(timed(samples, way=way) | counts)
    return rows


def arguments_of(case: Case, block_size: int, device: torch.device = CUDA) -> list[tuple]:
    """Make argument sets (query, k_cache, v_cache, metadata), each with different, shuffled blocks of one pool."""
    blocks = -(-case.context // block_size)
    sets = max(2, min(MAX_LAUNCHES, CYCLE_BYTES // case.bytes_moved))
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, sets * case.sequences * blocks, block_size, case.kv_heads, case.head_dim)
    pool = torch.empty(shape, dtype=DTYPE, device=device).normal_(generator=generator)
    order = torch.randperm(shape[1], generator=generator, device=device).int()
    tokens = case.sequences * case.query
    starts = torch.arange(0, tokens + 1, case.query, dtype=torch.int32, device=device)
    contexts = torch.full((case.sequences,), case.context, dtype=torch.int32, device=device)
    slots = torch.full((tokens,), -1, device=device)
    arguments = []
    for tables in order.view(sets, case.sequences, blocks):
        query = torch.randn(tokens, case.heads, case.head_dim, dtype=DTYPE, device=device)
        metadata = AttentionMetadata(starts, contexts, slots, tables, case.query, case.context)
        arguments.append((query, pool[0], pool[1], metadata))
    return arguments
