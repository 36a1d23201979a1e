"""The page of a model: its files, its facts and its answers, for a swarm and for `demo`.

The files are package data, a few dozen kilobytes in total, and are served unchanged. This module
imports no torch, so the page of `layershuffle demo` is served before its models are loaded;
requests that need them wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import metadata
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from layershuffle.bundled import asset
from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.server.admission import Admission
from layershuffle.swarm.server.errors import answer_to
from layershuffle.swarm.server.limits import GatewayLimits

if TYPE_CHECKING:
    from layershuffle.swarm.server.workbench import Workbench

KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
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


def documentation() -> str:
    """The address of the documentation, as pyproject.toml has it."""
    urls = metadata("layershuffle").get_all("Project-URL", [])
    address: str = dict(url.split(", ", 1) for url in urls)["Documentation"]
    return address


class PageFacts(BaseModel):
    """The facts that the page loads first.

    `width` and `height` of the model's images in pixels; `pairs`: whether there are test pictures,
    by default the pairs of digits of this package; `models`: the names of the models that answer in
    this process, by role; `docs`: where the documentation is; `swarm`: the name of the model whose
    hosts answer at /v1/classify, "" without a swarm.
    """

    depth: int
    width: int
    height: int
    pairs: bool
    models: Mapping[str, str]
    docs: str = Field(default_factory=documentation)
    swarm: str = ""


def page_routes(
    *,
    facts: Callable[[], Awaitable[PageFacts]],
    workbench: Callable[[], Awaitable[Workbench]],
    admission: Admission,
    admit: Callable[[Request], Awaitable[None]],
    own: Callable[[], Awaitable[Mapping[str, bytes]]] | None = None,
) -> Sequence[Route]:
    """The routes of the page, for any Starlette app. `admit` raises for requests that are refused;
    the page's files need no key, because browsers send none with them. `own`: test pictures in
    place of the packaged ones."""
    # Read once: a requested name is looked up here, and never on the disk.
    files = {path.name: (path.read_bytes(), path.suffix) for path in asset("page").iterdir()}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        content, suffix = files.get(name, (b"", ""))
        if own is not None and name.startswith("pairs."):
            content = (await own()).get(name, content)
        kind = KINDS.get(suffix)
        if kind is None:
            return Response("There is no such file", 404, HEADERS, "text/plain")
        return Response(content, headers={**HEADERS, "Content-Type": kind})

    async def send_facts(request: Request) -> Response:
        await admit(request)
        return JSONResponse((await facts()).model_dump(), headers=HEADERS)

    async def ask(request: Request) -> Response:
        # Any site can send a request here, which would keep the models busy.
        if request.headers.get("sec-fetch-site", "") in ("cross-site", "same-site"):
            return Response("Another site's page sent this request", 403, HEADERS, "text/plain")
        await admit(request)
        bench, order = await workbench(), request.query_params.get("order", "")
        question = bench.answer if request.url.path.endswith("answer") else bench.score
        return JSONResponse(
            await question(request, order=order, admission=admission), headers=HEADERS
        )

    return [
        Route("/", file),
        Route("/page/facts", send_facts),
        Route("/page/answer", ask, methods=["POST"]),
        Route("/page/score", ask, methods=["POST"]),
        Route("/page/{name}", file),
    ]


def demo_app(loading: Awaitable[Workbench], *, limits: GatewayLimits | None = None) -> Starlette:
    """The app of the page for models in this process; they may not be loaded yet."""
    admission = Admission(limits or GatewayLimits(), clock=time.monotonic)

    async def workbench() -> Workbench:
        # Shielded, because a visitor who leaves must not end the loading for all others.
        return await asyncio.shield(loading)

    async def facts() -> PageFacts:
        return facts_of(await workbench())

    async def admit(request: Request) -> None:
        admission.admit(request)

    async def own() -> Mapping[str, bytes]:
        return (await workbench()).files()

    app = Starlette(
        routes=page_routes(
            facts=facts, workbench=workbench, admission=admission, admit=admit, own=own
        ),
        exception_handlers={LayerShuffleError: _answer_error, ClientDisconnect: _answer_error},
    )
    app.state.keys = ()
    return app


def facts_of(bench: Workbench, *, swarm: str = "") -> PageFacts:
    """The page's facts on the models of a workbench."""
    return PageFacts(
        depth=bench.depth,
        width=bench.view.width,
        height=bench.view.height,
        pairs=bench.pictures is not None,
        models=bench.names,
        swarm=swarm,
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    del request
    answer = answer_to(error)
    answer.headers.update(HEADERS)
    return answer
