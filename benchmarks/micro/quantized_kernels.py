"""Matrix products and attention that read 8 bits, next to those that read bfloat16 (GPU).

A decode step's products and its attention read everything once, so their yardstick is bandwidth: the bytes that must
be read over the time. Every launch of a CUDA graph reads another copy of the weights, or another part of the pool,
`CYCLE_BYTES` in all: several times the L2 cache, which would otherwise flatter. With `search=True` the tiles are
searched instead: `choose_tiles` of `beyond.quantization.tiles` has what was found.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch
import torch.nn.functional as F

from benchmarks.micro import attention as plain_attention
from benchmarks.micro import caption
from benchmarks.text import markdown
from benchmarks.timing import graph_seconds
from beyond.quantization.formats import FORMATS, Quantized, quantize_matrix, quantize_rows
from stage_d_paged.attention import pick_backend

README, MARKERS, NEEDS_GPU = "beyond/quantization", ("quantized-products", "quantized-attention"), True
CYCLE_BYTES, REPEATS = 1 << 29, 15
DTYPE = torch.bfloat16
TOKENS = (1, 32, 256, 1024)
SHOWN = ("7B QKV", "7B gate and up", "7B down", "0.5B down")  # in the lesson
COLUMNS = ("bfloat16", "int8", "fp8")
COMPILERS = 12  # processes that compile candidates of a search


@dataclass(frozen=True)
class Matrix:
    """A matrix of a model, and what the layer does with its product."""

    name: str
    kind: str  # product | gate_up | add
    rows: int
    columns: int


MATRICES = (
    Matrix("7B QKV", "product", 4608, 3584),
    Matrix("7B output", "add", 3584, 3584),
    Matrix("7B gate and up", "gate_up", 2 * 18944, 3584),
    Matrix("7B down", "add", 3584, 18944),
    Matrix("7B LM head", "product", 152064, 3584),
    Matrix("0.5B gate and up", "gate_up", 2 * 4864, 896),
    Matrix("0.5B down", "add", 896, 4864),
)


def measure(search: bool = False, matrices: str = ",".join(SHOWN), tokens: tuple[int, ...] = TOKENS) -> dict:
    """Every matrix in every format at every number of tokens, and attention; with `search`, every tile of int8."""
    chosen = [matrix for matrix in MATRICES if matrix.name in matrices.split(",")]
    if search:
        return {"rows": [*search_products(chosen, tokens), *search_attention()]}
    return {"rows": [*measure_products(chosen, tokens), *measure_attention()]}


# ---- products --------------------------------------------------------------------------------------------------


def measure_products(matrices: list[Matrix], tokens: tuple[int, ...]) -> Iterator[dict]:
    for matrix, name in itertools.product(matrices, COLUMNS):
        weights = make_weights(matrix, name)
        for count in tokens:
            samples = graph_seconds([launch_of(matrix, weight, count) for weight in weights], REPEATS)
            print(f"{matrix.name:18} {name:10} {count:5} tokens: {min(samples) * 1e6:8.1f} µs", flush=True)
            yield {"what": "product", "case": matrix.name, "format": name, "tokens": count,
                   "bytes": num_bytes(weights[0]), "samples": samples}  # fmt: skip


def make_weights(matrix: Matrix, name: str) -> list[torch.Tensor] | list[Quantized]:
    """As many copies as fill `CYCLE_BYTES`, two at least."""
    torch.manual_seed(0)
    weight = torch.randn(matrix.rows, matrix.columns, device="cuda", dtype=DTYPE) * matrix.columns**-0.5
    if name != "bfloat16":
        weight = quantize_matrix(weight, FORMATS[name])
    copies = max(2, CYCLE_BYTES // num_bytes(weight))
    return [Quantized(*(t.clone() for t in weight)) if isinstance(weight, Quantized) else weight.clone()
            for _ in range(copies)]  # fmt: skip


def num_bytes(weight: torch.Tensor | Quantized) -> int:
    return sum(t.nbytes for t in (weight if isinstance(weight, Quantized) else [weight]))


def launch_of(
    matrix: Matrix, weight: torch.Tensor | Quantized, tokens: int, tiles: object = None
) -> Callable[[], object]:
    """What a layer does with the matrix: fused with its neighbours for few tokens, the product alone for many."""
    from beyond.quantization import products  # here: Triton is needed on a GPU alone
    from stage_f_graph_tp.kernels import skinny_gemm

    x = torch.randn(tokens, matrix.columns, device="cuda", dtype=DTYPE)
    eight_bits = isinstance(weight, Quantized)
    if tokens > skinny_gemm.SKINNY_GEMM_MAX_TOKENS or matrix.kind == "product":
        return (lambda: products.product(x, weight, None, tiles)) if eight_bits else (lambda: F.linear(x, weight))
    module = products if eight_bits else skinny_gemm
    if matrix.kind == "gate_up":
        stream = products.scale_rows(x, torch.ones_like(x[0])) if eight_bits else skinny_gemm.sum_squares(x)
        return lambda: module.gate_up_silu(stream, 1e-6, weight, tiles)
    residual = torch.zeros(tokens, matrix.rows, device="cuda", dtype=DTYPE)
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    if not eight_bits:
        return lambda: skinny_gemm.product_add(x, weight, residual, counters, tiles)
    gain = torch.ones_like(residual[0])
    return lambda: products.product_add(x, weight, residual, gain, counters, tiles)


def tile_candidates(matrix: Matrix, tokens: int) -> list[object]:
    """Tiles that may be the fastest for this many tokens."""
    from beyond.quantization.tiles import Tiles

    few = tokens <= 32
    pairs = few and matrix.kind == "gate_up"
    shapes = itertools.product(
        (16, 32, 64) if few else (64, 128), (128, 256, 512) if few else (64, 128), (1, 2, 4) if few else (4,),
        (3, 4, 6, 8) if few else (2, 4, 5), (1, 4, 8) if few and matrix.kind == "add" else (1,),
    )  # fmt: skip
    # A warp multiplies 16 rows. With fewer, two would convert the same weights, unless each has a slice of them.
    found = [
        Tiles(rows // (1 + pairs), columns, warps, stages, splits, slices)
        for rows, columns, warps, stages, splits in shapes for slices in {1, warps if few else 1}
        if rows * slices >= 16 * warps
    ]  # fmt: skip
    block_m = max(8, min(128, tokens))
    fits = lambda t: t.stages * (t.rows * (1 + pairs) + 2 * block_m) * t.columns <= 200 << 10  # noqa: E731
    return [tiles for tiles in found if fits(tiles)]


def search_products(matrices: list[Matrix], tokens: tuple[int, ...]) -> Iterator[dict]:
    jobs = [(m, count, tiles) for m in matrices for count in tokens for tiles in tile_candidates(m, count)]
    with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:  # fills Triton's cache on disk
        possible = [job for job, runs in zip(jobs, pool.map(_runs, jobs, chunksize=4), strict=True) if runs]
    for matrix in matrices:
        weights = make_weights(matrix, "int8")
        for count in tokens:
            found = []
            for tiles in (tiles for m, n, tiles in possible if (m, n) == (matrix, count)):
                samples = graph_seconds([launch_of(matrix, weight, count, tiles) for weight in weights], 5)
                found.append({"what": "product search", "case": matrix.name, "tokens": count,
                              "bytes": num_bytes(weights[0]), "tiles": asdict(tiles), "samples": samples})  # fmt: skip
            found.sort(key=lambda row: min(row["samples"]))
            for row in found[:5]:
                seconds = min(row["samples"])
                print(f"{matrix.name:18} {count:4} tokens {seconds * 1e6:7.1f} µs "
                      f"{row['bytes'] / seconds / 1e12:5.2f} TB/s {[*row['tiles'].values()]}", flush=True)  # fmt: skip
            yield from found


def _runs(job: tuple[Matrix, int, object]) -> bool:
    """Run a candidate once, to compile it; False if it needs more of the chip than there is."""
    from triton.runtime.errors import OutOfResources

    matrix, tokens, tiles = job
    small = Quantized(
        torch.zeros(matrix.rows, matrix.columns, dtype=torch.int8, device="cuda"), torch.ones(matrix.rows, 1).cuda()
    )
    try:
        launch_of(matrix, small, tokens, tiles)()
    except OutOfResources:
        return False
    torch.cuda.synchronize()
    return True


# ---- attention -------------------------------------------------------------------------------------------------


# Batches of `benchmarks.micro.attention` that read much, with Qwen2.5-7B's heads too.
ATTENTION_CASES = plain_attention.make_cases(
    ("decode 1 × 1024", "decode 32 × 640", "decode 32 × 4096", "prefill 1 × 8192"),
    {"28/4 × 128": (28, 4, 128), **plain_attention.HEADS},
)


def measure_attention() -> Iterator[dict]:
    from beyond.quantization.attention.triton_paged import QuantizedTritonAttention

    device = torch.device("cuda")
    for case in ATTENTION_CASES.values():
        arguments = plain_attention.arguments_of(case, 64)
        for name in COLUMNS:
            backend = pick_backend("triton", device, DTYPE, case.head_dim)
            if name != "bfloat16":
                backend = QuantizedTritonAttention(device, DTYPE, case.head_dim)
                arguments = quantized_pools(arguments, name)
            launches = [lambda a=a, b=backend: b.attend(*a, 0.1) for a in arguments]
            samples = graph_seconds(launches, REPEATS)
            print(f"{case.name:40} {name:9}: {min(samples) * 1e6:9.1f} µs", flush=True)
            yield {"what": "attention", "case": case.name, "format": name, "samples": samples}
            arguments = plain_attention.arguments_of(case, 64) if name == "int8" else arguments
        torch.cuda.empty_cache()


def quantized_pools(arguments: list[tuple], name: str) -> list[tuple]:
    """The same batches, their one pool in 8 bits."""
    caches = []
    for pool in arguments[0][1:3]:
        values, scales = quantize_rows(pool, FORMATS[name])
        caches.append(Quantized(values, scales.transpose(1, 2).contiguous()))
    return [(query, *caches, metadata) for query, _, _, metadata in arguments]


def search_attention() -> Iterator[dict]:
    """Every configuration of the decode kernel that may be the fastest for an int8 cache of 32 long contexts."""
    cases = [case for case in ATTENTION_CASES.values() if case.name.startswith("decode 32 × 4096")]
    grid = list(itertools.product((32, 64), (1, 2, 4), (2, 3), (4, 8)))
    with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:
        small = [plain_attention.Case("", (1,), (64,), c.heads, c.kv_heads, c.head_dim) for c in cases]
        list(pool.map(_decode_once, *zip(*itertools.product(small, grid), strict=True), chunksize=4))
    for case in cases:
        arguments = quantized_pools(plain_attention.arguments_of(case, 64), "int8")
        found = []
        for shape in grid:
            samples = graph_seconds([decode_launch(a, shape) for a in arguments], 5)
            found.append({"what": "attention search", "case": case.name, "tiles": shape, "samples": samples})
        found.sort(key=lambda row: min(row["samples"]))
        for row in found[:5]:
            print(f"{case.name:32} {min(row['samples']) * 1e6:7.1f} µs {row['tiles']}", flush=True)
        yield from found


def decode_launch(arguments: tuple, shape: tuple[int, int, int, int]) -> Callable[[], None]:
    """The decode kernel with these keys per tile, warps, stages and programs per multiprocessor."""
    from beyond.quantization.attention.triton_decode import decode
    from stage_d_paged.attention.decode_plan import DecodeConfig

    n, warps, stages, programs = shape
    config = DecodeConfig(n, num_warps=warps, num_stages=stages, programs_per_sm=programs, min_splits=2)
    out, counters = torch.empty_like(arguments[0]), torch.zeros(1 << 12, dtype=torch.int32, device="cuda")
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    return lambda: decode(*arguments, 0.1, out, counters, sm_count, config)


def _decode_once(case: plain_attention.Case, shape: tuple[int, int, int, int]) -> None:
    decode_launch(quantized_pools(plain_attention.arguments_of(case, 64)[:1], "int8")[0], shape)()
    torch.cuda.synchronize()


# ---- tables ----------------------------------------------------------------------------------------------------


def table(results: list[dict]) -> dict[str, list[str]]:
    """Products, then attention: microseconds in bfloat16, int8 and fp8, and how many times bfloat16's speed int8 is."""
    result = results[0]
    rows = [row for row in result["rows"] if "search" not in row["what"]]
    seconds = {(r["case"], r.get("tokens"), r["format"]): statistics.median(r["samples"]) for r in rows}

    def body(what: str) -> list[list[object]]:
        keys = dict.fromkeys((r["case"], r.get("tokens")) for r in rows if r["what"] == what)
        return [
            [case, *([] if tokens is None else [tokens]),
             *(f"{seconds[case, tokens, name] * 1e6:.1f}" for name in COLUMNS),
             f"{seconds[case, tokens, 'bfloat16'] / seconds[case, tokens, 'int8']:.2f} ×"]
            for case, tokens in keys
        ]  # fmt: skip

    copy = result["ceilings"]["copy_bytes_per_s"] / 1e12
    note = caption(
        result, f"µs, medians of {REPEATS} samples in a CUDA graph; every launch reads memory of its own; "
        f"a copy moves {copy:.2f} TB/s"
    )  # fmt: skip
    products = markdown(["matrix", "tokens", *COLUMNS, "gain of int8"], body("product"))
    attention = markdown(["batch", *COLUMNS, "gain of int8"], body("attention"))
    return {"quantized-products": [*products, "", note], "quantized-attention": [*attention, "", note]}
