"""What results files have in common, for tests of the benchmark's tables and figures."""

from __future__ import annotations

ENVIRONMENT = {
    "versions": {"python": "3.12.1", "torch": "9.9"},
    "device": {"name": "a machine", "type": "cpu"},
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "date": "2030-01-02T03:04:05+00:00",
}
ON_GPU = ENVIRONMENT | {"device": {"name": "a GPU", "type": "cuda"}}
CEILINGS = {"copy_bytes_per_s": 4e12, "matmul_operations_per_s": 6e14}


def is_drawn(pictures: dict[str, object], *names: str) -> bool:
    """Whether there are these pictures (given none, one of any name), as SVG files whose text is text."""
    assert set(pictures) == set(names) if names else len(pictures) == 1, list(pictures)
    return all(b"prefers-color-scheme: dark" in p.svg and b"</text>" in p.svg for p in pictures.values())
