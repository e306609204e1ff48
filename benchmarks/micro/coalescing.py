"""What a scattered read costs: every thread reads one number, neighbours or numbers further and further apart (GPU).

The memory delivers whole sectors of 32 bytes. Where the 32 threads of a warp read 32 neighbouring numbers of 4 bytes,
every byte that comes is wanted. With a number between two of them unread, half of the bytes are wanted; from a distance
of 32 bytes on, one number in eight of what comes. The same number of threads reads the same number of bytes each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.patches import Rectangle

from benchmarks.micro import caption, device_name, timed
from benchmarks.pictures.picture import BLUE, ORANGE, SKY, Picture, finish, new_panel, new_panels
from benchmarks.text import medians, number
from benchmarks.timing import graph_seconds

NEEDS_GPU = True
STRIDES = (1, 2, 4, 8, 16, 32)  # in numbers of 4 bytes
WANTED = 2**26  # numbers that are read: 256 MB, more than the L2 cache holds
REPEATS = 20
LANES, SECTOR = 32, 32  # threads of a warp; bytes that the memory delivers at least
Read = tuple[int, int, int]  # weight row, first byte in it, number of bytes


def measure() -> dict:
    """Seconds for the same number of wanted bytes, by the distance of neighbouring threads' addresses."""
    from benchmarks.micro._kernels import BLOCK, strided_sums  # Triton, which not every system has

    source = torch.ones(WANTED * max(STRIDES), dtype=torch.float32, device="cuda")
    rows = []
    for stride in STRIDES:
        if not bool((strided_sums(source, stride, WANTED) == BLOCK).all()):
            raise RuntimeError(f"the sums at stride {stride} are wrong")
        samples = graph_seconds([lambda stride=stride: strided_sums(source, stride, WANTED)], REPEATS)
        rows.append(timed(samples, stride_bytes=4 * stride, wanted_bytes=4 * WANTED))
    return {"rows": rows}


def table(results: list[dict]) -> dict[str, list[str]]:
    """How the picture was measured; its bars have their figures."""
    note = f"float32 numbers, 256 MB of them wanted; median of {REPEATS} samples"
    return {"coalescing": [caption(results[0], note)]}


def draw(results: list[dict]) -> dict[str, Picture]:
    """One bar per distance, its length the bandwidth of what was wanted."""
    times = medians(results[0]["rows"], "stride_bytes", "wanted_bytes")
    found = {f"{distance} B": wanted / seconds / 1e9 for (distance, wanted), seconds in times.items()}
    first, *_, last = found.values()
    title = f"Scattered reads get 1/{first / last:.0f} of the bandwidth ({device_name(results[0])})"
    x_label = "distance between the addresses of neighbouring threads"
    figure, axes = new_panel(8, 3.4, x_label, "GB/s of wanted bytes", title)
    bars = axes.bar(list(found), list(found.values()), color=[BLUE, *[ORANGE] * (len(found) - 1)])
    axes.bar_label(bars, list(map(number, found.values())), padding=2)
    text = "bandwidth against the distance of neighbouring threads' addresses"
    return {"stage_c_fused_mlp/coalescing.png": finish(figure, text)}


def naive_read() -> list[Read]:
    """Each lane reads one bfloat16 number, of a weight row of its own."""
    return [(lane, 0, 2) for lane in range(LANES)]


def warp_read() -> list[Read]:
    """Each lane reads 16 bytes, all of one weight row."""
    return [(0, 16 * lane, 16) for lane in range(LANES)]


def sectors(reads: Sequence[Read]) -> set[tuple[int, int]]:
    """The sectors (weight row, first byte) that hold the wanted bytes; weight rows begin with a sector."""
    return {
        (row, SECTOR * sector)
        for row, start, count in reads
        for sector in range(start // SECTOR, (start + count - 1) // SECTOR + 1)
    }


def draw_reads() -> Picture:
    """Corner of a weight matrix, once for each kernel: delivered sectors pale, wanted bytes dark."""
    kernels = (("naive", naive_read(), 128), ("warp", warp_read(), 16 * LANES))
    title = "One read of a warp: 32 addresses far apart, or side by side"
    both = {"xlabel": "byte in the weight row", "ylim": (LANES, -0.5)}
    figure, panels = new_panels(10, 3.4, both, both, title=title, grid="", sharey=True)
    for axes, (kernel, reads, shown) in zip(panels, kernels, strict=True):
        delivered = sectors(reads)
        for row, start in delivered:
            axes.add_patch(Rectangle((start, row), SECTOR, 1, facecolor=SKY, alpha=0.5, linewidth=0))
        for row, start, count in reads:
            axes.add_patch(Rectangle((start, row), count, 1, facecolor=BLUE, edgecolor="white", linewidth=0.4))
        wanted = sum(count for *_, count in reads)
        fetched = SECTOR * len(delivered)
        axes.set_title(f"{kernel}: {wanted} of {fetched:,} delivered bytes are used", fontsize=11)
        axes.set(xlim=(0, shown), xticks=range(0, shown + 1, shown // 4))
    panels[0].set(yticks=range(0, LANES, 8), ylabel="weight row")
    panels[0].text(40, 16, "dark: what a thread asked for\npale: delivered beside it", fontsize=10, va="center")
    return finish(figure, "a scattered read uses two bytes of every 32 that are delivered, a coalesced one all of them")
