"""The live page at `/`: a chat box, and beside it the engine at work.

    engine's thread or process           event loop                                 browser
    step -> StepLog
    between two steps: describe() -----> one picture for all pages, as an event --> page/engine.js draws it
    pause, resume, single step <-------- POST /live/control <---------------------- buttons

Every picture is complete in itself. A page that falls behind misses some and has nothing to catch up on. Nothing is
sent while nothing changes, and nothing is described while no page is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
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
from beyond.serving.step_log import describe, watch
from stage_a_naive.contract.errors import shown

PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {".svg": "image/svg+xml", ".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The browser loads nothing from elsewhere, runs no script but the page's own, and shows it in no other site's frame.
HEADERS = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'", "Cache-Control": "no-cache"}
PICTURE_SECONDS = 0.05


class LiveView:
    """The page, the pictures that it draws, and its buttons.

    Args:
        api: the endpoints beside it, whose key guards the pictures and the buttons too.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self.loop = api.llm.engine_loop
        self.loop.call(watch)
        self._picture: asyncio.Task[str] | None = None  # the newest one, or the one that is under way
        self._asked = 0.0  # when, in seconds on the event loop's clock

    def routes(self) -> list[Route]:
        """List the page's files, a fixed route each, so that no request's path leads to a file; and its endpoints."""
        files = [path for path in sorted(PAGE.iterdir()) if path.suffix in MEDIA_TYPES]
        return [
            Route("/", _file(PAGE / "index.html")),
            *(Route(f"/page/{path.name}", _file(path)) for path in files),
            Route("/live/events", self._api.guarded(self.events), methods=["GET"]),
            Route("/live/control", self._api.post(self.control), methods=["POST"]),
        ]

    async def events(self, request: HttpRequest) -> PictureStream:
        """`GET /live/events`: a picture of the engine whenever something has changed, as server-sent events."""
        await self._api.read_body(request)  # it is empty, but has to be read before the connection's end
        return PictureStream(self)

    async def control(self, body: object) -> Response:
        """`POST /live/control`: `{"action": "pause"}`, `"resume"`, or `"step"`, which runs one step although paused."""
        actions = {"pause": self.loop.pause, "resume": self.loop.resume, "step": self.loop.single_step}
        action = check_fields(body, {"action"}).get("action")
        if not isinstance(action, str) or action not in actions:
            raise RequestError(f"action must be one of {', '.join(actions)}, got {shown(action)}", param="action")
        actions[action]()
        return JSONResponse({"action": action})

    async def picture(self) -> str:
        """Describe the engine between two steps, as JSON; pages that ask within `PICTURE_SECONDS` get the same one."""
        now = asyncio.get_running_loop().time()
        if self._picture is None or (self._picture.done() and now - self._asked >= PICTURE_SECONDS):
            self._asked = now
            self._picture = asyncio.ensure_future(self._draw())
        return await asyncio.shield(self._picture)  # one page that goes must not take the others' picture along

    async def _draw(self) -> str:
        described = await asyncio.wrap_future(self.loop.call(describe))
        head = {"model": self._api.model, "engine": self._api.llm.engine_name, "paused": self.loop.paused}
        return as_json(head | described)


class PictureStream:
    """The response with pictures for one page, until it is closed or the engine is."""

    def __init__(self, view: LiveView) -> None:
        self._view = view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone, OSError):  # the page was closed
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send(START)
        sent = ""
        with suppress(EngineClosed):
            while not self._view.loop.closed:
                picture = await self._view.picture()
                if picture != sent:
                    await send({"type": "http.response.body", "body": frame(picture), "more_body": True})
                    sent = picture
                await asyncio.sleep(PICTURE_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _file(path: Path) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Make an endpoint that answers with a file, which is read when the server starts."""
    content, media_type = path.read_bytes(), MEDIA_TYPES[path.suffix]

    async def endpoint(request: HttpRequest) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return endpoint
