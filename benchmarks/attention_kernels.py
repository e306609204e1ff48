"""The kernel table of stage D: paged attention by each backend, next to what the chip can do.

    python -m benchmarks.attention_kernels --output attention.json      # on an NVIDIA GPU
    python -m benchmarks.attention_kernels --report attention.json      # anywhere: the picture and the table

Decode attention reads every key and value once, so its yardstick is bandwidth: bytes of K, V, query and output over the
time, next to a large device-to-device copy. Prefill is arithmetic: 4 × head_dim × heads operations for every (query,
visible key) pair, next to a large matrix product. Both ceilings are measured in the same run.

Launches are captured in a CUDA graph, so what is timed is the kernels and not Python. Each launch of a graph reads
another part of the pool, `CYCLE_BYTES` in all: several times the L2 cache, which would otherwise flatter. Every backend
is compared with the reference before it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.attention_report import write_report
from benchmarks.ceilings import measure_ceilings
from benchmarks.environment import environment
from stage_d_paged.attention import AttentionBackend, AttentionMetadata, BackendUnavailable, pick_backend

CYCLE_BYTES = 1 << 30
MAX_LAUNCHES = 100
REPEATS = 20
TOLERANCE = 0.02  # relative to the reference, which itself computes in bfloat16
BACKENDS = ("reference", "triton", "flash")
PAGE_STUDY = ("decode 32 × 4096", "prefill 1 × 8192")  # the cases measured at several page sizes


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


def cases() -> list[Case]:
    """Shapes of Qwen3-0.6B (16/8 heads of 128) and Qwen2.5-0.5B (14/2 heads of 64)."""
    models = {"16/8 × 128": (16, 8, 128), "14/2 × 64": (14, 2, 64)}
    uneven = tuple(100 + 37 * i % 1901 for i in range(128))
    shapes = {
        "decode 1 × 128": ((1,), (128,)),
        "decode 1 × 1024": ((1,), (1024,)),
        "decode 1 × 32768": ((1,), (32768,)),
        "decode 32 × 640": ((1,) * 32, (640,) * 32),
        "decode 32 × 4096": ((1,) * 32, (4096,) * 32),
        "decode 128 × 100–2000": ((1,) * 128, uneven),
        "prefill 1 × 1024": ((1024,), (1024,)),
        "prefill 1 × 8192": ((8192,), (8192,)),
        "prefill 16 × 512": ((512,) * 16, (512,) * 16),
        "prefill 32 × 32 after 1024": ((32,) * 32, (1056,) * 32),
        "mixed 2048 + 64 × 1024": ((2048,) + (1,) * 64, (2048,) + (1024,) * 64),
    }
    return [
        Case(f"{shape}, {model}", *lens, *heads) for shape, lens in shapes.items() for model, heads in models.items()
    ]


def build(case: Case, page: int, device: torch.device, dtype: torch.dtype) -> list[tuple]:
    """Argument sets (query, k_cache, v_cache, metadata), each with pages of its own in one pool, shuffled."""
    pages = [-(-context // page) for context in case.context_lens]
    sets = max(2, min(MAX_LAUNCHES, CYCLE_BYTES // case.bytes_moved))
    generator = torch.Generator(device).manual_seed(0)
    pool = torch.empty((2, sets * sum(pages), page, case.kv_heads, case.head_dim), dtype=dtype, device=device)
    pool.normal_(generator=generator)
    order = torch.randperm(sets * sum(pages), generator=generator, device=device).int().split(sum(pages))
    starts = torch.tensor((0, *case.query_lens), device=device).cumsum(0, dtype=torch.int32)
    arguments = []
    for own in order:
        tables = torch.full((len(pages), max(pages)), -1, dtype=torch.int32, device=device)
        for row, part in enumerate(own.split(pages)):
            tables[row, : pages[row]] = part
        slots = torch.full((sum(case.query_lens),), -1, device=device)
        contexts = torch.tensor(case.context_lens, dtype=torch.int32, device=device)
        metadata = AttentionMetadata(starts, contexts, slots, tables, max(case.query_lens), max(case.context_lens))
        query = torch.randn(sum(case.query_lens), case.heads, case.head_dim, dtype=dtype, device=device)
        arguments.append((query, pool[0], pool[1], metadata))
    return arguments


def time_launches(launches: list[Callable[[], object]], graph: bool = True) -> list[float]:
    """Seconds a launch, `REPEATS` samples; all launches of a sample in one CUDA graph if they can be captured."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for launch in launches:
                launch()
        replay = captured.replay
    else:
        launches = launches[:4]

        def replay() -> None:
            for launch in launches:
                launch()

    samples = []
    for _ in range(REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / len(launches))
    return samples[2:]


def measure(case: Case, backend: AttentionBackend, page: int) -> dict:
    """One row of the table."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    arguments = build(case, page, device, dtype)
    scale = case.head_dim**-0.5
    expected = pick_backend("reference", device, dtype, case.head_dim).attend(*arguments[0], scale).float()
    error = ((backend.attend(*arguments[0], scale).float() - expected).norm() / expected.norm()).item()
    if not error < TOLERANCE:
        raise RuntimeError(f"{backend.name} on {case.name}, pages of {page}: relative error {error} > {TOLERANCE}")
    launches = [lambda a=a: backend.attend(*a, scale) for a in arguments]
    samples = time_launches(launches, graph=backend.name != "reference")
    seconds = statistics.median(samples)
    return {
        "case": case.name,
        "kind": case.name.split()[0],
        "backend": backend.name,
        "page": page,
        "seconds": seconds,
        "tb_per_s": case.bytes_moved / seconds / 1e12,
        "tflop_per_s": case.operations / seconds / 1e12,
        "relative_error": error,
        "launches_in_a_sample": len(launches) if backend.name != "reference" else min(4, len(launches)),
        "samples": samples,
    }


def measure_all(page_sizes: list[int]) -> dict:
    """The whole table: every case by every backend that is installed, and Triton at several page sizes."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    rows, skipped = [], {}
    for case in cases():
        for name in BACKENDS:
            try:
                backend = pick_backend(name, device, dtype, case.head_dim)
            except BackendUnavailable as error:
                skipped[name] = str(error)
                continue
            pages = {backend.preferred_block_size}
            if name == "triton" and case.name.startswith(PAGE_STUDY):
                pages.update(page_sizes)
            for page in sorted(pages):
                rows.append(measure(case, backend, page))
                rows[-1]["preferred_page"] = page == backend.preferred_block_size
                print(f"{case.name:40} {name:9} pages of {page:3}: {rows[-1]['seconds'] * 1e6:9.1f} us", flush=True)
            torch.cuda.empty_cache()
    return {
        "kind": "attention_kernels",
        "environment": environment(),
        "ceilings": asdict(measure_ceilings(device, dtype)),
        "options": {"cycle_bytes": CYCLE_BYTES, "repeats": REPEATS, "page_sizes": page_sizes, "dtype": str(dtype)},
        "cases": [asdict(case) for case in cases()],
        "skipped": skipped,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="measure, and write this JSON file")
    parser.add_argument("--page-sizes", type=int, nargs="*", default=[16, 64, 128, 256])
    parser.add_argument("--report", type=Path, help="make the picture and the table of stage D from this JSON file")
    options = parser.parse_args()
    if options.report:
        write_report(json.loads(options.report.read_text(encoding="utf-8")))
    elif not options.output:
        parser.error("give --output FILE to measure or --report FILE to report")
    elif not torch.cuda.is_available():
        parser.error("measuring needs an NVIDIA GPU, and PyTorch sees none; --report needs none")
    else:
        result = measure_all(options.page_sizes)
        options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
