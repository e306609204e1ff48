"""The picture and the table of stage D's attention kernels, made from a measured JSON file and never typed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.markers import fill_file

STAGE = Path(__file__).resolve().parent.parent / "stage_d_paged"
MARKER = "attention-table"
COLOURS = {"reference": "#9aa0a6", "triton": "#1a73e8", "flash": "#e8710a"}


def write_report(result: dict, folder: Path = STAGE) -> None:
    """Write `attention.png` into `folder`, and the table between its markers in the README there.

    Raises:
        ResultsError: that README has no such markers.
    """
    draw(result, folder / "attention.png")
    fill_file(folder / "README.md", {MARKER: markdown(result)})


def markdown(result: dict) -> str:
    """One line a case, one column a backend; then Triton's page sizes; then what it was measured on."""
    backends = [name for name in COLOURS if any(row["backend"] == name for row in result["rows"])]
    lines = ["| case | " + " | ".join(backends) + " |", "|---|" + "---|" * len(backends)]
    for case in result["cases"]:
        cells = []
        for backend in backends:
            row = find(result, case["name"], backend)
            cells.append(f"{row['seconds'] * 1e6:.1f} µs, {achieved(row, result)}" if row else "–")
        lines.append(f"| {case['name']} | " + " | ".join(cells) + " |")
    studied = [case["name"] for case in result["cases"] if len(by_page(result, case["name"])) > 1]
    pages = sorted({page for name in studied for page in by_page(result, name)})
    if studied:
        lines += ["", "| Triton, tokens a page | " + " | ".join(map(str, pages)) + " |", "|---|" + "---|" * len(pages)]
    for name in studied:
        cells = [achieved(by_page(result, name)[page], result) for page in pages]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    where, top = result["environment"], result["ceilings"]
    versions = ", ".join(f"{name} {where['versions'].get(name)}" for name in ("torch", "triton", "flash-attn"))
    copy, matmul = top["copy_bytes_per_s"] / 1e12, top["matmul_operations_per_s"] / 1e12
    lines += [
        "",
        f"{where['device']['name']}, {versions}, {where['date'][:10]}; 100 % of copy = {copy:.2f} TB/s, "
        f"100 % of matmul = {matmul:.0f} TFLOP/s, "
        "measured in the same run. Median of "
        f"{result['options']['repeats']} samples; launches in a CUDA graph (the reference: eager). "
        "A decode only reads, a copy also writes, so a decode can pass 100 %.",
    ]
    return "\n".join(lines)


def find(result: dict, case: str, backend: str) -> dict | None:
    """The row of a case and backend at the page size that the backend prefers."""
    rows = [r for r in result["rows"] if r["case"] == case and r["backend"] == backend and r["preferred_page"]]
    return rows[0] if rows else None


def by_page(result: dict, case: str) -> dict[int, dict]:
    return {row["page"]: row for row in result["rows"] if row["case"] == case and row["backend"] == "triton"}


def achieved(row: dict, result: dict) -> str:
    """Bandwidth for a decode, arithmetic for the others, with its share of what the chip does at best."""
    if row["kind"] == "decode":
        return f"{row['tb_per_s']:.2f} TB/s ({100 * share(row, result):.0f} % of copy)"
    return f"{row['tflop_per_s']:.0f} TFLOP/s ({100 * share(row, result):.0f} % of matmul)"


def share(row: dict, result: dict) -> float:
    if row["kind"] == "decode":
        return row["tb_per_s"] * 1e12 / result["ceilings"]["copy_bytes_per_s"]
    return row["tflop_per_s"] * 1e12 / result["ceilings"]["matmul_operations_per_s"]


def draw(result: dict, path: Path) -> None:
    """Two panels of bars: decodes as shares of the copy bandwidth, prefills and mixed as shares of the matmul rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    decode = [c["name"] for c in result["cases"] if c["name"].startswith("decode")]
    other = [c["name"] for c in result["cases"] if not c["name"].startswith("decode")]
    figure, axes = plt.subplots(1, 2, figsize=(13, 6), layout="constrained")
    for axis, names, title in zip(axes, (decode, other), ("% of copy bandwidth", "% of matmul rate"), strict=True):
        for offset, (backend, colour) in enumerate(COLOURS.items()):
            rows = [find(result, name, backend) for name in names]
            shares = [100 * share(row, result) if row else 0 for row in rows]
            places = [index + 0.27 * (offset - 1) for index in range(len(names))]
            if any(rows):
                axis.barh(places, shares, height=0.25, color=colour, label=backend)
        axis.set_yticks(range(len(names)), [name.replace(" × ", "×") for name in names])
        axis.invert_yaxis()
        axis.set_xlabel(title)
        axis.set_xlim(0, 110)
        axis.grid(axis="x", alpha=0.3)
    axes[1].legend(loc="lower right")
    figure.suptitle(f"Paged attention on {result['environment']['device']['name']}")
    figure.savefig(path, dpi=120)
