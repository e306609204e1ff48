"""How much KV memory stays empty, by page size, on the lengths of the `mixed` workload: stage D's picture of paging.

    python -m benchmarks.page_waste            # writes the results file, the picture and the table

Nothing is timed and no model runs: where a token lies follows from the lengths alone. All requests are admitted
together, each grows by a token a step and gives its memory back when it is done; at every step stage D's own accounting
says how many slots are held. A contiguous reservation is a page of `max_model_len`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

from benchmarks.environment import ROOT, environment
from benchmarks.markers import fill_file
from benchmarks.results import RESULTS_DIRECTORY, load_results
from benchmarks.workloads import make_workload
from stage_d_paged.kv_cache import waste_by_block_size

PAGE_SIZES = [1, 16, 64, 256]
MAX_MODEL_LEN = 4096  # the engine's default
RESULT = RESULTS_DIRECTORY / "page-waste.json"
STAGE = ROOT / "stage_d_paged"


def count(size: str = "gpu") -> dict:
    """The results file: slots held and tokens in them, summed over all steps, for every page size."""
    workload = make_workload("mixed", size)
    [call] = workload.rounds[0]
    held = dict.fromkeys([*PAGE_SIZES, MAX_MODEL_LEN], 0)
    tokens = 0
    for step in range(max(call.max_tokens)):
        requests = zip(call.prompts, call.max_tokens, strict=True)
        lengths = [len(prompt) + step for prompt, most in requests if step < most]
        points = waste_by_block_size(lengths, PAGE_SIZES, MAX_MODEL_LEN)
        tokens += points[0]["tokens"]
        for point in points:
            held[point["block_size"]] += point["slots"]
    rows = [
        {"page": page, "slots": slots, "tokens": tokens, "waste": 1 - tokens / slots} for page, slots in held.items()
    ]
    return {
        "kind": "page-waste",
        "environment": environment(),
        "workload": workload.description,
        "hash": workload.hash,
        "max_model_len": MAX_MODEL_LEN,
        "rows": rows,
    }


def markdown(result: dict) -> str:
    """The table of the README."""
    rows = result["rows"]
    names = [_name(row["page"], result["max_model_len"]) for row in rows]
    return "\n".join(
        [
            "![Share of the KV memory that is empty, by page size](page_waste.png)",
            "",
            "| tokens a page | " + " | ".join(names) + " |",
            "|---|" + "---|" * len(rows),
            "| empty, average over all steps | " + " | ".join(f"{row['waste']:.1%}" for row in rows) + " |",
            "",
            f"{result['workload']}, all admitted together; counted by `python -m benchmarks.page_waste`.",
        ]
    )


def draw(result: dict, path: Path) -> None:
    """The picture of the README."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    names = [_name(row["page"], result["max_model_len"]).replace(" (", "\n(") for row in rows]
    figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    bars = axis.bar(names, [100 * row["waste"] for row in rows], color=["#1a73e8"] * (len(rows) - 1) + ["#e8710a"])
    axis.bar_label(bars, fmt="%.1f %%", padding=2)
    axis.set_ylim(0, 100)
    axis.set_xlabel("tokens a page")
    axis.set_ylabel("% of the held memory\nthat is empty")
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _name(page: int, max_model_len: int) -> str:
    return f"{page} (contiguous)" if page == max_model_len else str(page)


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.page_waste", description=__doc__.splitlines()[0]).parse_args()
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(count(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    result = load_results(RESULT)
    draw(result, STAGE / "page_waste.png")
    fill_file(STAGE / "README.md", {"page-waste": markdown(result)})
    print(markdown(result))


if __name__ == "__main__":
    main()
