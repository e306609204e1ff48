"""Progress bars that also suit a log file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Make a progress bar on stderr, updated ten times per second on a terminal, once in a file. Options: tqdm's."""
    interval = 0.1 if sys.stderr.isatty() else 1.0
    return tqdm(items, file=sys.stderr, mininterval=interval, maxinterval=interval, **options)
