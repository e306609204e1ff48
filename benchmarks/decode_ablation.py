"""What each idea of stage B is worth by itself: all of them on, then one at a time off.

    python -m benchmarks.decode_ablation             # measure, into benchmarks/results/
    python -m benchmarks.decode_ablation --report    # write the tables of stage B's README from the results

Ideas help or hide each other: late checks are worth little while Python needs longer than the GPU, and most where a
compiled step makes the GPU the slower one. So the same switches are tried around the eager step and around the compiled
one.

All engines live in one process, are built in turn and answer a first request; then rounds go through them in
alternating order, so that a disturbance of the machine hits all alike. The engine without warm-up comes first, because
whichever is first pays for what a process does once. That all give the same tokens is held by stage B's tests, on the
trained model: with random weights two scores can lie closer together than two orders of summation.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.environment import ROOT, environment
from benchmarks.markers import fill_file
from benchmarks.results import RESULTS_DIRECTORY, load_results
from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_a_naive.loading import pick_device
from stage_b_decode_step import LLM

KIND = "decode_ablation"
README = ROOT / "stage_b_decode_step" / "README.md"
MODELS = {"cpu": "tutor", "cuda": "random:qwen2.5-0.5b"}
NUM_IDS = 4096  # prompt ids come from below this, which every model's vocabulary holds

# Name -> options of stage B's LLM; None is stage A.
VARIANTS: dict[str, Mapping[str, bool] | None] = {
    "B without warm-up": {"warmup": False},
    "A": None,
    "B": {},
    "B without static cache": {"static_cache": False},
    "B without last logits only": {"last_logits_only": False},
    "B without pinned memory": {"pinned": False},
    "B without buffers": {"buffers": False},
    "B without late checks": {"async_eos": False},
    "B without SDPA": {"sdpa": False},
    "B compiled": {"compile": True},
    "B compiled without pinned memory": {"compile": True, "pinned": False},
    "B compiled without buffers": {"compile": True, "buffers": False},
    "B compiled without late checks": {"compile": True, "async_eos": False},
    "B compiled without SDPA": {"compile": True, "sdpa": False},
}


def measure(args: argparse.Namespace) -> dict:
    """Build every variant, then take rounds of samples; returns the payload of a results file."""
    device = pick_device(args.device)
    model = args.model or MODELS[device.type]
    rng = random.Random(0)
    prompt = [rng.randrange(NUM_IDS) for _ in range(args.prompt_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True)
    engines: dict[str, NaiveLLM] = {}
    rows: dict[str, dict] = {}
    for name in args.variants:
        start = time.perf_counter()
        options = VARIANTS[name]
        build = NaiveLLM if options is None else LLM
        engines[name] = build(model, device=args.device, dtype=args.dtype, **(options or {}))
        [output] = engines[name].generate([prompt], params, use_tqdm=False)
        ready = time.perf_counter() - start
        rows[name] = {
            "name": name, "options": options, "seconds_to_first_answer": ready,
            "build_seconds": engines[name].build_time, "first": output["metrics"],
            "prefill_ms": [], "decode_step_ms": [],
        }  # fmt: skip
        print(f"{name}: first answer {ready:.1f} s after the start of its building", flush=True)
    gc.collect()
    for turn in range(args.rounds):
        for name in args.variants if turn % 2 == 0 else reversed(args.variants):
            _sample(engines[name], prompt, params, args.seconds, rows[name])
        print(f"round {turn + 1} of {args.rounds} done", flush=True)
    engine = next(iter(engines.values()))
    return {
        "kind": KIND, "environment": environment(), "model": model, "device": device.type,
        "dtype": str(engine.dtype).removeprefix("torch."), "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens, "rounds": args.rounds, "rows": list(rows.values()),
    }  # fmt: skip


def _sample(llm: NaiveLLM, prompt: list[int], params: SamplingParams, seconds: float, row: dict) -> None:
    """One round of one variant: requests until so many seconds have gone by, one at least; their median is kept."""
    start = time.perf_counter()
    metrics = []
    while not metrics or time.perf_counter() - start < seconds:
        [output] = llm.generate([prompt], params, use_tqdm=False)
        if len(output["token_ids"]) != params.max_tokens:
            raise RuntimeError(f"{row['name']} made {len(output['token_ids'])} tokens instead of {params.max_tokens}")
        metrics.append(output["metrics"])
    row["decode_step_ms"].append(1e3 * statistics.median(m["tpot"] for m in metrics))
    row["prefill_ms"].append(1e3 * statistics.median(m["prefill_time"] for m in metrics))


def table(payload: dict) -> list[str]:
    """One line a variant: decode step with its spread, prefill of the first and of later requests."""
    baseline = next((row for row in payload["rows"] if row["options"] is None), None)
    lines = [
        "| | decode step, ms (range) | decoding against A | prefill, ms | first prefill, ms | built and answered, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(payload["rows"], key=lambda row: list(VARIANTS).index(row["name"])):
        steps = row["decode_step_ms"]
        step = statistics.median(steps)
        factor = f"{statistics.median(baseline['decode_step_ms']) / step:.2f} ×" if baseline else "–"
        lines.append(
            f"| {row['name']} | {step:.2f} ({min(steps):.2f}–{max(steps):.2f}) | {factor} "
            f"| {statistics.median(row['prefill_ms']):.1f} | {1e3 * row['first']['prefill_time']:.1f} "
            f"| {row['seconds_to_first_answer']:.1f} |"
        )
    where = payload["environment"]
    versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("torch", "transformers"))
    return [
        f"{payload['model']} in {payload['dtype']} on {where['device']['name']}, {payload['prompt_tokens']} tokens in, "
        f"{payload['output_tokens']} out, greedy; {versions}; commit {where['commit'][:10]}"
        f"{' with changes' if where['dirty'] else ''}, {where['date'][:10]}. Medians of {payload['rounds']} rounds.",
        "", *lines, "",
    ]  # fmt: skip


def report(directory: Path = RESULTS_DIRECTORY, readme: Path = README) -> None:
    """Write the tables of all ablation results between the markers of stage B's README.

    Raises:
        ResultsError: a results file lacks commit, versions or device, or the README lacks the markers.
    """
    lines: list[str] = []
    for path in sorted(directory.glob("decode-ablation-*.json")):
        lines += table(load_results(path))
    body = "\n".join(lines).strip() or "No results files yet: run `python -m benchmarks.decode_ablation`."
    fill_file(readme, {"ablation": body})


def main(argv: list[str] | None = None) -> int:
    """Measure or report; returns 2 where the arguments or a results file are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="write stage B's README, measure nothing")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--model", help="default: the tutor on a CPU, random:qwen2.5-0.5b on a GPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a round of one variant, at least")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/decode-ablation-<device>.json")
    args = parser.parse_args(argv)
    try:
        if args.report:
            report()
            return 0
        payload = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = args.output or RESULTS_DIRECTORY / f"decode-ablation-{payload['device']}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    if payload["environment"]["commit"]:
        print("\n".join(table(payload)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
