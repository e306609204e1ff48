"""The live page of `beyond/serving` in a browser.

python -m benchmarks.pictures.served        # draw the lesson's figure of the page; needs Playwright and Chromium
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Mapping
from importlib.util import find_spec

from benchmarks.local_server import local_server
from benchmarks.pictures.picture import Picture
from benchmarks.results import ROOT
from stage_a_naive.entrypoints.interrupts import run_command

PROGRAMS = ("chromium", "chromium-browser", "google-chrome") if find_spec("playwright") else ()
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)  # None: there is no page to be seen here
OPTIONS = ("--max-num-seqs", "6", "--max-num-batched-tokens", "64", "--num-kvcache-blocks", "96", "--device", "cpu")
QUESTION = "What is the difference between prefill and decode, and why is one of them bound by memory bandwidth?"
FIELDS = {"#question": QUESTION, "#answers": "9", "#temperature": "0.2", "#most-tokens": "48"}


async def watch(moments: Mapping[str, int]) -> dict[str, Picture]:
    """Ask a paused engine for several answers, run it step by step, and take a picture of its page at each moment.

    Args:
        moments: for each picture its name, and the steps to run before it since the one before.
    """
    from playwright.async_api import async_playwright, expect  # not every machine has it

    found, total = {}, 0
    with local_server(*OPTIONS) as server:
        async with async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=CHROMIUM)
            page = await browser.new_page(viewport={"width": 1280, "height": 813})
            await page.goto(server.url)
            await expect(page.locator("#status")).to_have_text("idle")
            await page.click("#pause")
            await expect(page.locator("#status")).to_have_text("paused")
            for field, value in FIELDS.items():
                await page.fill(field, value)
            await page.click("#send")
            await expect(page.locator("#waiting .chip")).to_have_count(int(FIELDS["#answers"]))
            for name, steps in moments.items():
                for _ in range(steps):
                    total += 1
                    await page.click("#step")
                    await expect(page.locator("#num-steps")).to_contain_text(f" of {total} steps")
                running, waiting = await page.inner_text("#num-running"), await page.inner_text("#num-waiting")
                text = f"the live page after {total} steps: {running}, {waiting} waiting"
                found[name] = Picture(await page.screenshot(), text)
            await browser.close()
    return found


def main(argv: list[str] | None = None) -> None:
    """Draw the lesson's figure of the page, in place."""
    argparse.ArgumentParser(prog="python -m benchmarks.pictures.served", description=main.__doc__).parse_args(argv)
    asyncio.run(watch({"page": 20}))["page"].save(ROOT / "beyond/serving/figures/page.png")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
