"""Where a table stands in a README: between a pair of HTML comments, which no reader sees.

    <!-- ablation -->
    whatever stands here is replaced
    <!-- /ablation -->
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.results import ResultsError


def fill(text: str, marker: str, body: str) -> str:
    """`text` with `body` between the two comments of `marker`.

    Raises:
        ResultsError: one of the two is not there.
    """
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ResultsError(f"the text has no {begin} … {end}")
    return f"{before}{begin}\n{body}\n{end}{after}"


def fill_file(file: Path, bodies: Mapping[str, str]) -> None:
    """Fill in several markers of a file; it is written only if all of them are there.

    Raises:
        ResultsError: a marker is not there; the message names the file.
    """
    text = file.read_text(encoding="utf-8")
    for marker, body in bodies.items():
        try:
            text = fill(text, marker, body)
        except ResultsError as error:
            raise ResultsError(f"{file}: {error}") from error
    file.write_text(text, encoding="utf-8")
