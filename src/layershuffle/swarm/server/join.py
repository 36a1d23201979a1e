"""`/join`: a page that makes a browser tab a host, by the protocol of all hosts.

The token stands behind the # of the page's address, which no request carries. ONNX Runtime for
browsers comes from the extra `browser`, and is served from here, so that a tab asks no other origin
for anything.
"""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from layershuffle.bundled import asset
from layershuffle.swarm.server.page import HEADERS, KINDS

_POLICY = "Content-Security-Policy"
# The worker compiles WebAssembly, which is no eval of scripts.
_HEADERS = {**HEADERS, _POLICY: f"{HEADERS[_POLICY]}; script-src 'self' 'wasm-unsafe-eval'"}
_MISSING = """A tab cannot be a host here: this gateway lacks ONNX Runtime for browsers. Install it:

    pip install 'layershuffle[browser]'
"""


def runtime() -> Path | None:
    """The directory of ONNX Runtime for browsers, `None` if it is not installed."""
    if find_spec("layershuffle_browser") is None:
        return None
    from layershuffle_browser import RUNTIME

    return RUNTIME if RUNTIME.is_dir() else None


def join_address(gateway: str, *, token: str) -> str:
    """The address of the page at the gateway's, with the token."""
    return f"{gateway.rstrip('/')}/join#{quote(token, safe='')}"


def qr_code(address: str) -> dict[str, str]:
    """The address, and its QR code as an SVG of one path."""
    import segno

    code = segno.make(address, micro=False).svg_inline(omitsize=True, light="#fff")
    return {"address": address, "svg": code}


def join_routes(place: Path | None) -> list[BaseRoute]:
    """The routes of the page and of its files; `place`: that of `runtime`.

    Without one the page says what to install.
    """
    paths = [*asset("join").iterdir(), asset("page", "page.css"), asset("page", "icon.svg")]
    paths += place.iterdir() if place is not None else []
    # Read once: a requested name is looked up here, and never on the disk.
    files = {path.name: path.read_bytes() for path in paths}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()}"' for name, content in files.items()}

    async def file(request: Request) -> Response:
        if place is None:
            return PlainTextResponse(_MISSING, HTTPStatus.NOT_IMPLEMENTED, _HEADERS)
        name = request.path_params.get("name", "index.html")
        stored = f"{name}.gz" if f"{name}.gz" in files else name
        kind = KINDS.get(Path(name).suffix)
        if stored not in files or kind is None:
            return PlainTextResponse("There is no such file", HTTPStatus.NOT_FOUND, _HEADERS)
        headers = {**_HEADERS, "Content-Type": kind, "ETag": tags[stored]}
        if request.headers.get("if-none-match") == tags[stored]:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        if stored != name:
            headers["Content-Encoding"] = "gzip"  # every browser that has WebAssembly takes it
        return Response(files[stored], headers=headers)

    return [Route("/join", file), Route("/join/{name}", file)]
