"""What a lesson says in words about a measurement is what the committed results say.

Tables are written by `python -m benchmarks.report`; sentences are not. Here a sentence's number is put in from the
results, so that a new measurement shows which sentences it makes wrong; a sentence with a rough figure ("a third") has
the range in which it may be said.
"""

from __future__ import annotations

import re
import statistics
from functools import cache
from pathlib import Path

import pytest

from benchmarks.floor import ModelCost
from benchmarks.groups import Group, group_results
from benchmarks.micro import kernel_spans, layers, mlp, speculation, ttft_rate
from benchmarks.recording import Recording, from_rows
from benchmarks.results import RESULTS, load, load_all
from benchmarks.serve import percentile
from stage_a_naive.presets import preset_config

ROOT = Path(__file__).resolve().parent.parent
MODEL = "qwen2.5-0.5b"
WITH_SDPA = "B compiled with SDPA in the step"


@cache
def results(name: str) -> dict:
    return load(RESULTS / f"{name}.json")


@cache
def group(study: str = "") -> Group:
    """The engines on the GPU, or those of a study, with the model of the front page."""
    groups = group_results(load_all())
    return next(g for g in groups if g.size == "gpu" and g.model.endswith(MODEL) and g.study == study)


def in_ablation(row: str) -> float:
    """ms per token of a row of stage B's study."""
    return group("stage-b").median(row, "single", "tpot_ms")


def without(idea: str) -> float:
    """ms per token of stage B compiled without one of its ideas, as a share of those with all of them."""
    return in_ablation(f"B compiled without {idea}") / in_ablation("B compiled")


def step(engine: str, workload: str = "single", figure: str = "tpot_ms") -> float:
    found = group().median(engine, workload, figure)
    assert found
    return found


def on_cpu(engine: str, workload: str, figure: str) -> float:
    """The same of the tutor on a CPU."""
    tutors = next(g for g in group_results(load_all()) if g.size == "cpu" and g.model == "tutor" and not g.study)
    return tutors.median(engine, workload, figure)


def far(engine: str) -> float:
    return step(engine) / group().floor("single", "tpot_ms")


def launches(engine: str) -> float:
    return step(engine, figure="launches")


def kernels(engine: str, study: str = "") -> float:
    """Kernels that run in a decode step, whoever launches them."""
    return group(study).rows[engine, "single"]["launches"]["kernels"]


def first_step(engine: str) -> float:
    """ms per token the first time that a process serves a request of these lengths."""
    return group().rows[engine, "single"]["first_visit"]["tpot_ms"]


def estimated_seconds(engine: str, workload: str) -> str:
    """Of a row that was not run because it would have taken too long."""
    return re.search(r"about (\d+) s", group().rows[engine, workload]["not_run"])[1]


def empty_percent(block_size: int) -> float:
    """% of the slots held by the 256 requests of `mixed` that are empty."""
    rows = results("block_waste-counted")["rows"]
    return next(100 * (1 - row["tokens"] / row["slots"]) for row in rows if row["block_size"] == block_size)


def ceilings() -> dict[str, float]:
    return group().own[-1]["ceilings"]


def layer_step(kind: str, rows: int) -> float:
    """µs per decode step by the kind of its layers."""
    return layers.micros(results("layers-h200"), MODEL)[rows, kind]


def parts_of_attention(most: str, case: int) -> float:
    """µs per step of Qwen3 with at most this many parts of an attention."""
    measured = results("decode_kernel_history_h200")["compiled_for_a_shape"]["parts_of_an_attention"]["most_parts"]
    return measured[most]["qwen3-0.6b"][case]


def layer_floor(rows: int) -> float:
    copy = results("layers-h200")["ceilings"]["copy_bytes_per_s"]
    return 1e6 * layers.floor_seconds(MODEL, rows, layers.CONTEXT, copy)


@cache
def recording(name: str) -> Recording:
    return next(r for r in from_rows(results("kernel_spans-h200")["rows"]) if r.name == name)


def part(name: str, *parts: str) -> float:
    """Share of a recorded step."""
    found = kernel_spans.account(recording(name))
    return sum(found[p] for p in parts) / sum(found.values())


def idle_between_steps(name: str) -> float:
    """Share of the time between two recorded steps."""
    found = kernel_spans.between_steps(recording(name))
    return found["idle"] / sum(found.values())


def in_waterfall(engine: str) -> float:
    """Seconds per token."""
    return next(statistics.median(r["samples"]) for r in results("waterfall-h200")["rows"] if r["engine"] == engine)


def mlp_time(variant: str, rows: int) -> float:
    key = (MODEL, rows, variant)
    [row] = [r for r in results("mlp-h200")["rows"] if (r["model"], r["rows"], r["variant"]) == key]
    return statistics.median(row["samples"])


def mlp_far(variant: str) -> float:
    floor = mlp.sizes(MODEL)[-1] / results("mlp-h200")["ceilings"]["copy_bytes_per_s"]
    return mlp_time(variant, 1) / floor


def tried(variant: str) -> float:
    """µs of a step of 32 rows with a variant of the skinny GEMMs that was not kept; the first of several series."""
    rows = results("skinny_gemm_history_h200")["rows"]
    return next(r["microseconds"] for r in rows if (r["variant"], r["model"], r["rows"]) == (variant, MODEL, 32))


def merged(way: str, measured: str, streams: bool = False) -> float:
    """µs of a hand-over of four parts of an attention, in a program of its own."""
    rows, key = results("cluster_merge_history_h200")["rows"], (measured, way, MODEL, 4, streams)
    names = ("measured", "way", "model", "parts", "streams")
    return next(statistics.median(r["median"]) / 1e3 for r in rows if tuple(map(r.get, names)) == key)


def residents(cluster: int) -> int:
    rows = results("cluster_merge_history_h200")["rows"]
    return next(r["multiprocessors_used"] for r in rows if (r["measured"], r.get("cluster")) == ("resident", cluster))


def after_attention() -> float:
    """µs per layer between the slowest attention and the product that waits for it."""
    rows = results("decode_step-h200")["rows"]
    phases = next(r["phases"] for r in rows if (r["model"], r["what"]) == (MODEL, "trace"))
    return 1e6 * (phases["output: wait"]["median"] - phases["attention"]["slowest"])


def of_rows(more: int, fewer: int) -> list[str]:
    """The least and the most of the megakernel's time with more rows by that with fewer, of all models and contexts."""
    rows = [r for r in results("decode_step-h200")["rows"] if (r["what"], r.get("variant")) == ("step", "")]
    times = {(r["model"], r["context"], r["rows"]): statistics.median(r["samples"]) for r in rows}
    ratios = [times[(*case, more)] / time for (*case, count), time in times.items() if count == fewer]
    return [f"{min(ratios):.1f}", f"{max(ratios):.1f}"]


def grown(name: str) -> float:
    """Time of a part of a step of 256 requests by that of 32."""
    many, few = (kernel_spans.account(recording(f"stage F, {count} requests")) for count in (256, 32))
    return many[name] / few[name]


def earlier(name: str, **wanted: object) -> float:
    """µs of a variant that was measured before one was chosen; the fastest, if several fit."""
    rows = results(f"{name}_history_h200")["rows"]
    return min(row["microseconds"] for row in rows if wanted.items() <= row.items())


def of_eight_rows(model: str, context: int) -> list[str]:
    """µs per step by the megakernel and by the layers."""
    kinds = "megakernel", "skinny GEMM"
    times = [earlier("megakernel_rows", model=model, rows=8, context=context, layers=kind) for kind in kinds]
    return [f"{time:.0f}" for time in times]


def qkv_bytes() -> float:
    cost = preset_config(MODEL)
    return 2 * cost.hidden_size * (cost.num_attention_heads + 2 * cost.num_key_value_heads) * 64


def bytes_left(model: str) -> str:
    """The share of the bytes that a step of one request reads with its layers in int8."""
    rows = [r for r in results("quantized_bytes-counted")["rows"] if (r["model"], r["batch"]) == (model, "1 × 640")]
    read = {r["kind"]: r["weight_bytes"] + r["kv_bytes"] for r in rows}
    return f"{read['weights'] / read['bfloat16']:.0%}"


def tutor_format(kind: str) -> dict:
    return next(r for r in results("quantized_quality-cpu")["rows"] if (r["model"], r["kind"]) == ("tutor", kind))


def drafted_ms(way: str, draft: int = 8, batch: int = 1) -> str:
    """ms per token on the GPU with scripted drafts, as the lesson says it."""
    return f"{1e3 * speculation.medians_of(results('speculation-h200'))[way, draft, batch]:.3f}"


def looking_percent() -> float:
    """% of the time per token that looking for guesses costs where there are none, the most of all batch sizes."""
    return speculation.most_extra(results("speculation-h200"), "looking", "plain, noisy")


def tutors_tokens_per_step(drafts: str) -> float:
    rows = {(r["speculation"], r["asked"]): r for r in results("speculation-h200")["text"]}
    row = rows[drafts, "again" if drafts == "ngram" else "once"]
    return row["num_generated_tokens"] / row["num_steps"]


def megabytes(kind: str) -> float:
    return tutor_format(kind)["matrix_bytes"] / 1e6


def http_share(machine: str, way: str) -> float:
    """What a server leaves of the engine's throughput."""
    rates = {row["way"]: row["tokens_per_s"] for row in results(f"http_cost-{machine}")["rows"]}
    return statistics.median(a / b for a, b in zip(rates[way], rates["generate"], strict=True))


def first_tokens(way: str) -> float:
    """Milliseconds on the H200 until 64 requests have their first tokens."""
    rows = results("http_cost-h200")["rows"]
    return next(statistics.median(row["first_tokens_ms"]) for row in rows if row["way"] == way)


def run_ms(way: str) -> float:
    """Milliseconds until all of them are answered."""
    result = results("http_cost-h200")
    rate = next(statistics.median(row["tokens_per_s"]) for row in result["rows"] if row["way"] == way)
    return 1e3 * result["streams"] * result["output_len"] / rate


def unluckiest(engine: str) -> list[float]:
    """Milliseconds until 99 % of the requests on the H200 have their first tokens, at each rate."""
    found = ttft_rate.times(results("ttft_rate-h200"), "ttft_ms")
    return [percentile(values, 99) for (_, name), values in found.items() if name == engine]


def eight_bit_gain(workload: str, figure: str) -> float:
    found = next(g for g in group_results(load_all()) if g.study == "quantization")
    return found.median("F", workload, figure) / found.median("int8", workload, figure)


def prefetched(rows: int) -> list[str]:
    """µs per layer of Qwen2.5-7B with the best prefetches, and without."""
    wanted = {"chain": "qwen2.5-7b, bfloat16", "rows": rows}
    return [f"{earlier('prefetch', **wanted):.1f}", f"{earlier('prefetch', **wanted, variant='today'):.1f}"]


def many_tokens(kernel: str, per_program: int) -> str:
    """µs of a kernel for 8,192 tokens of Qwen2.5-7B."""
    return f"{earlier('elementwise', kernel=kernel, model='qwen2.5-7b', tokens=8192, per_program=per_program):.0f}"


def all_reduce_us(rows: int, **wanted: object) -> float:
    """µs of a sum over two ranks, or of a rank's half of Qwen3-0.6B's `down`."""
    found = results("all_reduce-h200-qwen3-0.6b")["rows"]
    [row] = [row for row in found if row["rows"] == rows and wanted.items() <= row.items()]
    return 1e6 * statistics.median(row["samples"])


def down_us(rows: int, product: str) -> float:
    return all_reduce_us(rows, product=product)


def launches_against_one(rows: int) -> float:
    """How much longer product, all-reduce and squares take than the product that does all three."""
    return down_us(rows, "library's, all-reduce, squares") / down_us(rows, "with the sum over the ranks")


def with_loads(rows: int, stages: str) -> float:
    """µs per layer of half of Qwen2.5-7B, by how many loads its products have in flight."""
    return earlier("loads_in_flight", chain="half of qwen2.5-7b", rows=rows, sums="behind", stages=stages)


def engine_with_loads(stages: str) -> float:
    """ms per step of 32 requests to Qwen2.5-7B on two GPUs. Nothing but the loads differs."""
    found = results("loads_in_flight_history_h200")["engine"]
    wanted = {"requests": 32, "sums": "behind", "stages": stages}
    return statistics.median(next(row["milliseconds"] for row in found if wanted.items() <= row.items()))


def with_ranks(model: str, engine: str, workload: str = "single", figure: str = "tpot_ms") -> float:
    """Stage F on one GPU or on several."""
    found = next(g for g in group_results(load_all()) if g.study == "ranks" and g.model.endswith(model))
    return found.median(engine, workload, figure)


def weight_micros() -> float:
    """µs to read all weights, at the speed of a copy beside which the megakernel was measured."""
    copy = results("decode_step-h200")["ceilings"]["copy_bytes_per_s"]
    return 1e6 * ModelCost(preset_config(MODEL), 2).weight_bytes / copy


def quantized_row(model: str, kind: str, requests: int) -> dict:
    wanted = {"model": model, "kind": kind, "rows": requests}
    return next(row for row in results("quantized_step-h200")["rows"] if wanted.items() <= row.items())


def quantized_ms(model: str, kind: str, requests: int) -> float:
    return 1e3 * statistics.median(quantized_row(model, kind, requests)["samples"])


def quantized_far(model: str, kind: str, requests: int) -> float:
    row = quantized_row(model, kind, requests)
    copy = results("quantized_step-h200")["ceilings"]["copy_bytes_per_s"]
    return statistics.median(row["samples"]) * copy / (row["weight_bytes"] + row["kv_bytes"])


def idle_percent(batches: int) -> float:
    """% of the time that two stages on two GPUs are idle, by the batches in flight."""
    rows = [row for row in results("pipeline-h200")["rows"] if row["study"] == "measured"]
    return next(100 * statistics.median(row["samples"]) for row in rows if row["batches"] == batches)


def bytes_between_hosts(layout: str) -> float:
    [row] = [r for r in results("pipeline-two-hosts")["rows"] if r.get("layout") == layout]
    return row["bytes"]


def hidden_state_bytes() -> int:
    return 4 * preset_config(MODEL).hidden_size


F32, D32 = "stage F, 32 requests", "stage F, graphs only, 32 requests"
IDLE = ("between kernels", "waiting for the CPU")
A, B, C = "stage_a_naive/README.md", "stage_b_decode_step/README.md", "stage_c_fused_mlp/README.md"
D, F, KERNELS = "stage_d_paged/README.md", "stage_f_graph_tp/README.md", "stage_f_graph_tp/kernels/README.md"
EVERY_LINE = "five launches, L2 prefetch of every cache line of the weights before the wait"
ONE_PER_ROW = "five launches, one bulk L2 prefetch per weight row before the wait"
RANKS, PIPELINE = "stage_f_graph_tp/tensor_parallel/README.md", "beyond/scale_out/README.md"
MEGAKERNEL = "stage_f_graph_tp/megakernel/README.md"
TRACES = "stage_f_graph_tp/megakernel/measurements.md"
LAYERS = "stage_f_graph_tp/kernels/measurements.md"
SPECULATION = "beyond/speculation/README.md"
EIGHT_BITS, QUALITY = "beyond/quantization/README.md", "beyond/quantization/quality.md"
# (lesson, sentence with {} where numbers are, the numbers as text)
EXACT = {
    "the loop of stage B": (
        "stage_b_decode_step/loop.py",
        "[H200: {} → {} launches per step]",
        lambda: [f"{launches('B'):,.0f}", f"{launches('B compiled'):.0f}"],
    ),
    "the loop of stage C": (
        "stage_c_fused_mlp/loop.py",
        "[H200: {} → {} µs per MLP of Qwen2.5-0.5B]",
        lambda: [f"{1e6 * mlp_time(kernel, 1):.1f}" for kernel in ("library", "fused")],
    ),
    "the loop of stage D": (
        "stage_d_paged/loop.py",
        "[H200: {} → {} % empty]",
        lambda: [f"{empty_percent(4096):.0f}", f"{empty_percent(16):.1f}"],
    ),
    "the loop of stage E": (
        "stage_e_batching/loop.py",
        "[H200: 256 requests in {} (estimated) → {} seconds]",
        lambda: [estimated_seconds("D", "mixed"), f"{step('E', 'mixed', 'seconds'):.0f}"],
    ),
    "the loop of graphs": (
        "stage_f_graph_tp/graphs_loop.py",
        "[H200: {} → {} ms per token]",
        lambda: [f"{group('stage-f').median(row, 'single', 'tpot_ms'):.2f}" for row in ("no graphs", "all on")],
    ),
    "the loop of overlap": (
        "stage_f_graph_tp/overlap_loop.py",
        "[H200: {} → {} ms per token]",
        lambda: [f"{group('stage-f').median(row, 'single', 'tpot_ms'):.3f}" for row in ("no overlap", "all on")],
    ),
    "the loop of kernels": (
        "stage_f_graph_tp/kernels/loop.py",
        "[H200: 7 → 5, a step of 32 requests {} → {} µs]",
        lambda: [f"{layer_step(kind, 32):.0f}" for kind in ("nine", "five")],
    ),
    "the loop of tensor parallelism": (
        "stage_f_graph_tp/tensor_parallel/loop.py",
        "[H200: Qwen2.5-7B, {} → {} ms per token]",
        lambda: [f"{with_ranks('qwen2.5-7b', name):.2f}" for name in ("F", "F, 2 GPUs")],
    ),
    "the loop of quantization": (
        "beyond/quantization/loop.py",
        "[H200: Qwen2.5-7B, {} → {} ms per step]",
        lambda: [f"{quantized_ms('qwen2.5-7b', kind, 1):.2f}" for kind in ("bfloat16", "int8")],
    ),
    "the loop of speculation": (
        "beyond/speculation/loop.py",
        "[H200: {} → {} ms per token, 83 % of the guesses being right]",
        lambda: [drafted_ms("plain", draft=4), drafted_ms("accepted")],
    ),
    "the loop of a pipeline": (
        "beyond/scale_out/loop.py",
        "[H200: {} → {} % of the time]",
        lambda: [f"{idle_percent(batches):.0f}" for batches in (1, 2)],
    ),
    "the loop of serving": (
        "beyond/serving/loop.py",
        "[H200: {} → {} tokens/s with 1 and 256, stage E]",
        lambda: [f"{1000 / step('E'):.0f}", f"{step('E', 'mixed', 'output_tokens_per_s'):,.0f}"],
    ),
    "kernels: the floor": (KERNELS, "must read bytes that take {} µs", lambda: [f"{layer_floor(32):.0f}"]),
    "kernels: stage D's layers": (
        KERNELS,
        "graph it takes {} µs, {} × as long",
        lambda: [f"{layer_step('stage D', 32):.0f}", f"{layer_step('stage D', 32) / layer_floor(32):.1f}"],
    ),
    "kernels: 32 requests": (
        KERNELS,
        "For 32 requests a step takes {} µs with stage D's layers, {} with element-wise fusion and {} with",
        lambda: [f"{layer_step(kind, 32):.0f}" for kind in ("stage D", "nine", "five")],
    ),
    "kernels: one request": (
        KERNELS,
        "For one request: {}, {} and {}.",
        lambda: [f"{layer_step(kind, 1):.0f}" for kind in ("stage D", "nine", "five")],
    ),
    "kernels: 96 tokens": (
        KERNELS,
        "a step takes {} µs, with the library's products and element-wise fusion {}.",
        lambda: [f"{layer_step(kind, 96):.0f}" for kind in ("five", "nine")],
    ),
    "kernels: QKV": (
        KERNELS,
        "QKV {} µs per layer for weights that are read in {}.",
        lambda: [
            f"{kernel_spans.account(recording(F32))['QKV'] / 24:.1f}",
            f"{1e6 * qkv_bytes() / results('layers-h200')['ceilings']['copy_bytes_per_s']:.1f}",
        ],
    ),
    "kernels: prefetch": (
        KERNELS,
        "{} µs without it, {} with a prefetch of every cache line and {} with one prefetch per weight row",
        lambda: [f"{tried(variant):.0f}" for variant in ("five launches", EVERY_LINE, ONE_PER_ROW)],
    ),
    "megakernel: the weights, and five kernels per layer": (
        MEGAKERNEL,
        "which an H200 copies in {} µs. With five kernels per layer the step takes {} µs.",
        lambda: [f"{weight_micros():.0f}", f"{layer_step('five', 1):.0f}"],
    ),
    "megakernel: eight rows, few KV heads": (
        TRACES,
        "{} against {} µs at 640 tokens, {} against {} at 4000",
        lambda: [*of_eight_rows(MODEL, 640), *of_eight_rows(MODEL, 4000)],
    ),
    "8 bits: eight requests of a small model": (
        EIGHT_BITS,
        "serves eight of them by now, takes {} ms",
        lambda: [f"{int(of_eight_rows(MODEL, 640)[0]) / 1e3}"],
    ),
    "megakernel: eight rows, many KV heads": (
        TRACES,
        "Qwen3-0.6B gains at 640 ({} against {}) and loses at 4000 ({} against {})",
        lambda: [*of_eight_rows("qwen3-0.6b", 640), *of_eight_rows("qwen3-0.6b", 4000)],
    ),
    "megakernel: four blocks of a cluster": (
        TRACES,
        "hand on and merge their parts in {} µs; through L2 it takes {}.",
        lambda: [f"{merged(way, 'group'):.2f}" for way in ("words in shared memory", "words in L2")],
    ),
    "megakernel: all blocks": (
        TRACES,
        "way through clusters takes {} µs and today's {}.",
        lambda: [f"{merged(way, 'layer'):.2f}" for way in ("st.async", "words in L2")],
    ),
    "megakernel: clusters beside the stream": (
        TRACES,
        "clusters win by more ({} against {} µs)",
        lambda: [f"{merged(way, 'layer', streams=True):.1f}" for way in ("st.async", "words in L2")],
    ),
    "megakernel: clusters find room": (
        TRACES,
        "clusters of four find room on {} of {} multiprocessors",
        lambda: [str(residents(4)), str(residents(1))],
    ),
    "megakernel: behind the attention": (
        TRACES,
        "{} µs lies between the slowest attention",
        lambda: [f"{after_attention():.1f}"],
    ),
    "megakernel: what clusters could gain": (
        TRACES,
        "a tenth of the multiprocessors for a part of {} µs per step",
        lambda: [f"{24 * after_attention():.0f}"],
    ),
    "serving: the beginning over HTTP": (
        "beyond/serving/load.md",
        "{:.0f} ms later than from `generate`, whose whole run takes {:.0f} ms. The last answer ends {:.0f} ms later",
        lambda: [
            first_tokens("HTTP") - first_tokens("generate"),
            run_ms("generate"),
            run_ms("HTTP") - run_ms("generate"),
        ],
    ),
    "serving: HTTP in two processes": (
        "beyond/serving/load.md",
        "{}% of the rate are left",
        lambda: [f"{100 * http_share('h200', 'HTTP'):.0f}"],
    ),
    "serving: stage E's unluckiest requests": (
        "beyond/serving/load.md",
        "E's unluckiest requests wait for {} ms",
        lambda: [f"{max(unluckiest('E')):.0f}"],
    ),
    "kernels: 256 requests": (
        LAYERS,
        "the other three products of a layer take up to {} × as long, and attention {} ×",
        lambda: [f"{max(map(grown, ('output', 'gate-up', 'down'))):.1f}", f"{grown('attention'):.1f}"],
    ),
    "megakernel: four rows and one": (
        TRACES,
        "Four rows take {} to {} × as long as one",
        lambda: of_rows(4, 1),
    ),
    "megakernel: eight rows and four": (TRACES, "Eight take {} to {} × as long as four", lambda: of_rows(8, 4)),
    "E: under load": (
        "stage_e_batching/options.md",
        "on the CPU E makes {} × D's tokens per second",
        lambda: [f"{on_cpu('E', 'mixed', 'output_tokens_per_s') / on_cpu('D', 'mixed', 'output_tokens_per_s'):.1f}"],
    ),
    "F: under load": (
        "stage_f_graph_tp/options.md",
        "it makes {} × E's tokens per second without graphs, and {} × with them",
        lambda: [
            f"{step(name, 'mixed', 'output_tokens_per_s') / step('E', 'mixed', 'output_tokens_per_s'):.1f}"
            for name in ("F eager", "F")
        ],
    ),
    "kernels: prefetch in a 7B model": (
        KERNELS,
        "one request takes {} µs per layer instead of {}, and 32 take {} instead of {}.",
        lambda: [*prefetched(1), *prefetched(32)],
    ),
    "kernels: loads in flight": (
        KERNELS,
        "one request: {:.1f} µs per layer, and {:.1f} with three for gate and up and five for `out` and `down`. For 32 "
        "requests it is the other way round: {:.1f} µs with eight, {:.1f} with three and five.",
        lambda: [with_loads(rows, stages) for rows in (1, 32) for stages in ("today", "gate 3 down 5 out 5")],
    ),
    "kernels: loads in flight, in the engine": (
        KERNELS,
        "on two GPUs 32 requests take {:.2f} ms per step instead of {:.2f}",
        lambda: [engine_with_loads(stages) for stages in ("by tokens", "today")],
    ),
    "8 bits: a whole engine": (
        "beyond/quantization/kernels.md",
        "by a factor of {}, as in [the lesson's table](README.md#what-it-gains). A batch of 32 gains {} ×. Under load "
        "the engine makes {} × the",
        lambda: [
            f"{eight_bit_gain('single', 'tpot_ms'):.2f}",
            f"{eight_bit_gain('decode32', 'step_ms'):.2f}",
            f"{1 / eight_bit_gain('mixed', 'output_tokens_per_s'):.2f}",
        ],
    ),
    "D: a shared prefix": (
        D,
        "Of their {} tokens the model runs {}.",
        lambda: [
            f"{step('D', 'prefix', 'tokens_cached') + step('D', 'prefix', 'tokens_computed'):,.0f}",
            f"{step('D', 'prefix', 'tokens_computed'):,.0f}",
        ],
    ),
    "ranks: a small model": (
        RANKS,
        "takes {} ms per step, and {} ms with one",
        lambda: [f"{with_ranks('qwen3-0.6b', name):.2f}" for name in ("F, 2 GPUs", "F")],
    ),
    "ranks: 256 requests": (
        RANKS,
        "get {} tokens/s from two ranks and {} from one",
        lambda: [
            f"{with_ranks('qwen3-0.6b', name, 'mixed', 'output_tokens_per_s'):,.0f}" for name in ("F, 2 GPUs", "F")
        ],
    ),
    "ranks: a long sum": (
        RANKS,
        "add up 8192 rows in {} µs, and NCCL takes {}",
        lambda: [f"{all_reduce_us(8192, library=library):.0f}" for library in (False, True)],
    ),
    "ranks: the own part": (
        RANKS,
        "256 rows took {} µs and not {}",
        lambda: [
            f"{earlier('long_sum', rows=256, hidden=1024, variant=name):.1f}"
            for name in ("2 MiB, own part in the mailbox too", "2 MiB a launch, slices of 4 KiB")
        ],
    ),
    "kernels: the rotation of many tokens": (
        LAYERS,
        "the rotation takes {} µs with all heads of a token in a program, {} with eight",
        lambda: [many_tokens("rotate_and_store", 64), many_tokens("rotate_and_store", 8)],
    ),
    "kernels: SwiGLU of many tokens": (
        LAYERS,
        "SwiGLU takes {} µs with up to 8,192 columns in a program, {} with 1,024",
        lambda: [many_tokens("silu_and_multiply", 8192), many_tokens("silu_and_multiply", 1024)],
    ),
    "ranks: a large model": (
        RANKS,
        "{} ms instead of {} for one request, and {} instead of {} for 32.",
        lambda: [
            f"{with_ranks('qwen2.5-7b', name, *work):.2f}"
            for work in (("single", "tpot_ms"), ("decode32", "step_ms"))
            for name in ("F, 2 GPUs", "F")
        ],
    ),
    "8 bits: the head in 16": (
        EIGHT_BITS,
        "still reads {} of the bytes with Qwen2.5-0.5B and {} with Qwen2.5-7B",
        lambda: [bytes_left("qwen2.5-0.5b"), bytes_left("qwen2.5-7b")],
    ),
    "8 bits: the tutor's matrices": (
        EIGHT_BITS,
        "`weights int8` still has {} MB",
        lambda: [f"{megabytes('weights int8'):.1f}"],
    ),
    "8 bits: the tutor's head": (
        QUALITY,
        "the matrices shrink from {} to {} MB",
        lambda: [f"{megabytes(kind):.1f}" for kind in ("weights int8", "weights int8, head too")],
    ),
    "drafts: one request": (
        SPECULATION,
        "takes {} ms per token instead of {}. Looking for guesses where the text repeats nothing costs at most {} %",
        lambda: [drafted_ms("accepted"), drafted_ms("plain", draft=4), f"{looking_percent():.1f}"],
    ),
    "drafts: the tutor's own": (
        SPECULATION,
        "The look-up makes {} tokens per step when the tutor",
        lambda: [f"{tutors_tokens_per_step('ngram'):.1f}"],
    ),
    "drafts: the one-layer tutor's": (
        SPECULATION,
        "With the one-layer tutor it is {} at the first question",
        lambda: [f"{tutors_tokens_per_step('model'):.2f}"],
    ),
    "F: stage E's kernels": (
        F,
        "in stage E is {} kernels, which together run for {} ms",
        lambda: [
            f"{len(recording('stage E: kernel by kernel').spans) / 4:.0f}",
            f"{recording('stage E: kernel by kernel').busy / 4e3:.1f}",
        ],
    ),
}
# (lesson, sentence, the number behind it, the least and the most for which it may be said)
ROUGH = {
    "A: floor": (A, "takes more than seventy times its floor", lambda: far("A"), 70, 80),
    "A: time of the launches": (
        A,
        "the time of one from Python is more than a third of the step",
        lambda: 1e3 * launches("A") * group().own[-1]["launch_seconds"]["alone"] / step("A"),
        0.34,
        0.4,
    ),
    "A: operations per byte": (
        A,
        "must do about 190 operations per byte",
        lambda: ceilings()["matmul_operations_per_s"] / ceilings()["copy_bytes_per_s"],
        185,
        195,
    ),
    "A: launches": (A, "A step of A makes about a thousand launches", lambda: launches("A"), 950, 1050),
    "B: launches": (B, "Compiled, it launches 6 times per step", lambda: launches("B compiled"), 5.5, 6.5),
    "B: time": (B, "the step takes a twelfth of the time", lambda: step("B") / step("B compiled"), 11.5, 12.5),
    "B: kernels in the graph": (
        B,
        "each of its four hundred kernels takes about a microsecond",
        lambda: kernels("B compiled"),
        380,
        430,
    ),
    "B: time of the kernels in the graph": (
        B,
        "together almost a third of the step",
        lambda: 1e3 * kernels("B compiled") * group().own[-1]["launch_seconds"]["in_graph"] / step("B compiled"),
        0.28,
        0.34,
    ),
    "B: the first request": (
        B,
        "each of which then takes thirty times as long",
        lambda: first_step("B compiled") / step("B compiled"),
        28,
        32,
    ),
    "B: compiling": (
        "stage_b_decode_step/measurements.md",
        "Compiling is worth a factor of thirteen",
        lambda: in_ablation("B") / in_ablation("B compiled"),
        12.5,
        13.5,
    ),
    "B: with SDPA": (
        "stage_b_decode_step/measurements.md",
        "the step takes 1.3 ms instead of 2.2",
        lambda: in_ablation("B compiled") / in_ablation(WITH_SDPA),
        0.55,
        0.62,
    ),
    "B: without SDPA": (
        "stage_b_decode_step/measurements.md",
        "It takes a tenth longer per token than ours",
        lambda: without("SDPA") - 1,
        0.08,
        0.12,
    ),
    "B: late checks": (
        "stage_b_decode_step/measurements.md",
        "reading the tokens late gains a third",
        lambda: without("late checks") - 1,
        0.30,
        0.36,
    ),
    "B: buffers": (
        "stage_b_decode_step/measurements.md",
        "buffers 14 %",
        lambda: without("buffers") - 1,
        0.13,
        0.14,
    ),
    "B: pinned memory": (
        "stage_b_decode_step/measurements.md",
        "and pinned memory 5 %",
        lambda: without("pinned memory") - 1,
        0.045,
        0.06,
    ),
    "B: time without SDPA in a layer": (
        "stage_b_decode_step/measurements.md",
        "40 µs less per layer",
        lambda: 1e3 * (in_ablation(WITH_SDPA) - in_ablation("B compiled")) / 24,
        39,
        41,
    ),
    "B: kernels of attention written out": (
        "stage_b_decode_step/measurements.md",
        "is one more kernel per layer",
        lambda: (kernels("B compiled", "stage-b") - kernels(WITH_SDPA, "stage-b")) / 24,
        0.9,
        1.1,
    ),
    "B: attention written out": (
        B,
        "has faster attention kernels (below), and takes nearly a third less time",
        lambda: 1 - 1e-3 * step("B compiled") / in_waterfall("B compiled"),
        0.27,
        0.33,
    ),
    "B: floor": (B, "It still takes 5 × the floor", lambda: far("B compiled"), 4.5, 5.5),
    "C: library": (C, "takes more than three times that on an H200", lambda: mlp_far("library"), 3, 4),
    "C: fused": (
        C,
        "the fused kernel takes half of the library's time",
        lambda: mlp_time("fused", 1) / mlp_time("library", 1),
        0.45,
        0.55,
    ),
    "C: kernels of an MLP": (
        "labs/lab_c.md",
        "in PyTorch spread over about fifteen kernels",
        lambda: 1 + (kernels("B") - kernels("C")) / 24,
        14,
        16,
    ),
    "C: launches": (C, "C needs two thirds of B's launches", lambda: launches("C") / launches("B"), 0.64, 0.7),
    "C: time": (C, "about three quarters of its time", lambda: step("C") / step("B"), 0.7, 0.8),
    "C: compiled": (C, "C's lead shrinks to 4 %", lambda: step("B compiled") / step("C compiled"), 1.035, 1.045),
    "D: 32 requests": (
        D,
        "step of 32 requests takes one and a half times as long as a step of one",
        lambda: step("D", "decode32", "step_ms") / step("D"),
        1.4,
        1.6,
    ),
    "D: one request": (
        D,
        "*C compiled* takes less than a fifth of D's",
        lambda: step("C compiled") / step("D"),
        0.15,
        0.2,
    ),
    "serving: stage F at all rates": (
        "beyond/serving/load.md",
        "its p99 is the same at all three rates",
        lambda: max(unluckiest("F")) / min(unluckiest("F")),
        1,
        1.05,
    ),
    "kernels: QKV of 256 requests": (LAYERS, "QKV takes no longer", lambda: grown("QKV"), 0.8, 1.05),
    "F: gaps": (
        F,
        "kernels still fill about a seventh of E's step",
        lambda: recording("stage E: kernel by kernel").busy / 4e3 / step("E"),
        0.13,
        0.15,
    ),
    "F: prefill": (
        F,
        "is about one millisecond of GPU work",
        lambda: recording("stage F, prompt of 128 tokens").busy / 1e3,
        0.9,
        1.1,
    ),
    "F: floor": (
        F,
        "takes [more than four times its floor]",
        lambda: layer_step("stage D", 32) / layer_floor(32),
        4,
        5,
    ),
    "megakernel: eight rows with fewer parts of an attention": (
        "stage_f_graph_tp/megakernel/measurements.md",
        "a step of these eight rows took a fifth less time",
        lambda: 1 - parts_of_attention("2", -1) / parts_of_attention("4", -1),
        0.15,
        0.25,
    ),
    "megakernel: a long context with fewer parts of an attention": (
        "stage_f_graph_tp/megakernel/measurements.md",
        "a long context took a third more",
        lambda: parts_of_attention("2", 2) / parts_of_attention("4", 2) - 1,
        0.25,
        0.42,
    ),
    "megakernel: between two steps": (
        "stage_f_graph_tp/megakernel/measurements.md",
        "idle time, which with a graph is about half of it",
        lambda: idle_between_steps("stage F, graphs only"),
        0.45,
        0.58,
    ),
    "8 bits: like bfloat16": (
        EIGHT_BITS,
        "int8 weights cost about twice what rounding everything to bfloat16 does",
        lambda: tutor_format("weights int8")["kl"] / tutor_format("bfloat16")["kl"],
        1.7,
        2.3,
    ),
    "8 bits: the head's cost": (
        QUALITY,
        "With the LM head in 8 bits the KL divergence doubles",
        lambda: tutor_format("weights int8, head too")["kl"] / tutor_format("weights int8")["kl"],
        1.8,
        2.5,
    ),
    "8 bits: the head's share": (
        EIGHT_BITS,
        "more than half of them are the LM head",
        lambda: (megabytes("weights int8") - megabytes("weights int8, head too")) / 0.75 / megabytes("weights int8"),
        0.5,
        0.6,
    ),
    "serving: HTTP": (
        "beyond/serving/load.md",
        "HTTP takes between a tenth and a fifth of stage E's rate",
        lambda: 1 - http_share("cpu", "HTTP"),
        0.1,
        0.2,
    ),
    "serving: HTTP without a second process": (
        "beyond/serving/load.md",
        "HTTP takes between a tenth and a fifth of stage E's rate",
        lambda: 1 - http_share("cpu", "HTTP, one process"),
        0.1,
        0.2,
    ),
    "serving: HTTP in one process on a GPU": (
        "beyond/serving/load.md",
        "stage F on the H200 loses a third of its rate over HTTP",
        lambda: 1 - http_share("h200", "HTTP, one process"),
        0.3,
        0.37,
    ),
    "serving: HTTP in one process with clients that ask again": (
        "beyond/serving/load.md",
        "In one process nearly half is lost",
        lambda: 1 - http_share("h200-rounds", "HTTP, one process"),
        0.43,
        0.5,
    ),
    "serving: HTTP in two processes with clients that ask again": (
        "beyond/serving/load.md",
        "What is left of the rate in two processes is the same",
        lambda: http_share("h200-rounds", "HTTP") - http_share("h200", "HTTP"),
        -0.005,
        0.005,
    ),
    "ranks: the sum in a product": (
        RANKS,
        "the sum adds about a microsecond to the kernel",
        lambda: statistics.mean(
            down_us(rows, "with the sum over the ranks") - down_us(rows, "alone") for rows in (1, 8, 32)
        ),
        0.8,
        1.2,
    ),
    "ranks: three launches of 1 and 32 rows": (
        RANKS,
        "The three launches take longer with 1 and with 32 rows",
        lambda: min(map(launches_against_one, (1, 32))),
        1.05,
        2,
    ),
    "ranks: three launches of 8 rows": (
        RANKS,
        "and a little less with 8",
        lambda: launches_against_one(8),
        0.9,
        0.99,
    ),
    "quantization: one request": (
        "beyond/quantization/README.md",
        "a step of Qwen2.5-7B takes two thirds of the time",
        lambda: quantized_ms("qwen2.5-7b", "int8 + head", 1) / quantized_ms("qwen2.5-7b", "bfloat16", 1),
        0.62,
        0.72,
    ),
    "quantization: 32 requests": (
        "beyond/quantization/README.md",
        "With 32 it gains a twentieth",
        lambda: 1 - quantized_ms("qwen2.5-7b", "int8 + head", 32) / quantized_ms("qwen2.5-7b", "bfloat16", 32),
        0.04,
        0.075,
    ),
    "quantization: 128 requests": (
        "beyond/quantization/README.md",
        "With 128 requests a step of Qwen2.5-7B takes 1.3 × as long",
        lambda: quantized_ms("qwen2.5-7b", "int8 + head", 128) / quantized_ms("qwen2.5-7b", "bfloat16", 128),
        1.22,
        1.35,
    ),
    "tensor parallelism between hosts": (
        PIPELINE,
        "Most of it is hidden states",
        lambda: 2 * 49 * hidden_state_bytes() / bytes_between_hosts("TP 2"),
        0.8,
        1,
    ),
    "stages on two hosts": (
        PIPELINE,
        "The stages send two per token",
        lambda: 2 * hidden_state_bytes() / bytes_between_hosts("PP 2"),
        0.8,
        1,
    ),
    "drafts: a verification with eight requests": (
        "beyond/speculation/measurements.md",
        "a verification of four guesses each takes 1.3 × as long",
        lambda: 1 + speculation.break_even(results("speculation-h200"), 4)[8],
        1.25,
        1.35,
    ),
    "megakernel: a large model without it": (
        MEGAKERNEL,
        "Qwen2.5-7B takes [less than 1.2 × its floor]",
        lambda: quantized_far("qwen2.5-7b", "bfloat16", 1),
        1,
        1.2,
    ),
    "kernels: small ones": (
        KERNELS,
        "The small kernels (pink) are more than a quarter of a step",
        lambda: part(D32, "norm, rotation, SiLU"),
        0.25,
        0.32,
    ),
    "kernels: idle": (
        KERNELS,
        "the idle time (grey) shrinks to a quarter",
        lambda: part(F32, *IDLE) * recording(F32).whole / (part(D32, *IDLE) * recording(D32).whole),
        0.2,
        0.27,
    ),
}


def text_of(lesson: str) -> str:
    return " ".join((ROOT / lesson).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("claim", EXACT)
def test_a_sentence_has_the_number_of_the_results(claim: str) -> None:
    lesson, sentence, numbers = EXACT[claim]
    assert sentence.format(*numbers()) in text_of(lesson)


@pytest.mark.parametrize("claim", ROUGH)
def test_a_rough_figure_is_true_of_the_results(claim: str) -> None:
    lesson, sentence, number, least, most = ROUGH[claim]
    assert sentence in text_of(lesson)
    assert least <= number() <= most


def test_the_cache_of_the_reference_model_has_the_size_that_stage_a_says() -> None:
    assert f"= {ModelCost(preset_config(MODEL), 2).kv_bytes_per_token:,} bytes" in text_of(A)
