"""The classical picture of a pipeline: one lane per stage, one colour per batch, white where a stage is idle."""

from __future__ import annotations

from benchmarks.pictures.picture import PALETTE, Picture, finish, new_figure

COLOURS = PALETTE[:4]
SHOWN = 12.5  # units of time


def draw_stages(panels: dict[str, list[list[dict[str, object]]]], title: str) -> Picture:
    """Draw the beginning of several runs, one below the other.

    Args:
        panels: by caption, the spans of every stage: `step`, `batch`, `start` and `end`, from 0 on.
    """
    figure = new_figure(9, 1.75 * len(panels) + 0.4)
    for axes, (caption, stages) in zip(figure.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
        for stage, spans in enumerate(stages):
            for span in spans:
                width = min(span["end"], SHOWN) - span["start"]
                if width <= 0:
                    continue
                colour = COLOURS[span["batch"] % len(COLOURS)]
                axes.barh(stage, width, 0.84, left=span["start"], color=colour, edgecolor="white", linewidth=1)
                if width > 0.6:
                    middle = span["start"] + width / 2
                    axes.text(middle, stage, f"{span['step']}", ha="center", va="center", color="white", fontsize=9)
        axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
        axes.set_ylim(len(stages) - 0.5, -0.5)
        axes.set_xlim(0, SHOWN)
        axes.set_title(caption, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time, in the time that a stage takes for a step; the numbers are those of the steps")
    figure.suptitle(title, fontsize=12)
    return finish(figure, title)
