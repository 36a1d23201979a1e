"""The pages of a gateway: that of its swarm, and that of a tab that is a host.

They are files of this package, a few dozen kilobytes in total, that are served unchanged and ask
the API of the gateway. No model runs in its process for them, and torch is not imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from http import HTTPStatus
from mimetypes import MimeTypes
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from layershuffle.ground.bundled import asset
from layershuffle.ground.extras import install_line, installed
from layershuffle.images.view import ImageView

if TYPE_CHECKING:
    from layershuffle.gateway.http.requests import Gateway

PAIR = (1, 12, 20)
"""Channels, height and width of the packaged test pairs, as in data/digits.py, which imports
scikit-learn."""
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
# Of the demo's page, for the page of a swarm.
_SHARED = (
    "card.js", "dom.js", "icon.svg", "page.css", "pairs.json", "pairs.png", "picture.js",
)  # fmt: skip
_MISSING = """A tab cannot be a host here: this gateway lacks ONNX Runtime for browsers. Type:

    {}
"""
# The build of an editable package brings no files.
_BRING = "python browser/hatch_build.py"


def file_routes(page: str, prefix: str, *, paths: Iterable[Path], policy: str = "") -> list[Route]:
    """The routes of files at `prefix`/NAME, and of index.html at the address `page`.

    `policy`: what the Content-Security-Policy allows in addition to that of `HEADERS`.
    """
    # Read once: a requested name is looked up here, and never on the disk.
    files: dict[str, bytes] = {}
    tags: dict[str, str] = {}
    for path in paths:
        content = path.read_bytes()
        files[path.name] = content
        tags[path.name] = f'"{hashlib.sha256(content).hexdigest()}"'
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

    return [Route(page, file), Route(f"{prefix}/{{name}}", file)]


# --- the page of a swarm --------------------------------------------------------------------------


def page_routes(gateway: Gateway) -> list[Route]:
    """The routes of the page of a swarm: its files, and what it must know before it can draw.

    All else it asks of the API, so it can show nothing that the gateway does not know. The files
    need no key, because browsers send none with them.
    """
    view = gateway.remote_model.model.manifest.file_view
    facts = {
        "width": view.width,
        "height": view.height,
        "pairs": takes_pairs(view, gateway.labels),
    }

    async def send_facts(request: Request) -> Response:
        del request
        return JSONResponse(facts, headers=HEADERS)

    shared = [asset("page", name) for name in _SHARED]
    paths = [*asset("swarm").iterdir(), *shared]
    return [Route("/page/facts", send_facts), *file_routes("/", "/page", paths=paths)]


# --- the page of a tab that is a host -------------------------------------------------------------


def runtime() -> Path | None:
    """The directory of ONNX Runtime for browsers, `None` if it is not installed."""
    if not installed("layershuffle_browser"):
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
        line = _BRING if installed("layershuffle_browser") else install_line("browser")
        text = _MISSING.format(line)
        return [Route("/join", PlainTextResponse(text, HTTPStatus.NOT_IMPLEMENTED, HEADERS))]
    paths = [*asset("join").iterdir(), asset("page", "page.css"), asset("page", "icon.svg")]
    # The worker compiles WebAssembly, which is no eval of scripts.
    policy = "; script-src 'self' 'wasm-unsafe-eval'"
    return file_routes("/join", "/join", paths=[*paths, *place.iterdir()], policy=policy)


def join_address(gateway: str, *, token: str) -> str:
    """The address of the page that makes a tab a host, at the address `gateway`.

    The token stands behind the #, which no request carries.
    """
    return f"{gateway.rstrip('/')}/join#{quote(token, safe='')}"


def takes_pairs(view: ImageView, names: Sequence[str]) -> bool:
    """Whether the packaged test pairs fit the image size and the class names of a model."""
    return (view.channels, view.height, view.width) == PAIR and set(pair_names()) <= set(names)


@cache
def pair_names() -> tuple[str, ...]:
    """The class names of the packaged test pairs."""
    return tuple(json.loads(asset("page", "pairs.json").read_text(encoding="utf-8")))
