"""What one read of a warp fetches from memory: 32 addresses a weight row apart, and 32 addresses side by side."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from benchmarks.pictures.picture import BLUE, SKY, Picture, finish, new_panels

LANES, SECTOR = 32, 32  # threads of a warp; bytes that the memory delivers at least
Read = tuple[int, int, int]  # weight row, first byte in it, number of bytes


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
