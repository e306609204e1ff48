"""The tables of stage E's README that are not the shared benchmark's: made from results files, never typed.

    python -m benchmarks.scheduling        # counts; the same on every machine
    python -m benchmarks.step_cost --output benchmarks/results/step-cost-NAME.json
    python -m benchmarks.soak --minutes 3 --output benchmarks/results/soak-NAME.json
    python -m benchmarks.batching_report
"""

from __future__ import annotations

import argparse

from benchmarks.environment import ROOT
from benchmarks.markers import fill_file
from benchmarks.results import RESULTS_DIRECTORY, load_results

README = ROOT / "stage_e_batching" / "README.md"


def results(kind: str) -> list[dict]:
    """All results files of one kind, by name."""
    loaded = map(load_results, sorted(RESULTS_DIRECTORY.glob(f"{kind}*.json")))
    return [result for result in loaded if result["kind"] == kind]


def machine(result: dict) -> str:
    """Where a result was measured, in words."""
    where = result["environment"]
    device, versions = where["device"], where["versions"]
    name = device["cpu"] if device["name"] == device["cpu"] else f"{device['name']}, {device['cpu']}"
    return f"{name}, Python {versions['python']}, torch {versions['torch']}, {where['date'][:10]}"


def step_cost_table() -> str:
    """Microseconds a step by the number of running sequences."""
    blocks = []
    for result in results("step-cost"):
        lines = table("running sequences", "µs a step", "spread", "schedule", "build the input", "postprocess")
        for row in result["rows"]:
            samples, parts = row["samples_us"], row["parts_us"].values()
            spread = f"{min(samples):.0f}–{max(samples):.0f}"
            lines.append(cells(row["sequences"], f"{row['us_per_step']:.0f}", spread, *(f"{us:.0f}" for us in parts)))
        blocks.append("\n".join([*lines, "", f"{machine(result)}; `python -m benchmarks.step_cost`."]))
    return "\n\n".join(blocks)


def soak_table() -> str:
    """What the soaks did and whether anything grew, from the first quarter of the time to its end."""
    lines = table(
        "model, device", "minutes", "requests", "aborted", "steps failed on purpose", "preemptions",
        "answers compared", "different", "resident MiB", "device MiB", "pages left",
    )  # fmt: skip
    for result in results("soak"):
        tally, samples = result["tally"], result["tally"]["samples"]
        first, last = samples[len(samples) // 4], samples[-1]
        grown = [
            f"{first[key] / 2**20:.1f} → {last[key] / 2**20:.1f}"
            for key in ("resident_bytes", "device_allocated_bytes")
        ]
        lines.append(
            cells(
                f"{result['model']}, {result['ran_on']}", f"{result['minutes']:g}", tally["finished"], tally["aborted"],
                tally["errors"], result["counters"]["num_preemptions"], tally["compared"], tally["different"],
                *grown, last["used_pages"],
            )
        )  # fmt: skip
    return "\n".join(lines)


def table(*names: str) -> list[str]:
    """The head of a table."""
    return [cells(*names), "|" + "---|" * len(names)]


def cells(*values: object) -> str:
    """One line of a table."""
    return "| " + " | ".join(map(str, values)) + " |"


def seats_table(result: dict) -> str:
    """Static and continuous batching, in decode steps."""
    lines = table("seats", "steps, static", "continuous", "seat-steps that give a token, static", "continuous")
    for row in result["seats"]:
        shares = (f"{row['static_useful']:.0%}", f"{row['continuous_useful']:.0%}")
        lines.append(cells(row["seats"], row["static_steps"], row["continuous_steps"], *shares))
    lines += ["", "`mixed` in full: 256 requests, 100–1024 in / 100–1024 out. `python -m benchmarks.scheduling`."]
    return "\n".join(lines)


def preemption_table(result: dict) -> str:
    """The tight pool, with and without the rules."""
    lines = table("admission", "preemptions", "tokens computed again", "steps")
    for row in result["tight_pool"]:
        again = f"{row['recomputed']} ({row['recomputed'] / row['useful']:.0%} of the useful work)"
        lines.append(cells(row["rule"], row["preemptions"], again, row["steps"]))
    lines += ["", "16 requests of 8 in / 60 out, 40 pages of 4, no prefix cache. `python -m benchmarks.scheduling`."]
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.batching_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    [counted] = results("scheduling")
    bodies = {
        "seats": seats_table(counted),
        "preemption": preemption_table(counted),
        "step-cost": step_cost_table(),
        "soak": soak_table(),
    }
    fill_file(README, bodies)


if __name__ == "__main__":
    main()
