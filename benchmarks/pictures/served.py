"""The live page of `beyond/serving` in a browser: the lesson's figure and a short film.

python -m benchmarks.pictures.served          # draw the figure again; needs Playwright and Chromium
python -m benchmarks.pictures.served --film   # record the film, in light and dark
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shutil
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from benchmarks.local_server import local_server
from benchmarks.pictures.picture import Picture
from benchmarks.results import ROOT
from stage_a_naive.entrypoints.interrupts import run_command

PROGRAMS = ("chromium", "chromium-browser", "google-chrome") if find_spec("playwright") else ()
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)  # None: pages cannot be rendered here
OPTIONS = ("--max-num-seqs", "6", "--max-num-batched-tokens", "64", "--num-kvcache-blocks", "40", "--device", "cpu")
QUESTION = "How do I build a mini vLLM inference loop from scratch? Answer in bullet points."
FIELDS = {"#question": QUESTION, "#answers": "9", "#temperature": "0.6", "#most-tokens": "48"}
FIGURES = ROOT / "beyond/serving/figures"
# With fewer blocks, so that the requests outgrow the pool: admitted, a shared prefix, preempted, admitted again.
FILM_OPTIONS = (*OPTIONS[:5], "30", *OPTIONS[6:])
FILM_FIELDS = FIELDS | {"#most-tokens": "120"}
# For each language what the page says, the question, and the end of a figure's name.
ENGLISH = ("idle", "paused", " of {} steps"), QUESTION, ""
CHINESE = ("空闲", "已暂停", "共 {} 步"), "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？", ".zh-CN"
LOCALES = {"en": ENGLISH, "zh-CN": CHINESE}
FILM_STEPS, FILM_MS, LAST_MS = 168, 180, 3000


async def watch(
    moments: Mapping[str, int],
    options: Iterable[str] = OPTIONS,
    fields: dict[str, str] = FIELDS,
    scheme: str = "light",
    locale: str = "en",
) -> dict[str, Picture]:
    """Ask a paused engine for several answers, run it step by step, and take a picture of its page at each moment.

    Args:
        moments: for each picture its name, and the number of steps to run before it.
        options: of the server.
        fields: values for the page's fields.
        scheme: "light" or "dark".
        locale: the page's language; its question replaces that of `fields`.
    """
    from playwright.async_api import async_playwright, expect  # not every machine has it

    found, total = {}, 0
    (idle, paused, of_all), question, _ = LOCALES[locale]
    with local_server(*options) as server:
        async with async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=CHROMIUM)
            page = await browser.new_page(viewport={"width": 1280, "height": 813}, color_scheme=scheme, locale=locale)
            await page.goto(server.url)
            await expect(page.locator("#status")).to_have_text(idle)
            await page.click("#pause")
            await expect(page.locator("#status")).to_have_text(paused)
            for field, value in (fields | {"#question": question}).items():
                await page.fill(field, value)
            await page.click("#send")
            await expect(page.locator("#waiting .chip")).to_have_count(int(fields["#answers"]))
            for name, steps in moments.items():
                for _ in range(steps):
                    total += 1
                    await page.click("#step")
                    await expect(page.locator("#num-steps")).to_contain_text(of_all.format(total))
                if total == 2:  # six run; the newest of them will be the first to be preempted
                    await page.locator("#running .lane").last.click()
                    await page.locator("#table div").first.wait_for()
                running, waiting = await page.inner_text("#num-running"), await page.inner_text("#num-waiting")
                text = f"the live page after {total} steps: {running}, {waiting} waiting"
                found[name] = Picture(await page.screenshot(), text)
            await browser.close()
    return found


def record(scheme: str, locale: str, file: Path) -> None:
    """Record a run as an animated WebP, one frame per three steps."""
    moments = {"asked": 0, "six run": 2} | {str(step): 3 for step in range(FILM_STEPS // 3)}
    taken = asyncio.run(watch(moments, FILM_OPTIONS, FILM_FIELDS, scheme, locale))
    frames = [Image.open(io.BytesIO(picture.png)).convert("RGB").resize((880, 559)) for picture in taken.values()]
    durations = [1500, 1500] + [FILM_MS] * (len(frames) - 3) + [LAST_MS]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=50, method=4)


def main(argv: list[str] | None = None) -> None:
    """Draw the lesson's figure of the page, or record the film, in place."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures.served", description=main.__doc__)
    parser.add_argument("--film", action="store_true", help="record the film")
    film = parser.parse_args(argv).film
    for locale, (_, _, end) in LOCALES.items():
        if film:
            record("light", locale, FIGURES / f"film{end}.webp")
            record("dark", locale, FIGURES / f"film_dark{end}.webp")
        else:
            asyncio.run(watch({"six run": 2, "page": 18}, locale=locale))["page"].save(FIGURES / f"page{end}.png")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
