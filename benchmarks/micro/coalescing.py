"""What a scattered read costs: every thread reads one number, neighbours or numbers further and further apart (GPU).

The memory delivers whole sectors of 32 bytes. Where the 32 threads of a warp read 32 neighbouring numbers of 4 bytes,
every byte that comes is wanted. With a number between two of them unread, half of the bytes are wanted; from a distance
of 32 bytes on, one number in eight of what comes. The same number of threads reads the same number of bytes each time.
"""

from __future__ import annotations

import torch

from benchmarks.micro import caption
from benchmarks.pictures.picture import BLUE, ORANGE, finish, new_panel
from benchmarks.text import medians, number
from benchmarks.timing import graph_seconds

README, MARKERS, NEEDS_GPU = "stage_c_fused_mlp", ("coalescing",), True
STRIDES = (1, 2, 4, 8, 16, 32)  # in numbers of 4 bytes
WANTED = 2**26  # numbers that are read: 256 MB, more than the L2 cache holds
REPEATS = 20


def measure(wanted: int = WANTED) -> dict:
    """Seconds for the same number of wanted bytes, by the distance of neighbouring threads' addresses."""
    from benchmarks.micro._kernels import BLOCK, strided_sums  # Triton, which not every system has

    source = torch.ones(wanted * max(STRIDES), dtype=torch.float32, device="cuda")
    rows = []
    for stride in STRIDES:
        if not bool((strided_sums(source, stride, wanted) == BLOCK).all()):
            raise RuntimeError(f"the sums at stride {stride} are wrong")
        samples = graph_seconds([lambda stride=stride: strided_sums(source, stride, wanted)], REPEATS)
        rows.append({"stride_bytes": 4 * stride, "wanted_bytes": 4 * wanted, "samples": samples})
    return {"rows": rows}


def bandwidths(result: dict) -> dict[int, float]:
    """Wanted bytes per second, by the distance in bytes."""
    found = medians(result["rows"], "stride_bytes", "wanted_bytes")
    return {stride: wanted / seconds for (stride, wanted), seconds in found.items()}


def table(results: list[dict]) -> dict[str, list[str]]:
    """The picture, whose bars have their figures."""
    picture = "![Bandwidth of wanted bytes against the distance of the addresses](coalescing.png)"
    note = f"float32 numbers, 256 MB of them wanted; median of {REPEATS} samples"
    return {"coalescing": [picture, "", caption(results[0], note)]}


def draw(results: list[dict]) -> dict[str, bytes]:
    """One bar per distance, its length the bandwidth of what was wanted."""
    found = bandwidths(results[0])
    first, *_, last = found.values()
    device = results[0]["environment"]["device"]["name"]
    title = f"Scattered reads deliver 1/{first / last:.0f} of the wanted bytes ({device})"
    x_label = "distance between the addresses of neighbouring threads"
    figure, axes = new_panel(8, 3.4, x_label, "GB/s of wanted bytes", title)
    colours = [BLUE, *[ORANGE] * (len(found) - 1)]
    bars = axes.bar([f"{distance} B" for distance in found], [v / 1e9 for v in found.values()], color=colours)
    axes.bar_label(bars, [number(v / 1e9) for v in found.values()], padding=2)
    return {"coalescing.png": finish(figure, "bandwidth against the distance of neighbouring threads' addresses").png}
