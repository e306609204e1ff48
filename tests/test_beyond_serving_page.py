"""The live page: it shows what the engine does, its buttons work, and a closed one costs the engine nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from fake_model import make_calls
from serving import CHAT, QUESTION, assert_idle, engine, get, httpx, running, until

import stage_e_batching
from benchmarks.pictures.served import CHROMIUM
from beyond.serving import step_log
from beyond.serving.live_view import PAGE, PICTURE_SECONDS, LiveView, PictureStream
from stage_a_naive.sampling import SamplingParams

PROMPT = list(range(20, 60))  # two full blocks of 16 tokens, and a half


llm = engine(max_num_seqs=4, max_num_batched_tokens=64, num_kvcache_blocks=96)


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as server:
        yield server


@pytest.fixture(autouse=True)
def runs_and_is_idle(server, llm):
    yield
    server.llm.engine_loop.resume()
    assert_idle(llm)


@pytest.fixture
def page():  # not the module's: as long as Playwright is there, so is its event loop
    if CHROMIUM is None:
        pytest.skip("no Chromium, or no Playwright to drive it: apt-get install chromium; pip install -e .[browser]")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, driver.chromium.launch(executable_path=CHROMIUM) as browser:
        page, errors = browser.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        yield page
        assert errors == []


def pictures(response):
    """The events of `/live/events`, as they come."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def control(server, action: object) -> httpx.Response:
    return httpx.post(f"{server.url}/live/control", json={"action": action}, timeout=60)


def wait(page, selector: str, text: str) -> None:
    """Wait until an element has a text in it."""
    page.locator(selector).filter(has_text=text).wait_for()


def number(page, selector: str) -> int:
    return int(page.inner_text(selector))


def test_a_question_is_answered_and_its_request_is_listed(server, llm, page):
    [expected] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=12))
    page.goto(server.url)
    wait(page, "#status", "idle")
    assert (page.inner_text("#model"), page.inner_text("#engine")) == ("tutor", "stage_e_batching")
    page.fill("#question", QUESTION)
    page.fill("#most-tokens", "12")
    page.click("#send")
    page.wait_for_selector("#ended tr")
    page.wait_for_selector("#send:enabled")
    assert page.inner_text(".assistant").strip() == expected["text"].strip()
    cells = page.locator("#ended tr").first.locator("td").all_inner_texts()
    assert cells[3] == "12" and float(cells[4]) > 0 and float(cells[5]) > 0 and cells[6] == "length"


def test_a_class_stops_the_engine_and_walks_through_it_step_by_step(server, llm, page):
    page.goto(server.url)
    wait(page, "#status", "idle")
    page.click("#pause")
    wait(page, "#status", "paused")
    page.fill("#question", QUESTION * 6)
    page.fill("#answers", "6")
    page.fill("#most-tokens", "40")
    page.click("#send")
    page.wait_for_selector("#waiting .chip:nth-child(6)")
    assert number(page, "#owned") == number(page, "#shared") == 0

    before = llm.engine.counters.num_steps
    for i in range(4):
        page.click("#step")
        wait(page, "#num-steps", f"of {before + i + 1} steps")
    assert llm.engine.counters.num_steps == before + 4
    assert page.locator("#running .running").count() == 4  # as many as there are batch slots
    assert page.locator("#waiting .chip").count() == 2
    drawn = {kind: page.locator(f"#pool .block.{kind}").count() for kind in ("owned", "shared")}
    used = llm.calls.stats()["num_used_blocks"]
    assert drawn["shared"] > 0 and drawn["owned"] + drawn["shared"] == used
    assert [number(page, f"#{kind}") for kind in drawn] == list(drawn.values())
    colours = page.evaluate("[...document.querySelectorAll('#pool .owned')].map((box) => box.style.backgroundColor)")
    chips = page.evaluate("[...document.querySelectorAll('#running .chip')].map((box) => box.style.background)")
    assert colours and set(colours) <= set(chips)

    page.click("#abort")  # the connection ends, and the requests with it: also while the engine is paused
    for gone in ("#running .running", "#waiting .chip"):
        page.locator(gone).first.wait_for(state="detached")
    assert number(page, "#owned") == number(page, "#shared") == 0 and number(page, "#cached") > 0
    page.click("#pause")
    wait(page, "#status", "idle")


def test_a_picture_tells_what_waits_what_runs_and_whose_the_blocks_are(server, llm):
    with httpx.stream("GET", f"{server.url}/live/events", timeout=60) as response:
        seen = pictures(response)
        assert next(seen)["running"] == []
        assert control(server, "pause").status_code == 200
        requests = llm.requests([PROMPT] * 6, SamplingParams(ignore_eos=True, max_tokens=3))
        server.loop.call_soon_threadsafe(server.llm.submit, requests)
        while len((picture := next(seen))["waiting"]) < 6:
            pass
        assert picture["paused"] and picture["num_used_blocks"] == 0
        control(server, "step")
        while not (picture := next(seen))["running"]:
            pass
        first, *others = picture["running"]
        assert (first["prompt"], first["computed"], first["generated"], first["cached"]) == (40, 40, 1, 0)
        assert {other["cached"] for other in others} == {32}
        shared, own = [first["id"], len(picture["running"])], [first["id"], 1]
        assert picture["blocks"].count(shared) == 2 and picture["blocks"].count(own) == 1
        step = picture["steps"][-1]
        assert (step["prefill"], step["decode"]) == (40 + 8 * len(others), 0)
        control(server, "resume")
        while picture["running"] or picture["waiting"]:
            picture = next(seen)
    assert [request["generated"] for request in picture["ended"]][-6:] == [3] * 6
    assert step_log.CACHED in picture["blocks"] and picture["num_used_blocks"] == 0


def view_of(call: Callable[[object], Future]) -> tuple[SimpleNamespace, LiveView]:
    """An engine's loop whose engine is asked by `call`, and its view."""
    loop = SimpleNamespace(paused=False, closed=False, call=call)
    llm = SimpleNamespace(engine_loop=loop, engine_name="stage_e_batching")
    return loop, LiveView(SimpleNamespace(model="tutor", llm=llm))


def test_a_picture_is_sent_when_something_changes_and_none_is_made_while_no_page_is_open():
    asked, sent = [], []

    def answer(function) -> Future:
        asked.append(function)
        future = Future()
        future.set_result({"num_blocks": 96})
        return future

    async def send(message: dict) -> None:
        if body := message.get("body"):
            sent.append(json.loads(body.removeprefix(b"data: ")))

    async def play() -> None:
        (loop, view), leave = view_of(answer), asyncio.Event()
        assert step_log.describe not in asked
        page = asyncio.create_task(PictureStream(view)({}, leave.wait, send))
        await until(lambda: asked.count(step_log.describe) == 4)
        assert [picture["paused"] for picture in sent] == [False]
        loop.paused = True
        await until(lambda: len(sent) == 2)
        assert sent[1]["paused"]
        leave.set()
        await page
        num_asked = len(asked)
        await asyncio.sleep(4 * PICTURE_SECONDS)
        assert len(asked) == num_asked

    asyncio.run(play())


def test_pages_that_look_at_the_same_time_share_a_picture_and_one_that_goes_leaves_it_to_the_others():
    asked: list[Future] = []

    def keep_waiting(_) -> Future:
        asked.append(Future())
        return asked[-1]

    async def play() -> None:
        _, view = view_of(keep_waiting)
        goes, *stay = [asyncio.create_task(view.picture()) for _ in range(8)]
        await until(lambda: len(asked) == 2)  # for the watch that a view begins with, and for a picture
        goes.cancel()
        asked[1].set_result({"num_blocks": 96})
        assert {json.loads(await picture)["num_blocks"] for picture in stay} == {96}
        assert len(asked) == 2

    asyncio.run(play())


def test_of_a_large_pool_every_nth_block_is_drawn():
    calls = make_calls(num_blocks=2 * step_log.MOST_BLOCKS + 3, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    whole = step_log.describe(calls)
    assert (whole["every_nth_block"], len(whole["blocks"])) == (3, -(-whole["num_blocks"] // 3))


@pytest.mark.parametrize("action", ["stop", None, 1, ["pause"]])
def test_a_button_that_there_is_not_is_refused(server, action):
    response = control(server, action)
    assert response.status_code == 400 and response.json()["error"]["param"] == "action"


def test_the_page_loads_nothing_from_elsewhere(server):
    page = get(server, "/")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    own = set(re.findall(r'(?:src|href)="([^"]*)"', page.text)) | {"/page/server.js"}
    assert own == {f"/page/{path.name}" for path in PAGE.iterdir()} - {"/page/index.html"}
    for path in own:
        found = get(server, path)
        assert found.status_code == 200 and found.headers["content-type"].startswith(("text/", "image/svg"))
        assert not re.search(r"https?://(?!www.w3.org/2000/svg)|import\(|@import", found.text)


def test_the_key_guards_pictures_and_buttons_and_a_server_can_do_without_the_page(llm):
    with running(llm, api_key="secret") as server:
        assert get(server, "/").status_code == 200
        assert get(server, "/live/events").status_code == 401
        assert control(server, "pause").status_code == 401
        assert not server.llm.engine_loop.paused
    with running(llm, page=False) as server:
        assert get(server, "/").status_code == control(server, "pause").status_code == 404


def test_a_server_with_open_pages_ends_and_the_engines_trace_is_complete(tmp_path):
    file = tmp_path / "trace.jsonl"
    llm = stage_e_batching.LLM("tutor", device="cpu", num_kvcache_blocks=16, trace=str(file))
    with running(llm) as server, httpx.stream("GET", f"{server.url}/live/events", timeout=60) as response:
        seen = pictures(response)
        assert next(seen)["num_steps"] == 0
        llm.generate(["Hello"], SamplingParams(max_tokens=3, ignore_eos=True), False)
        while (picture := next(seen))["num_steps"] < 3:
            pass
        server.server.handle_exit(15, None)
        list(seen)  # the stream ends, and no error ends it
    llm.close()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["num_tokens"] for record in written] == [s["prefill"] + s["decode"] for s in picture["steps"]]
