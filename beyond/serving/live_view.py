"""The live page at `/`: a chat box next to a view of the running engine.

    engine's thread or process           event loop                                 browser
    step -> StepLog
    between two steps: describe() -----> one picture for all pages, as an event --> page/engine.js draws it
        and describe_table() ----------> the block table of the request that one page has chosen
    pause, resume, single step <-------- POST /live/control <---------------------- buttons

Every picture is complete, so a page that misses some need not catch up. Nothing is sent while nothing changes, and
nothing is described while no page is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from beyond.serving.answers import as_json
from beyond.serving.app import Api
from beyond.serving.engine_loop import EngineClosed
from beyond.serving.event_stream import unless_gone
from beyond.serving.http_errors import ClientGone
from beyond.serving.protocol import RequestError, check_fields
from beyond.serving.sse import START, frame
from beyond.serving.step_log import describe, describe_table, watch
from stage_a_naive.contract.errors import one_line, shown

PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {".svg": "image/svg+xml", ".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
MEDIA_TYPES[".md"] = "text/plain"  # a browser would offer Markdown for download
# The browser loads nothing from elsewhere, runs no script but the page's own, and shows it in no other site's frame.
HEADERS = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'", "Cache-Control": "no-cache"}
PICTURE_SECONDS = 0.05
SILENT_SECONDS = 2  # without a picture, after which the page says so
ROOT = Path(__file__).resolve().parents[2]
LESSONS = (  # that the page's words lead to, in both editions
    "docs/glossary", "beyond/serving/page", "beyond/speculation/README", "beyond/structured/README",
    "stage_d_paged/README", "stage_e_batching/README",
)  # fmt: skip


class LiveView:
    """The page, its pictures, and its buttons.

    Args:
        api: the API, whose key also guards the pictures and the buttons.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self.loop = api.llm.engine_loop
        self.loop.call(watch)
        self._picture: asyncio.Task[str] | None = None  # the newest one, or the one that is under way
        self._asked = 0.0  # when, in seconds on the event loop's clock

    def routes(self) -> list[Route]:
        """List the page's endpoints and files. Each file has a fixed route, so no request's path selects a file."""
        files = [path for path in sorted(PAGE.iterdir()) if path.suffix in MEDIA_TYPES]
        return [
            Route("/", _file(PAGE / "index.html")),
            *(Route(f"/page/{path.name}", _file(path)) for path in files),
            *(
                Route(f"/lesson/{name}{edition}", _file(ROOT / f"{name}{edition}"))
                for name in LESSONS
                for edition in (".md", ".zh-CN.md")
            ),
            Route("/live/events", self._api.guarded(self.events), methods=["GET"]),
            Route("/live/control", self._api.post(self.control), methods=["POST"]),
        ]

    async def events(self, request: HttpRequest) -> PictureStream:
        """`GET /live/events`: pictures of the engine at every change, as server-sent events.

        With `?request=7` the block table of that request is sent as well, in separate events.
        """
        await self._api.read_body(request)  # it is empty, but has to be read before the connection's end
        chosen = request.query_params.get("request")
        if chosen is not None and not (chosen.isascii() and chosen.isdigit() and len(chosen) < 16):
            raise RequestError(f"request must be the number of a request, got {shown(chosen)}", param="request")
        return PictureStream(self, None if chosen is None else int(chosen))

    async def control(self, body: object) -> Response:
        """`POST /live/control`: `{"action": "pause"}`, `"resume"`, or `"step"`, which runs one step while paused."""
        actions = {"pause": self.loop.pause, "resume": self.loop.resume, "step": self.loop.single_step}
        action = check_fields(body, {"action"}).get("action")
        if not isinstance(action, str) or action not in actions:
            raise RequestError(f"action must be one of {', '.join(actions)}, got {shown(action)}", param="action")
        actions[action]()
        return JSONResponse({"action": action})

    async def picture(self) -> str:
        """Describe the engine between two steps, as JSON; pages that ask within `PICTURE_SECONDS` share the picture."""
        now = asyncio.get_running_loop().time()
        if self._picture is None or (self._picture.done() and now - self._asked >= PICTURE_SECONDS):
            self._asked = now
            self._picture = asyncio.ensure_future(self._draw())
        return await asyncio.shield(self._picture)  # one page that goes must not take the others' picture along

    async def table(self, request_id: int) -> str:
        """Describe the block table of one request, as JSON; an empty one if the request does not run."""
        described = self.loop.call(partial(describe_table, request_id=request_id))
        return as_json(await asyncio.wrap_future(described))

    async def _draw(self) -> str:
        described = await asyncio.wrap_future(self.loop.call(describe))
        head = {"model": self._api.model, "engine": self._api.llm.engine_name, "paused": self.loop.paused}
        return as_json(head | self.failure() | described)

    @property
    def silence(self) -> float:
        """For how many seconds the engine has owed an answer."""
        return self._api.llm.silence

    def failure(self) -> dict[str, str]:
        """Return the error that ended the last step or the engine's process; "" if there is none."""
        return {"failure": one_line(self.loop.failure) if self.loop.failure else ""}


class PictureStream:
    """The response that sends pictures to one page, until the page or the engine is closed.

    Args:
        view: makes the pictures.
        chosen: the request whose block table the page also shows.
    """

    def __init__(self, view: LiveView, chosen: int | None = None) -> None:
        self._view = view
        self._chosen = chosen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone, OSError):  # the page was closed
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send(START)
        sent: list[str] = []
        with suppress(EngineClosed):
            while not self._view.loop.closed:
                try:
                    async with asyncio.timeout(SILENT_SECONDS):
                        events = [await self._view.picture()]
                        if self._chosen is not None:
                            events.append(await self._view.table(self._chosen))
                except TimeoutError:  # a step takes long, or the engine's process is stopped
                    events = [as_json({"silent": ceil(max(SILENT_SECONDS, self._view.silence))})]
                for event in events:
                    if event not in sent:
                        await send({"type": "http.response.body", "body": frame(event), "more_body": True})
                sent = events
                await asyncio.sleep(PICTURE_SECONDS)
        last = frame(as_json(self._view.failure()))  # the only event without a picture: why there are no more
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _file(path: Path) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Make an endpoint for a file, which is read when the server starts."""
    content, media_type = path.read_bytes(), MEDIA_TYPES[path.suffix]

    async def endpoint(request: HttpRequest) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return endpoint
