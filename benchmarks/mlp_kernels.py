"""The kernel table of stage C: the MLP block by each generation of kernel, next to what the memory can do.

    python -m benchmarks.mlp_kernels --output mlp.json        # on an NVIDIA GPU
    python -m benchmarks.mlp_kernels --report mlp.json        # anywhere: the picture and the table of stage C

With few rows the block is a question of bandwidth: its weights must be read once, and nothing else is large. So the
yardstick is weight bytes over time, next to a large device-to-device copy measured in the same run.

A sample is a CUDA graph of one call a layer, each with weights of its own and fed by the call before, as in a model:
the weights of all layers are many times the L2 cache, which would otherwise flatter, and Python is not timed. Before
the clock each generation is compared with float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ceilings import measure_ceilings
from benchmarks.environment import environment
from benchmarks.mlp_report import write_report
from stage_b_decode_step import LLM as StageB
from stage_c_fused_mlp import LLM as StageC
from stage_c_fused_mlp import SamplingParams
from stage_c_fused_mlp.fused_mlp import (
    fused_ln_mlp,
    fused_swiglu_mlp,
    ln_mlp_reference,
    load_operators,
    swiglu_mlp_reference,
)

EPS = 1e-6
REPEATS = 20
REPLAYS = 10  # of the graph in a sample: long against the resolution of the device's clock
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
GENERATIONS = ("naive", "warp", "fused", "library")
NAIVE_ROWS = (1, 16)  # it needs milliseconds, and one row says what there is to say
MOST_ERROR = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """The MLP block of a model, and how many layers of it."""

    model: str
    hidden: int
    inter: int
    layers: int

    @property
    def weight_bytes(self) -> int:
        """Of gate, up and down of one layer in bfloat16."""
        return 3 * self.hidden * self.inter * 2


SHAPES = (
    Shape("qwen2.5-0.5b", 896, 4864, 24),
    Shape("qwen3-0.6b", 1024, 3072, 28),
    Shape("llama-3.2-1b", 2048, 8192, 16),
)


def random_layer(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """rms_weight, w_gate_up, w_down; scaled so that activations keep their size through the layers."""

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device="cuda") * scale).to(dtype)

    hidden, inter = shape.hidden, shape.inter
    return [
        1 + normal(hidden, scale=0.1),
        normal(2 * inter, hidden, scale=hidden**-0.5),
        normal(hidden, inter, scale=inter**-0.5),
    ]


def relative_error(out: Tensor, reference: Tensor) -> float:
    return ((out.double() - reference).norm() / reference.norm()).item()


def measure_errors(shape: Shape) -> list[dict]:
    """||out - ref|| / ||ref|| against float64, for every operator, dtype and generation, five rows."""
    found = []
    for dtype, most in MOST_ERROR.items():
        generator = torch.Generator("cuda").manual_seed(7)
        norm, w_in, w_out = random_layer(shape, dtype, generator)
        x, residual = (torch.randn(5, shape.hidden, generator=generator, device="cuda").to(dtype) for _ in range(2))
        beta = torch.randn(shape.hidden, generator=generator, device="cuda").to(dtype)
        w1 = w_in[: shape.inter].clone()
        swiglu, classical = [x, norm, w_in, w_out, residual], [x, norm, beta, w1, w_out]
        for operator, reference, inputs in [
            (fused_swiglu_mlp, swiglu_mlp_reference, swiglu),
            (fused_ln_mlp, ln_mlp_reference, classical),
        ]:
            expected = reference(*(tensor.double() for tensor in inputs), EPS)
            for generation in GENERATIONS:
                error = relative_error(operator(*inputs, EPS, generation), expected)
                if not error < most:
                    raise RuntimeError(f"{operator.__name__}, {generation}, {dtype}: error {error} is not under {most}")
                found.append(
                    {"operator": operator.__name__, "dtype": str(dtype), "generation": generation, "error": error}
                )
    return found


def measure(shape: Shape, layers: list[list[Tensor]], rows: int, generation: str) -> dict:
    """Seconds a layer: one row of the table."""
    x = torch.randn(rows, shape.hidden, device="cuda").to(torch.bfloat16)

    def forward() -> Tensor:
        hidden = x
        for norm, gate_up, down in layers:
            hidden = fused_swiglu_mlp(hidden, norm, gate_up, down, hidden, EPS, generation)
        return hidden

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    replays = 1 if generation == "naive" else REPLAYS
    samples = []
    for _ in range(3 if generation == "naive" else REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / replays / shape.layers)
    seconds = statistics.median(samples[2:])
    return {
        "model": shape.model,
        "rows": rows,
        "generation": generation,
        "seconds": seconds,
        "bytes_per_s": shape.weight_bytes / seconds,
        "samples": samples[2:],
    }


def measure_end_to_end() -> list[dict]:
    """Seconds a token of stages B and C, both compiled: Qwen2.5-0.5B's shapes, one request, 128 in, 256 out, greedy."""
    prompt = [token % 1000 for token in range(128)]
    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
    found = []
    for stage, engine in (("stage_b_decode_step", StageB), ("stage_c_fused_mlp", StageC)):
        llm = engine("random:qwen2.5-0.5b", device="cuda", dtype="bfloat16", compile=True)
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(6)][1:]
        samples = [output["metrics"]["tpot"] for output in outputs]
        found.append({"stage": stage, "seconds_a_token": statistics.median(samples), "samples": samples})
        print(f"{stage:20} {found[-1]['seconds_a_token'] * 1e3:.3f} ms a token", flush=True)
        del llm
    return found


def measure_all(shapes: list[Shape]) -> dict:
    """Every shape, number of rows and generation, in bfloat16."""
    load_operators().require_cuda()
    table = []
    errors = measure_errors(SHAPES[0])
    for shape in shapes:
        generator = torch.Generator("cuda").manual_seed(0)
        layers = [random_layer(shape, torch.bfloat16, generator) for _ in range(shape.layers)]
        for rows in ROWS:
            for generation in GENERATIONS:
                if generation != "naive" or rows in NAIVE_ROWS:
                    table.append(measure(shape, layers, rows, generation))
                    print(
                        f"{shape.model:14} {rows:3} rows  {generation:8} {table[-1]['seconds'] * 1e6:9.2f} us",
                        flush=True,
                    )
        del layers
    return {
        "kind": "mlp_kernels",
        **environment(),
        "ceilings": asdict(measure_ceilings(torch.device("cuda"), torch.bfloat16)),
        "options": {"repeats": REPEATS, "replays": REPLAYS, "dtype": "bfloat16", "eps": EPS},
        "shapes": [{**asdict(shape), "weight_bytes": shape.weight_bytes} for shape in shapes],
        "errors": errors,
        "rows": table,
        "end_to_end": [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mlp_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="measure, and write this JSON file")
    parser.add_argument(
        "--models", nargs="*", default=[shape.model for shape in SHAPES], help="which shapes to measure"
    )
    parser.add_argument("--end-to-end", action="store_true", help="also stages B and C, compiled: takes minutes")
    parser.add_argument("--report", type=Path, help="make the picture and the table of stage C from this JSON file")
    options = parser.parse_args()
    unknown = set(options.models) - {shape.model for shape in SHAPES}
    if unknown:
        parser.error(
            f"no shapes for {', '.join(sorted(unknown))}; there are: {', '.join(shape.model for shape in SHAPES)}"
        )
    if options.report:
        write_report(json.loads(options.report.read_text(encoding="utf-8")))
    elif not options.output:
        parser.error("give --output FILE to measure or --report FILE to report")
    elif not torch.cuda.is_available():
        parser.error("measuring needs an NVIDIA GPU, and PyTorch sees none; --report needs none")
    else:
        result = measure_all([shape for shape in SHAPES if shape.model in options.models])
        write(result, options.output)
        if options.end_to_end:
            result["end_to_end"] = measure_end_to_end()
            write(result, options.output)


def write(result: dict, path: Path) -> None:
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
