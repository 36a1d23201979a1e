"""The page of a model: its files, its facts, and its routes.

The files are package data, a few dozen kilobytes in total, and are served unchanged. This module
imports no torch, so the page is served before the models are loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from layershuffle.bundled import asset

_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Nothing is loaded from elsewhere, no script is inline, and no other page may frame it.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # No other site may embed it as a script or a picture.
    "Cross-Origin-Resource-Policy": "same-origin",
    # Revalidated every time: another version of this package may answer at the same address.
    "Cache-Control": "no-cache",
}
FOREIGN = "Another site's page sent this request"


class PageFacts(BaseModel):
    """The facts that the page loads first.

    `width` and `height` of the model's images in pixels; `pairs`: whether the test pairs of this
    package are images of it; `inside`: the models that answer in this process, by role; `models`:
    the name of each role's model; `swarm`: whether hosts answer at /v1/classify; `token`: permits
    requests that break hosts, "" where they are not allowed; `links`: text and address.
    """

    depth: int
    width: int
    height: int
    pairs: bool
    inside: Sequence[str]
    models: dict[str, str]
    swarm: bool = False
    token: str = ""
    links: Sequence[tuple[str, str]] = ()


class Answering(Protocol):
    """The methods of `workbench.Workbench` that the page uses."""

    async def answer(self, request: Request) -> dict[str, object]:
        """Every model's answer to the image and the order in the form of the request."""

    async def score(self, request: Request) -> dict[str, object]:
        """How many test pairs every model classifies correctly in the order of the form."""


def page_routes(
    *,
    facts: Callable[[Request], Awaitable[PageFacts]],
    answering: Callable[[], Awaitable[Answering]],
    admit: Callable[[Request], Awaitable[None]],
) -> Sequence[Route]:
    """The routes of the page, for any Starlette app. `admit` raises for requests that are refused;
    the page's files need no key, because browsers send none with them."""
    # Read once: a requested name is looked up here, and never on the disk.
    files = {path.name: (path.read_bytes(), path.suffix) for path in asset("page").iterdir()}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        content, suffix = files.get(name, (b"", ""))
        kind = _KINDS.get(suffix)
        if kind is None:
            return Response("There is no such file", 404, HEADERS, "text/plain")
        return Response(content, headers={**HEADERS, "Content-Type": kind})

    async def send_facts(request: Request) -> Response:
        await admit(request)
        return JSONResponse((await facts(request)).model_dump(), headers=HEADERS)

    async def answer(request: Request) -> Response:
        if is_foreign(request):
            return Response(FOREIGN, 403, HEADERS, "text/plain")
        await admit(request)
        return JSONResponse(await (await answering()).answer(request), headers=HEADERS)

    async def score(request: Request) -> Response:
        if is_foreign(request):
            return Response(FOREIGN, 403, HEADERS, "text/plain")
        await admit(request)
        return JSONResponse(await (await answering()).score(request), headers=HEADERS)

    return [
        Route("/", file),
        Route("/page/facts", send_facts),
        Route("/page/answer", answer, methods=["POST"]),
        Route("/page/score", score, methods=["POST"]),
        Route("/page/{name}", file),
    ]


def is_foreign(request: Request) -> bool:
    """Whether a page of another site makes this request, according to the browser.

    Any site can send a form here, which would keep the models busy.
    """
    return request.headers.get("sec-fetch-site", "") in ("cross-site", "same-site")
