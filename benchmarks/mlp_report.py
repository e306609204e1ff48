"""The table and the picture of stage C's kernels, made from a measured JSON file and never typed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.markers import fill_file

STAGE = Path(__file__).resolve().parent.parent / "stage_c_fused_mlp"
MARKER = "kernel-table"
COLOURS = {"naive": "#9aa0a6", "library": "#e8710a", "warp": "#34a853", "fused": "#1a73e8"}
NAMES = {"library": "library (unfused)"}


def write_report(result: dict) -> None:
    """Write `stage_c_fused_mlp/kernels.png`, and the table between its markers in the stage's README."""
    draw(result, STAGE / "kernels.png")
    fill_file(STAGE / "README.md", {MARKER: markdown(result)})


def markdown(result: dict) -> str:
    """A table for each model, one line a number of rows; then the errors; then what it was measured on."""
    copy = result["ceilings"]["copy_bytes_per_s"]
    lines: list[str] = []
    for shape in result["shapes"]:
        floor = shape["weight_bytes"] / copy
        lines += [
            f"**{shape['model']}**: hidden {shape['hidden']}, intermediate {shape['inter']}; "
            f"{shape['weight_bytes'] / 1e6:.1f} MB a layer, floor {floor * 1e6:.1f} µs",
            "",
            "| rows | " + " | ".join(NAMES.get(name, name) for name in COLOURS) + " |",
            "|---|" + "---|" * len(COLOURS),
        ]
        for rows in sorted({row["rows"] for row in result["rows"] if row["model"] == shape["model"]}):
            cells = [cell(find(result, shape["model"], rows, name), copy) for name in COLOURS]
            lines.append(f"| {rows} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["Error against float64, ‖out − ref‖ / ‖ref‖, five rows of the first shape:", ""]
    lines += ["| operator, dtype | " + " | ".join(COLOURS) + " |", "|---|" + "---|" * len(COLOURS)]
    for operator, dtype in dict.fromkeys((entry["operator"], entry["dtype"]) for entry in result["errors"]):
        errors = {
            e["generation"]: e["error"] for e in result["errors"] if (e["operator"], e["dtype"]) == (operator, dtype)
        }
        cells = " | ".join(f"{errors[name]:.1e}" for name in COLOURS)
        lines.append(f"| {operator}, {dtype.removeprefix('torch.')} | {cells} |")
    if result["end_to_end"]:
        lines += ["", "One request end to end, both compiled, 128 tokens in and 256 out, shapes of qwen2.5-0.5b:", ""]
        lines += ["| stage | ms a token |", "|---|---|"]
        lines += [f"| {entry['stage']} | {entry['seconds_a_token'] * 1e3:.3f} |" for entry in result["end_to_end"]]
    versions = result["versions"]
    lines += [
        "",
        f"{result['device']['name']}, torch {versions['torch']}, CUDA {versions['cuda']}, driver {versions['driver']}, "
        f"{result['date'][:10]}, commit {(result['commit'] or 'unknown')[:10]}. µs a layer and % of the copy bandwidth "
        f"measured in the same run ({copy / 1e12:.2f} TB/s). bfloat16; one call a layer in a CUDA graph, weights of "
        f"all layers in turn; median of {result['options']['repeats']} samples.",
    ]
    return "\n".join(lines)


def find(result: dict, model: str, rows: int, generation: str) -> dict | None:
    key = (model, rows, generation)
    return next((row for row in result["rows"] if (row["model"], row["rows"], row["generation"]) == key), None)


def cell(row: dict | None, copy: float) -> str:
    return f"{row['seconds'] * 1e6:.1f} µs, {100 * row['bytes_per_s'] / copy:.0f} %" if row else "–"


def draw(result: dict, path: Path) -> None:
    """A panel for each model: time against rows, with the floor; the naive kernel is far above the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(result["shapes"]), figsize=(13, 4.5), layout="constrained", squeeze=False)
    for axis, shape in zip(axes[0], result["shapes"], strict=True):
        floor = shape["weight_bytes"] / result["ceilings"]["copy_bytes_per_s"] * 1e6
        for name in ("library", "warp", "fused"):
            rows = [row for row in result["rows"] if row["model"] == shape["model"] and row["generation"] == name]
            axis.plot([r["rows"] for r in rows], [r["seconds"] * 1e6 for r in rows], "o-", color=COLOURS[name],
                      label=NAMES.get(name, name))  # fmt: skip
        axis.axhline(floor, color="black", linestyle=":", label="floor: weights once")
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
        axis.set_ylim(0, 6 * floor)
        axis.set_title(shape["model"])
        axis.set_xlabel("rows")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("µs a layer")
    axes[0][0].legend(loc="upper left")
    figure.suptitle(f"The MLP block on {result['device']['name']}, bfloat16")
    figure.savefig(path, dpi=120)
