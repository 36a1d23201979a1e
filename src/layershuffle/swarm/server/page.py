"""The pages of this package: that of a model, for a swarm and for `demo`, and that of a tab that is
a host.

The files are package data, a few dozen kilobytes in total, and are served unchanged. This module
imports no torch, so the page of `layershuffle demo` is served before its models are loaded;
requests that need them wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache, partial
from http import HTTPStatus
from importlib.util import find_spec
from mimetypes import MimeTypes
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from layershuffle.ground.bundled import asset, packaged_file
from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.ground.extras import install_line
from layershuffle.swarm.server.admission import Admission, GatewayLimits, answer_plainly
from layershuffle.swarm.server.images import takes_pairs

if TYPE_CHECKING:
    from layershuffle.swarm.server.gateway import Gateway
    from layershuffle.swarm.server.workbench import Workbench

HEADERS = {
    # Nothing is loaded from elsewhere, no script is inline, and no other page may frame it.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # No other site may embed it as a script or a picture.
    "Cross-Origin-Resource-Policy": "same-origin",
    # It shares a process with no other site, so its clocks are fine enough to time a block.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    # Revalidated every time: another version of this package may answer at the same address.
    "Cache-Control": "no-cache",
}
_KINDS = MimeTypes()  # of the standard library's own table, whatever this machine's says
_SECONDS = 10.0  # that an answer for the page may take
_MISSING = f"""A tab cannot be a host here: this gateway lacks ONNX Runtime for browsers. Type:

    {install_line("browser")}
"""


def file_routes(page: str, below: str, *, paths: Iterable[Path], policy: str = "") -> list[Route]:
    """The routes of these files `below` an address, and of index.html at that of the `page`.

    `policy`: what is allowed beside `HEADERS`.
    """
    # Read once: a requested name is looked up here, and never on the disk.
    files = {path.name: path.read_bytes() for path in paths}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()}"' for name, content in files.items()}
    always = {**HEADERS}
    always["Content-Security-Policy"] += policy

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        stored = f"{name}.gz" if f"{name}.gz" in files else name
        if stored not in files:
            return PlainTextResponse("There is no such file", HTTPStatus.NOT_FOUND, always)
        headers = {**always, "ETag": tags[stored]}
        if request.headers.get("if-none-match") == tags[stored]:
            return Response(None, HTTPStatus.NOT_MODIFIED, headers)
        if stored != name:
            headers["Content-Encoding"] = "gzip"  # every browser that has WebAssembly takes it
        return Response(files[stored], headers=headers, media_type=_KINDS.guess_type(name)[0])

    return [Route(page, file), Route(f"{below}/{{name}}", file)]


# --- the page of a model --------------------------------------------------------------------------


def page_routes(
    facts: Callable[[], Awaitable[dict[str, Any]]],
    workbench: Callable[[], Awaitable[Workbench]],
    *,
    admission: Admission,
    admit: Callable[[Request], Awaitable[None]],
) -> list[Route]:
    """The routes of the page, for any Starlette app. `facts`: what it loads first: depth, width and
    height of the images, whether there are test pictures (`pairs`), the models of this process by
    role, and the name of the model whose hosts answer at /v1/classify (`swarm`).

    `admit` raises for requests that are refused; the page's files need no key, because browsers
    send none with them.
    """

    async def send_facts(request: Request) -> Response:
        await admit(request)
        return JSONResponse(await facts(), headers=HEADERS)

    async def pictures(request: Request) -> Response:
        await admit(request)
        sheet, names = (await workbench()).sheet
        if request.url.path.endswith("png"):
            return Response(sheet, headers=HEADERS, media_type="image/png")
        return JSONResponse(names, headers=HEADERS)

    async def ask(request: Request) -> Response:
        # Any site can send a request here, which would keep the models busy.
        if request.headers.get("sec-fetch-site", "") in ("cross-site", "same-site"):
            return PlainTextResponse("Another site's page sent this request", 403, HEADERS)
        await admit(request)
        bench = await workbench()
        order = bench.order(request.query_params.get("order", ""))
        question = bench.answers if request.url.path.endswith("answer") else bench.scores
        # Among the requests of the API, and bounded like them.
        async with admission.carried(request) as (client, body):
            answer = await admission.compute(
                client,
                partial(question, order, body),
                pool=bench.pool,
                deadline=admission.clock() + _SECONDS,
                event="the models had answered",
            )
        return JSONResponse({"order": str(order), **answer}, headers=HEADERS)

    paths = [path for path in asset("page").iterdir() if not path.name.startswith("pairs.")]
    return [
        Route("/page/facts", send_facts),
        Route("/page/pairs.png", pictures),
        Route("/page/pairs.json", pictures),
        Route("/page/answer", ask, methods=["POST"]),
        Route("/page/score", ask, methods=["POST"]),
        *file_routes("/", "/page", paths=paths),
    ]


def page_of(gateway: Gateway) -> list[Route]:
    """The routes of the page of a gateway, whose models are loaded for the first visitor."""
    manifest = gateway.remote_model.model.manifest
    view, here = manifest.file_view, takes_pairs(manifest.file_view, manifest.class_names or ())

    @lru_cache(1)  # after a roll another one
    def loading(model: str) -> asyncio.Future[Workbench]:
        def forget_failure(done: asyncio.Future[Workbench]) -> None:
            if done.cancelled() or done.exception():
                loading.cache_clear()

        def load() -> Workbench:
            # In the thread: it imports torch, which takes seconds, and the gateway does without it.
            from layershuffle.models import read_record
            from layershuffle.swarm.server.workbench import ORDINARY, workbench_of

            ordinary = read_record(packaged_file(Path(ORDINARY)))
            same = ordinary["depth"] == gateway.router.depth
            return workbench_of(model, beside=ORDINARY if same else None)

        future = asyncio.ensure_future(asyncio.to_thread(load))
        future.add_done_callback(forget_failure)
        return future

    async def workbench() -> Workbench:
        if not here:  # it may be large
            raise UsageError("This model answers through its hosts alone", hint="/v1/classify")
        # Shielded, because a visitor who leaves must not end the loading for all others.
        return await asyncio.shield(loading(gateway.model))

    async def facts() -> dict[str, Any]:
        if here:
            return {**(await workbench()).facts(), "swarm": gateway.model}
        size = {"depth": gateway.router.depth, "width": view.width, "height": view.height}
        return {**size, "pairs": False, "models": {}, "swarm": gateway.model}

    return page_routes(facts, workbench, admission=gateway.admission, admit=gateway.admit)


def demo_app(loading: Awaitable[Workbench], *, limits: GatewayLimits | None = None) -> Starlette:
    """The app of the page for models in this process; they may not be loaded yet."""
    admission = Admission(limits or GatewayLimits(), clock=time.monotonic)

    async def workbench() -> Workbench:
        return await asyncio.shield(loading)

    async def facts() -> dict[str, Any]:
        return (await workbench()).facts()

    return Starlette(
        routes=page_routes(facts, workbench, admission=admission, admit=admission.admit),
        exception_handlers={LayerShuffleError: answer_plainly, ClientDisconnect: answer_plainly},
    )


# --- the page of a tab that is a host -------------------------------------------------------------


def runtime() -> Path | None:
    """The directory of ONNX Runtime for browsers, `None` if it is not installed."""
    if find_spec("layershuffle_browser") is None:
        return None
    from layershuffle_browser import RUNTIME

    return RUNTIME if RUNTIME.is_dir() else None


def join_routes(place: Path | None) -> list[Route]:
    """The routes of the page that makes a browser tab a host, by the protocol of all hosts.

    ONNX Runtime for browsers comes from the extra `browser`, in the directory `place`, and is
    served from here, so that a tab asks no other origin for anything. Without one the page says
    what to install.
    """
    if place is None:
        return [Route("/join", PlainTextResponse(_MISSING, HTTPStatus.NOT_IMPLEMENTED, HEADERS))]
    paths = [*asset("join").iterdir(), asset("page", "page.css"), asset("page", "icon.svg")]
    # The worker compiles WebAssembly, which is no eval of scripts.
    policy = "; script-src 'self' 'wasm-unsafe-eval'"
    return file_routes("/join", "/join", paths=[*paths, *place.iterdir()], policy=policy)


def join_address(gateway: str, *, token: str) -> str:
    """The address of that page at the gateway's. The token stands behind the #, which no request
    carries."""
    return f"{gateway.rstrip('/')}/join#{quote(token, safe='')}"


def qr_code(address: str) -> dict[str, str]:
    """The address, and its QR code as an SVG of one path."""
    import segno

    code = segno.make(address, micro=False).svg_inline(omitsize=True, light="#fff")
    return {"address": address, "svg": code}
