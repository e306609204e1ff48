"""Prefill and decode speed, shown with a progress bar while a call runs."""

from __future__ import annotations

import time

from tqdm import tqdm

from stage_e_batching.step import Counters


class Rates:
    """Show prefill and decode tokens per second in a progress bar, at most ten times a second."""

    def __init__(self, progress: tqdm, counters: Counters) -> None:
        self._progress = progress
        self._counters = counters
        self._start = self._shown = time.perf_counter()
        self._prefill, self._decode = counters.num_prefill_tokens, counters.num_generated_tokens

    def show(self) -> None:
        now = time.perf_counter()
        if self._progress.disable or now - self._shown < 0.1:
            return
        self._shown = now
        seconds = now - self._start
        self._progress.set_postfix(
            prefill=f"{(self._counters.num_prefill_tokens - self._prefill) / seconds:.0f}tok/s",
            decode=f"{(self._counters.num_generated_tokens - self._decode) / seconds:.0f}tok/s",
        )
