"""The front page's table, in both languages: what each stage adds, and what it gains over the one before."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.groups import Group
from benchmarks.tables import BEFORE, LOAD, STEP, caption, gain, notes
from benchmarks.text import markdown, number

FRONT_ROWS = ("transformers", "A", "B", "B compiled", "C", "C compiled", "D", "E", "F")
FRONT_TEXT = {  # language: the heads, and what each row adds
    "en": (("stage", "adds", "ms per token, one request", "tokens/s under load",
            "× the stage before: one request · load"), {
        "transformers": "(`generate` of the library, for comparison)",
        "A": "prefill and decode with a KV cache",
        "B": "static cache, SDPA, fewer synchronisations",
        "B compiled": "`torch.compile`",
        "C": "the MLP as one CUDA kernel",
        "C compiled": "`torch.compile`",
        "D": "a model of our own, paged KV cache, batches",
        "E": "continuous batching",
        "F": "CUDA graphs, overlap, fused kernels",
        "elsewhere": "(measured elsewhere, same workload)",
        "floor": "(weights and KV cache read once)",
    }),
    "zh": (("阶段", "增加了什么", "单个请求，毫秒/token", "高负载，token/秒", "× 前一阶段：单个请求 · 高负载"), {
        "transformers": "（库自带的 `generate`，作对比）",
        "A": "带 KV cache 的预填充与解码",
        "B": "静态缓存、SDPA、更少的同步",
        "B compiled": "`torch.compile`",
        "C": "MLP 融合成一个 CUDA kernel",
        "C compiled": "`torch.compile`",
        "D": "自己写的模型、分页 KV cache、批处理",
        "E": "连续批处理",
        "F": "CUDA graph、重叠调度、融合 kernel",
        "elsewhere": "（在别处测量，负载相同）",
        "floor": "（权重与 KV cache 各读一次）",
    }),
}  # fmt: skip


def front_rows(group: Group) -> list[str]:
    """The engines of the front page: the stages, and what was measured elsewhere."""
    return [engine for engine in group.engines if engine in FRONT_ROWS or engine in group.elsewhere]


def front_table(group: Group, language: str, folder: str = "") -> list[str]:
    """Stage, what it adds, one request, load, and both against the stage before.

    Args:
        folder: the path to the folders of the stages from where the table is shown, for example `../`.
    """
    (heads, adds_of), body = FRONT_TEXT[language], []
    for engine in front_rows(group):
        values = [number(group.median(engine, c.workload, c.figure)) for c in (STEP, LOAD)]
        gains = " · ".join(gain(group, engine, c) for c in (STEP, LOAD)) if engine in BEFORE else ""
        package = group.rows[engine, "single"].get("package", "")
        name = f"[{engine}]({folder}{package}/README.md)" if package.startswith("stage_") else engine
        if engine in group.elsewhere:
            body.append([f"*{engine}* †", adds_of["elsewhere"], *values, gains])
        else:
            body.append([name, adds_of[engine], *values, gains])
    floor = [number(group.floor(c.workload, c.figure)) for c in (STEP, LOAD)]
    first, _, *others = markdown(heads, [*body, ["*floor*", adds_of["floor"], *floor, ""]])
    below = notes(group, front_rows(group), ("single", "mixed"), language)
    return [first, "|---|---|---:|---:|---:|", *others, *below]


def front_page(groups: list[Group], pictures: list[Path], readme: Path) -> list[str]:
    """The overview: one table per machine and model, and its picture. The course's front page has only the first."""
    lines, is_front = [], readme.parent.name != "benchmarks"
    for group in groups[:1] if is_front else groups:
        table = front_table(group, "zh" if "zh" in readme.name else "en", "" if is_front else "../")
        lines += [*caption(group), *table, ""]
        for path in (path for path in pictures if path.stem == group.slug):
            link = Path(os.path.relpath(path, readme.parent)).as_posix()
            lines += [f"![{group.model} on {group.device}: tokens per second of every stage]({link})", ""]
    return lines
