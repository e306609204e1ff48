"""The live page of `beyond/serving` at work, as a browser shows it.

    python -m benchmarks.pictures.live_page        # draw the lesson's figure; needs Chromium

`watch` starts a server of its own, opens its page, asks for several answers to one question while the engine is paused,
runs it step by step, and takes a picture of each moment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.local_server import local_server
from benchmarks.pictures import browser
from benchmarks.pictures.picture import Picture
from benchmarks.results import ROOT

FIGURE = "beyond/serving/figures/page.png"
OPTIONS = ("--max-num-seqs", "6", "--max-num-batched-tokens", "64", "--num-kvcache-blocks", "96")
QUESTION = "What is the difference between prefill and decode, and why is one of them bound by memory bandwidth?"
FIELDS = {"#question": QUESTION, "#answers": 9, "#temperature": 0.2, "#most-tokens": 48}


def watch(moments: Mapping[str, int], options: tuple[str, ...] = OPTIONS) -> dict[str, Picture]:
    """Pictures of the page after some numbers of steps.

    Args:
        moments: for each picture its name, and the steps to run before it since the one before.
        options: of the server.

    Raises:
        RuntimeError: there is no Chromium here, or the server did not start.
    """
    if browser.PROGRAM is None:
        raise RuntimeError("there is no Chromium here; install it: apt-get install chromium")
    found = {}
    with (
        local_server("--device", "cpu", *options) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        browser.open_tab(Path(folder)) as tab,
    ):
        tab.open(f"{server.url}/")
        tab.wait("document.querySelector('#status').textContent == 'idle'")
        tab.click("#pause")
        tab.wait("document.querySelector('#status').textContent == 'paused'")
        for field, value in FIELDS.items():
            tab.fill(field, value)
        tab.click("#send")
        tab.wait(f"document.querySelectorAll('#waiting .chip').length == {FIELDS['#answers']}")
        total = 0
        for name, steps in moments.items():
            for _ in range(steps):
                total += 1
                tab.click("#step")
                tab.wait(f"document.querySelector('#num-steps').textContent.includes(' of {total} steps')")
            running, waiting = tab.text("#num-running"), tab.text("#num-waiting")
            found[name] = Picture(tab.screenshot(), f"the live page after {total} steps: {running}, {waiting} waiting")
    return found


if __name__ == "__main__":
    (ROOT / FIGURE).parent.mkdir(exist_ok=True)
    watch({"page": 20})["page"].save(ROOT / FIGURE)
    print(f"written: {FIGURE}")
