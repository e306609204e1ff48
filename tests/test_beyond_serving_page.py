"""The live page: it shows what the engine does, its buttons work, and a closed one costs the engine nothing."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
from fake_model import completion_of, make_calls
from serving import CHAT, QUESTION, assert_idle, engine, get, httpx, running, served, streamed, until

import stage_e_batching
from benchmarks.pictures.served import CHROMIUM
from beyond.serving import live_view, step_log
from beyond.serving.live_view import PAGE, PICTURE_SECONDS, LiveView, PictureStream
from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.step import BatchSequence, ScheduledStep

PROMPT = list(range(20, 60))  # two full blocks of 16 tokens, and a half


llm = engine(max_num_seqs=4, max_num_batched_tokens=64, num_kvcache_blocks=96)
server = served()


@pytest.fixture(autouse=True)
def runs_and_is_idle(server, llm):
    yield
    server.llm.engine_loop.resume()
    assert_idle(llm)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium, or no Playwright to drive it: apt-get install chromium; pip install -e .[browser]")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, driver.chromium.launch(executable_path=CHROMIUM) as browser:
        yield browser


@pytest.fixture
def page(browser):
    page, errors = browser.new_page(), []  # in a new context
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert errors == []


def run_coroutine(coroutine):
    """Run a coroutine in a thread: in this one, Playwright's event loop runs."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, coroutine).result()


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
    assert page.locator("#running .lane").count() == 4  # as many as there are batch slots
    assert page.locator("#waiting .chip").count() == 2
    assert page.inner_text("#why").endswith("waits: all 4 batch slots are taken")
    drawn = {kind: page.locator(f"#pool .block.{kind}").count() for kind in ("owned", "shared")}
    used = llm.calls.stats()["num_used_blocks"]
    assert drawn["shared"] > 0 and drawn["owned"] + drawn["shared"] == used
    assert [number(page, f"#{kind}") for kind in drawn] == list(drawn.values())
    colours = page.evaluate("[...document.querySelectorAll('#pool .owned')].map((box) => box.style.background)")
    chips = page.evaluate("[...document.querySelectorAll('#running .chip')].map((box) => box.style.background)")
    assert colours and all(any(chip in colour for chip in chips) for colour in colours)

    page.click("#running .lane")
    first = llm.engine.scheduler.unfinished[0]
    wait(page, "#chosen", f"request {first.request_id}:")
    page.locator("#table div").nth(len(first.block_table) - 1).wait_for()
    said = page.locator("#table div").all_inner_texts()
    assert [text.split(" ×")[0] for text in said] == [f"{i} → {block}" for i, block in enumerate(first.block_table)]
    assert said[0].endswith("×4") and page.locator("#pool .mine").count() == len(first.block_table)
    page.keyboard.press("ArrowDown")
    wait(page, "#chosen", f"request {llm.engine.scheduler.unfinished[1].request_id}:")

    page.click("#abort")  # the connection ends, and the requests with it: also while the engine is paused
    for gone in ("#running .lane", "#waiting .chip"):
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
        slots = [request["slot"] for request in picture["running"]]
        shared, own = [len(slots), *slots], [1, first["slot"]]
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
    loop = SimpleNamespace(paused=False, closed=False, failure=None, call=call)
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

    run_coroutine(play())


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

    run_coroutine(play())


def request(i: int, **values: object) -> dict:
    """One request of a picture."""
    found = {
        "id": i,
        "slot": i,
        "state": "decoding",
        "prompt": 90,
        "cached": 32,
        "computed": 100,
        "lost": 0,
        "generated": 10,
    }
    found |= {"accepted": 0, "most": 400, "blocks": 7, "preemptions": 0, "constrained": False}
    return found | values


def busy(calls, num_running: int) -> dict:
    """A picture of an engine with this many running requests, and 64 that wait."""
    blocks = [[9, 0, 1, 2, 3]] + [[1, i] for i in range(num_running)] + [0, 1] * 200
    preempted = request(600, slot=-1, lost=45, preemptions=1)
    step = {"prefill": 20, "decode": 6, "guesses": 3, "accepted": 2, "recomputed": 5, "preempted": 1, "ms": 1.5}
    changes = {
        "model": "tutor", "engine": "stage_e_batching", "paused": False, "failure": "",
        "running": [request(i, constrained=i == 1, accepted=3 * (i == 2)) for i in range(num_running)],
        "waiting": [preempted] + [request(601 + i, slot=-1) for i in range(63)], "num_waiting": 340, "blocks": blocks,
        "why": {"id": 600, "reason": "blocks", "needs": 4, "held": 0, "kept": 0}, "num_free_blocks": 3,
        "preempted": [{"id": 600, "step": 7, "blocks": 3, "tokens": 45}], "num_preemptions": 1,
        "steps": [step | {"number": i} for i in range(120)],
        "ticks": [[i - 119, 30, 5] for i in range(120)],
    }  # fmt: skip
    return step_log.describe(calls) | changes


DRAW = "async (picture) => (await import('/page/engine.js')).draw(picture)"
CONTRAST = """() => {
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour.startsWith("rgba(") ? ground(element.parentElement) : colour;
  };
  return [...document.querySelectorAll(".chip, small, .legend, h2, button:enabled, #gone, dd, th")].map((element) => {
    const [low, high] = [getComputedStyle(element).color, ground(element)].map(luminance).sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), element.textContent];
  });
}"""


@pytest.fixture
def calls():
    return make_calls(num_blocks=96, block_size=16, max_num_seqs=512, max_num_batched_tokens=1024)


def test_the_page_is_as_high_with_500_requests_as_with_none(server, page, calls):
    page.goto(server.url)
    wait(page, "#status", "idle")
    heights = [page.evaluate("document.querySelector('.engine').scrollHeight")]
    for number_running in (5, 30, 500):
        page.evaluate(DRAW, busy(calls, number_running))
        assert page.locator("#running .lane").count() == number_running
        heights.append(page.evaluate("document.querySelector('.engine').scrollHeight"))
        lanes = page.evaluate(
            "[...document.querySelectorAll('.lane')].map((lane) => lane.getBoundingClientRect().bottom)"
        )
        assert max(lanes) <= page.evaluate("document.querySelector('#lanes').getBoundingClientRect().bottom") + 1
    assert len(set(heights)) == 1


def test_it_says_why_a_request_waits_what_a_preempted_one_lost_and_marks_drafts_and_forms(server, page, calls):
    page.goto(server.url)
    wait(page, "#status", "idle")
    page.evaluate(DRAW, busy(calls, 5))
    assert page.inner_text("#why") == "request 600 waits: needs 4 blocks, 3 are free"
    assert page.inner_text("#waiting .lost") == "600 lost 45 tokens"
    assert (
        page.inner_text("#preempted") == "preemptions: 1, the last in step 7: request 600 lost 3 blocks with 45 tokens"
    )
    assert page.inner_text("#last-step").endswith("5 computed again, 2 of 3 drafts accepted, 1 preempted")
    assert page.inner_text("#running .constrained small").endswith("{}")
    assert page.locator("#running .lane").nth(2).inner_text().endswith("✓3")
    assert page.inner_text("#budget") == "↑ budget 1,024"  # a line that is far above all columns
    assert page.inner_text("#num-steps").endswith("highest: 26")


def test_a_long_prefill_has_a_scale_of_its_own_and_leaves_the_other_columns_as_high(server, page, calls):
    page.goto(server.url)
    wait(page, "#status", "idle")
    picture = busy(calls, 5)
    backgrounds = "[...document.querySelectorAll('#steps div')].map((column) => column.style.background)"
    page.evaluate(DRAW, picture)
    before = page.evaluate(backgrounds)
    picture["steps"][60] |= {"prefill": 900}
    page.evaluate(DRAW, picture)
    after = page.evaluate(backgrounds)
    assert after[:60] + after[61:] == before[:60] + before[61:]
    assert page.locator("#steps .far").count() == 1
    assert page.inner_text("#num-steps").endswith("highest: 906")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast_in_light_and_dark(server, page, calls, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(server.url)
    wait(page, "#status", "idle")
    page.evaluate(DRAW, busy(calls, 12) | {"failure": "no memory"})
    contrasts = page.evaluate(CONTRAST)
    assert len(contrasts) > 60 and [text for ratio, text in contrasts if ratio < 4.5] == []


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_two_hundred_requests_are_on_one_screen_and_a_phone_has_details_on_demand(server, page, calls, size):
    width, height = size
    page.set_viewport_size({"width": width, "height": height})
    page.goto(server.url)
    wait(page, "#status", "idle")
    page.evaluate(DRAW, busy(calls, 200))
    is_phone = width < 900
    assert page.evaluate("document.documentElement.scrollHeight") <= height
    for part in (".chat", ".engine"):
        assert page.evaluate(f"(part => part.scrollHeight - part.clientHeight)(document.querySelector('{part}'))") <= 0
    assert page.locator("#more").is_visible() == is_phone and page.locator("#table").is_visible() != is_phone
    if is_phone:
        page.click("#more summary")
        assert page.locator("#table").is_visible()


def test_a_long_conversation_on_a_phone_scrolls_in_its_own_box(server, page, calls):
    page.set_viewport_size({"width": 390, "height": 844})
    body = f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'x' * 2000}}]})}\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.goto(server.url)
    wait(page, "#status", "idle")
    page.click("#send")
    page.wait_for_selector("#send:enabled")
    page.evaluate(DRAW, busy(calls, 200))
    assert page.evaluate("document.documentElement.scrollHeight") <= 844
    height, whole = page.evaluate("(box => [box.clientHeight, box.scrollHeight])(document.getElementById('messages'))")
    assert 60 < height < whole and page.locator("#send").is_visible()


def test_on_a_phone_nothing_is_wider_than_the_screen(server, page, calls):
    page.set_viewport_size({"width": 375, "height": 720})
    page.goto(server.url)
    wait(page, "#status", "idle")
    page.evaluate(DRAW, busy(calls, 500))
    page.click("#more summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_keys_pause_and_step_and_text_is_typed_as_ever(server, llm, page):
    page.goto(server.url)
    wait(page, "#status", "idle")
    page.focus("#question")
    page.keyboard.type("ps")
    assert page.input_value("#question").endswith("ps") or page.input_value("#question").startswith("ps")
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    wait(page, "#status", "paused")
    page.fill("#most-tokens", "2")
    page.click("#send")
    page.locator("#waiting .chip").wait_for()
    before = llm.engine.counters.num_steps
    page.keyboard.press("s")
    wait(page, "#num-steps", f"of {before + 1} steps")
    page.keyboard.press("p")
    wait(page, "#status", "idle")


def test_an_idle_page_offers_examples_that_run(server, page):
    page.goto(server.url)
    wait(page, "#idle", "Nothing runs")
    page.click("text=Nine answers, step by step")
    page.locator("#waiting .chip").nth(8).wait_for()
    assert page.inner_text("#status") == "paused" and not page.is_visible("#idle")
    page.click("#abort")
    wait(page, "#idle", "Nothing runs")


def test_a_browser_that_asks_for_chinese_gets_it_whole(server, page, calls):
    with page.context.browser.new_context(locale="zh-CN") as context:
        chinese = context.new_page()
        chinese.goto(server.url)
        wait(chinese, "#status", "空闲")
        lessons = chinese.evaluate("[...document.querySelectorAll('a')].map((link) => new URL(link.href).pathname)")
        assert len(lessons) > 6
        for path in set(lessons):
            assert path.endswith(".zh-CN.md") and re.search("[一-鿿]{4}", get(server, path).text)
        chinese.evaluate(DRAW, busy(calls, 5) | {"failure": "no memory"})
        assert chinese.inner_text("#why") == "请求 600 在等：需要 4 块，空闲 3 块"
        texts = chinese.evaluate("document.body.innerText")
        left = set(re.findall(r"[A-Za-z][a-z]{3,}", texts)) - {
            "tutor",
            "stage",
            "batching",
            "token",
            "cache",
            "memory",
            "prefill",
            "decode",
            "make",
            "serve",
        }
        assert left == set()


def test_the_page_says_in_red_that_the_engine_is_gone_and_why(server, page, calls):
    page.goto(server.url)
    wait(page, "#status", "idle")
    assert not page.is_visible("#gone")
    page.evaluate(DRAW, busy(calls, 5) | {"failure": "no memory"})
    assert page.inner_text("#gone").startswith("The last step failed: no memory.")
    end = 'data: {"failure": "the engine\'s process died (SIGKILL)"}\n\n'
    page.route("**/live/events", lambda route: route.fulfill(body=end, content_type="text/event-stream"))
    page.reload()
    wait(page, "#status", "gone")
    assert page.inner_text("#gone").startswith("The engine is gone: the engine's process died (SIGKILL).")
    page.unroute("**/live/events")
    wait(page, "#status", "idle")  # it connects by itself
    assert not page.is_visible("#gone")


def waiting_picture(
    num_blocks: int, max_num_seqs: int, prompts: list[list[int]], num_steps: int, budget: int = 64, max_tokens: int = 12
) -> dict:
    """What a picture says when some prompts have come and some steps have run."""
    calls = make_calls(num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    step_log.watch(calls)
    mailbox = calls.new_mailbox()
    for prompt in prompts:
        calls.add_request(Request(0, prompt, SamplingParams(ignore_eos=True, max_tokens=max_tokens), 0), mailbox)
    for _ in range(num_steps):
        calls.advance(mailbox)
        mailbox.take()
    return step_log.describe(calls)


A, B = list(range(1, 14)), list(range(21, 34))  # thirteen tokens: four blocks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((16, 1, [A, B], 1), {"id": 1, "reason": "slots", "needs": 4}),
        ((9, 4, [A, B], 1), {"id": 1, "reason": "blocks", "needs": 4, "held": 0}),
        ((9, 4, [A, A[:9] + B], 1), {"id": 1, "reason": "blocks", "needs": 4, "held": 2}),
        ((32, 4, [A, B], 1, 8), {"id": 1, "reason": "tokens"}),
        ((32, 4, [A], 0), {"id": 0, "reason": "step", "kept": 0}),
        ((32, 4, [A], 1), None),
    ],
)
def test_a_picture_says_what_the_first_request_that_waits_lacks(given, expected):
    picture = waiting_picture(*given)
    assert picture["why"] == expected if expected is None else expected.items() <= picture["why"].items()


def test_a_picture_tells_what_a_preempted_request_lost():
    picture = waiting_picture(24, 4, [A, B], 37, max_tokens=60)
    [lost], [first] = picture["preempted"], picture["waiting"]
    assert lost["id"] == first["id"] == 1 and lost["blocks"] == 12
    assert first["lost"] == lost["tokens"] == 48
    assert sum(tokens for _, tokens, _ in picture["ticks"]) == sum(
        request["generated"] for request in picture["running"] + picture["waiting"]
    )


def test_what_crosses_to_the_server_s_process_is_small_and_has_no_engine_in_it():
    calls = make_calls(num_blocks=96, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    assert step_log.watch(calls) is None
    assert len(pickle.dumps(step_log.describe(calls))) < 4096


def test_accepted_drafts_are_counted_per_step_and_per_request():
    first, second = [BatchSequence(completion_of(PROMPT), request_id=i) for i in range(2)]
    counters = SimpleNamespace(num_generated_tokens=4, num_accepted_tokens=2)
    log = step_log.StepLog(SimpleNamespace(counters=counters, scheduler=SimpleNamespace(waiting=[])))
    step = ScheduledStep(
        7, 0.0, [first] * 4 + [second], [0] * 5, [1] * 5, [True, True, True, False, True], num_decodes=5
    )
    log(step, [], 1.0)
    assert (log.steps[-1]["guesses"], log.steps[-1]["accepted"], log.accepted) == (3, 2, {0: 2})
    assert list(log.ticks) == [[int(1.0 / step_log.TICK_SECONDS), 4, 0]]


def test_the_last_event_says_what_ended_the_engine():
    sent = []

    async def send(message: dict) -> None:
        if body := message.get("body"):
            sent.append(json.loads(body.removeprefix(b"data: ")))

    async def play() -> None:
        loop, view = view_of(lambda _: Future())
        loop.closed, loop.failure = True, RuntimeError("the engine's process died (SIGKILL)")
        await PictureStream(view)({}, asyncio.Event().wait, send)

    run_coroutine(play())
    assert sent == [{"failure": "the engine's process died (SIGKILL)"}]


@pytest.mark.parametrize("chosen", ["", "x", "-1", "9" * 40])
def test_a_request_that_cannot_be_is_refused(server, chosen):
    assert get(server, f"/live/events?request={chosen}").status_code == 400


def test_of_a_large_pool_every_nth_block_is_drawn():
    calls = make_calls(num_blocks=2 * step_log.MOST_BLOCKS + 3, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    whole = step_log.describe(calls)
    assert (whole["every_nth_block"], len(whole["blocks"])) == (3, -(-whole["num_blocks"] // 3))


def test_the_counts_of_a_large_pool_are_those_of_the_metrics():
    with closing(stage_e_batching.LLM("tutor", device="cpu", num_kvcache_blocks=5000)) as llm, running(llm) as server:
        server.llm.engine_loop.pause()
        with streamed(server, prompt=PROMPT, n=3, max_tokens=50) as response:
            for _ in range(3):
                server.llm.engine_loop.single_step()
                time.sleep(0.2)
            with httpx.stream("GET", f"{server.url}/live/events", timeout=60) as events:
                told = next(pictures(events))
            usage = re.search(r"vllm:kv_cache_usage_perc{.*} (.*)\n", get(server, "/metrics").text)[1]
            server.llm.engine_loop.resume()
            response.read()
    count = told["count"]
    assert told["every_nth_block"] == 3 and sum(count.values()) == told["num_blocks"] == 5000
    assert count["owned"] + count["shared"] == round(float(usage) * 5000) == told["num_used_blocks"] > 0
    assert count["shared"] == 2 and count["cached"] == 0  # the full blocks of the prompt


def test_a_page_is_told_that_the_engine_does_not_answer(llm, monkeypatch):
    monkeypatch.setattr(live_view, "SILENT_SECONDS", 0.2)
    stuck = threading.Event()
    with running(llm) as server, httpx.stream("GET", f"{server.url}/live/events", timeout=60) as events:
        told = pictures(events)
        assert "steps" in next(told)
        server.llm.engine_loop.call(lambda calls: stuck.wait(30))
        assert next(one for one in told if "silent" in one)["silent"] >= 1
        stuck.set()
        assert "steps" in next(one for one in told if "silent" not in one)


def test_an_answer_that_is_cut_off_says_so_goes_on_and_stays_in_sight(server, llm, page):
    [expected] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=200))
    assert expected["finish_reason"] == "stop"
    page.set_viewport_size({"width": 1280, "height": 360})
    page.goto(server.url)
    wait(page, "#status", "idle")
    page.fill("#question", QUESTION)
    page.fill("#most-tokens", "20")
    page.click("#send")
    wait(page, ".end", "cut off: it has as many tokens as were allowed")
    page.fill("#most-tokens", "200")
    page.click("text=Go on")
    wait(page, ".end", "complete")
    page.wait_for_selector("#send:enabled")
    assert page.inner_text(".assistant") == expected["text"] and page.locator(".end button").count() == 0
    for i in range(3):
        page.click("#send")
        page.locator(".end").nth(i + 1).wait_for()
        page.wait_for_selector("#send:enabled")
    gap = "(box => box.scrollHeight - box.scrollTop - box.clientHeight)(document.getElementById('messages'))"
    assert page.evaluate(gap) < 40


MARKDOWN = "# Cache\n**old** keys and `k < 2`:\n- one\n  1. two\n```py\nif k < 2: **p\n```\n"
MARKDOWN += "<img src=x onerror=alert(1)> <b>x</b>"


def test_an_answer_is_shown_as_markdown_and_its_html_is_text(server, page):
    body = "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': c}}]})}\n\n" for c in MARKDOWN)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.goto(server.url)
    page.click("#send")
    page.wait_for_selector("#send:enabled")
    wait(page, ".assistant", "onerror")
    shown = page.locator(".assistant")
    for selector, texts in {
        ".heading": ["Cache"],
        "b": ["old"],
        "code": ["k < 2"],
        ".item": ["one", "two"],
        "pre": ["if k < 2: **p\n"],
        "img, a, script": [],
    }.items():
        assert shown.locator(selector).all_text_contents() == texts
    assert shown.locator(".item").last.get_attribute("data-mark") == "1."
    assert shown.inner_text().endswith("<img src=x onerror=alert(1)> <b>x</b>")


def test_a_conversation_stays_when_the_page_is_loaded_again(server, page):
    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json) if "chat" in request.url else None)
    page.goto(server.url)
    page.fill("#most-tokens", "4")
    for turns in (1, 3):
        page.click("#send")
        page.wait_for_selector(".end")
        page.wait_for_selector("#send:enabled")
        assert len([one for one in asked if one][-1]["messages"]) == turns
        assert page.locator(".message").count() == turns + 1
        page.reload()
        assert page.locator(".message").count() == turns + 1
    page.click("#clear")
    page.reload()
    assert page.locator(".message").count() == 0


@pytest.mark.parametrize("action", ["stop", None, 1, ["pause"]])
def test_a_button_that_there_is_not_is_refused(server, action):
    response = control(server, action)
    assert response.status_code == 400 and response.json()["error"]["param"] == "action"


def test_the_page_loads_nothing_from_elsewhere(server):
    page = get(server, "/")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    linked = set(re.findall(r'(?:src|href)="([^"]*)"', page.text)) | {
        "/page/markdown.js",
        "/page/server.js",
        "/page/words.js",
    }
    lessons = {path for path in linked if path.startswith("/lesson/")}
    lessons |= {path.replace(".md", ".zh-CN.md") for path in lessons}  # what the Chinese page leads to
    assert lessons and all("# " in get(server, path).text for path in lessons)
    own = linked - lessons
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
