"""Matrix products and attention that read 8 bits, next to those that read bfloat16 (GPU).

A decode step's products and its attention read everything once, so their yardstick is bandwidth: the bytes that must
be read over the time. Every launch of a CUDA graph reads another copy of the weights, or another part of the pool,
`CYCLE_BYTES` in all: several times the L2 cache, which would otherwise flatter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.micro import caption, timed
from benchmarks.micro.attention import HEADS, arguments_of, make_case
from benchmarks.text import markdown, medians
from benchmarks.timing import graph_seconds
from beyond.quantization.formats import FORMATS, Quantized, quantize_matrix, quantize_rows
from stage_d_paged.attention import pick_backend

NEEDS_GPU = True
CYCLE_BYTES, REPEATS = 1 << 29, 15
DTYPE = torch.bfloat16
TOKENS = (1, 32, 256, 1024)
COLUMNS = ("bfloat16", "int8", "fp8")


@dataclass(frozen=True)
class Matrix:
    """A matrix of a model, and what the layer does with its product."""

    name: str
    kind: str  # product | gate_up | add
    rows: int
    columns: int


MATRICES = (
    Matrix("7B QKV", "product", 4608, 3584),
    Matrix("7B gate and up", "gate_up", 2 * 18944, 3584),
    Matrix("7B down", "add", 3584, 18944),
    Matrix("0.5B down", "add", 896, 4864),
)
# Batches of `benchmarks.micro.attention`, with all numbers of heads.
BATCHES = ("decode 1 × 1024", "decode 32 × 640", "decode 32 × 4096", "prefill 1 × 8192")
ATTENTION_CASES = [make_case(*names) for names in itertools.product(BATCHES, HEADS)]


def measure() -> dict:
    """Every matrix in every format at every number of tokens, and attention."""
    return {"rows": [*measure_products(), *measure_attention()]}


def measure_products() -> Iterator[dict]:
    for matrix, name in itertools.product(MATRICES, COLUMNS):
        weights = make_weights(matrix, name)
        size = num_bytes(weights[0])
        for count in TOKENS:
            samples = graph_seconds([launch_of(matrix, weight, count) for weight in weights], REPEATS)
            yield timed(samples, what="product", case=matrix.name, format=name, tokens=count, bytes=size)


def make_weights(matrix: Matrix, name: str) -> list[torch.Tensor] | list[Quantized]:
    """As many copies as fill `CYCLE_BYTES`, two at least."""
    torch.manual_seed(0)
    weight = torch.randn(matrix.rows, matrix.columns, device="cuda", dtype=DTYPE) * matrix.columns**-0.5
    if name != "bfloat16":
        weight = quantize_matrix(weight, FORMATS[name])
    copies = max(2, CYCLE_BYTES // num_bytes(weight))
    return [
        Quantized(*(t.clone() for t in weight)) if isinstance(weight, Quantized) else weight.clone()
        for _ in range(copies)
    ]


def num_bytes(weight: torch.Tensor | Quantized) -> int:
    return sum(t.nbytes for t in (weight if isinstance(weight, Quantized) else [weight]))


def launch_of(matrix: Matrix, weight: torch.Tensor | Quantized, tokens: int) -> Callable[[], object]:
    """What a layer does with the matrix: fused with its neighbours for few tokens, the product alone for many."""
    from beyond.quantization import products  # here: Triton is needed on a GPU alone
    from stage_f_graph_tp.kernels import skinny_gemm

    x = torch.randn(tokens, matrix.columns, device="cuda", dtype=DTYPE)
    eight_bits = isinstance(weight, Quantized)
    if tokens > skinny_gemm.SKINNY_GEMM_MAX_TOKENS or matrix.kind == "product":
        return (lambda: products.product(x, weight)) if eight_bits else (lambda: F.linear(x, weight))
    if matrix.kind == "gate_up":
        if eight_bits:
            scaled = products.scale_rows(x, torch.ones_like(x[0]))
            return lambda: products.gate_up_silu(scaled, 1e-6, weight)
        stream = skinny_gemm.sum_squares(x)
        return lambda: skinny_gemm.gate_up_silu(stream, 1e-6, weight)
    residual = torch.zeros(tokens, matrix.rows, device="cuda", dtype=DTYPE)
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    if not eight_bits:
        return lambda: skinny_gemm.product_add(x, weight, residual, counters)
    gain = torch.ones_like(residual[0])
    return lambda: products.product_add(x, weight, residual, gain, counters)


def measure_attention() -> Iterator[dict]:
    """A decode and a prefill kernel over caches in every format."""
    from beyond.quantization.attention.triton_paged import KERNELS
    from stage_d_paged.attention.triton_paged import TritonAttention

    device = torch.device("cuda")
    for case, name in itertools.product(ATTENTION_CASES, COLUMNS):
        arguments, backend = arguments_of(case, 64), pick_backend("triton", device, DTYPE, case.head_dim)
        if name != "bfloat16":
            arguments = quantized_pools(arguments, name)
            backend = TritonAttention(device, DTYPE, case.head_dim, KERNELS)
        samples = graph_seconds([lambda a=a, b=backend: b.attend(*a, 0.1) for a in arguments], REPEATS)
        yield timed(samples, what="attention", case=case.name, format=name)
        torch.cuda.empty_cache()


def quantized_pools(arguments: list[tuple], name: str) -> list[tuple]:
    """The same batches, their one pool in 8 bits."""
    caches = []
    for pool in arguments[0][1:3]:
        values, scales = quantize_rows(pool, FORMATS[name])
        caches.append(Quantized(values, scales.transpose(1, 2).contiguous()))
    return [(query, *caches, metadata) for query, _, _, metadata in arguments]


def table(results: list[dict]) -> dict[str, list[str]]:
    """Products, then attention: microseconds in bfloat16, int8 and fp8, and how many times bfloat16's speed int8 is."""
    result = results[0]
    note = caption(
        result,
        f"µs, medians of {REPEATS} samples in a CUDA graph; every launch reads memory of its own; "
        f"a copy moves {result['ceilings']['copy_bytes_per_s'] / 1e12:.2f} TB/s",
    )

    def lines(what: str, **heads: str) -> list[str]:
        found = medians([row for row in result["rows"] if row["what"] == what], *heads, "format")
        body = [
            [
                *case,
                *(f"{found[*case, name] * 1e6:.1f}" for name in COLUMNS),
                f"{found[*case, 'bfloat16'] / found[*case, 'int8']:.2f} ×",
            ]
            for case in dict.fromkeys(key[:-1] for key in found)
        ]
        return [*markdown([*heads.values(), *COLUMNS, "gain of int8"], body), "", note]

    products = lines("product", case="matrix", tokens="tokens")
    return {"quantized-products": products, "quantized-attention": lines("attention", case="batch")}
