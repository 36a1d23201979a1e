"""The page of a gateway: the demo's page, with a live view of the swarm below it.

The operator may let visitors break hosts. Such a request needs a token, which only scripts of the
page's own origin can read, and both of its addresses must be this machine's: pages of other sites
can send requests here but cannot read the answers, and a foreign name that resolves to 127.0.0.1
is refused by the header `Host`.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from urllib.parse import quote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from layershuffle.errors import UsageError
from layershuffle.models import file_view
from layershuffle.swarm.chaos import FaultKind
from layershuffle.swarm.server.errors import HTTPError
from layershuffle.swarm.server.live import Live
from layershuffle.swarm.server.page import HEADERS, PageFacts, is_foreign, page_routes
from layershuffle.swarm.server.requests import read_form
from layershuffle.swarm.server.tls import is_loopback
from layershuffle.swarm.server.workbench import LIMITS, Workbench, takes_pairs, workbench_of

if TYPE_CHECKING:
    from layershuffle.swarm.server.metrics import Metrics
    from layershuffle.swarm.server.scheduler import RequestScheduler

BREAKS: tuple[FaultKind, ...] = ("crash", "freeze", "slow", "rejoin")
assert set(BREAKS) <= set(get_args(FaultKind))
REPORT = "report.html"
_TOKEN_BYTES = 24
# A report is one file that includes its style and pictures, and has no scripts.
_REPORT_HEADERS = {
    **HEADERS,
    # The sandbox gives it an origin of its own, from which it cannot use the gateway.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; sandbox",
}


@dataclass(frozen=True)
class PageOptions:
    """What the page of a gateway offers.

    `break_host` injects a fault into one of the `breakable` hosts, those that this swarm started;
    `None` if visitors may not. `reports`: a directory of studies.
    """

    break_host: Callable[[str, FaultKind], Awaitable[None]] | None = None
    breakable: frozenset[str] = frozenset()
    reports: Path | None = None


class GatewayPage:
    """The routes of the page at one gateway; `admit` raises for requests that are refused."""

    def __init__(
        self,
        options: PageOptions,
        *,
        scheduler: RequestScheduler,
        metrics: Metrics,
        model: str,
        admit: Callable[[Request], Awaitable[None]],
    ) -> None:
        self.options, self.scheduler, self.model, self.admit = options, scheduler, model, admit
        self.live = Live(scheduler.remote_model.router, metrics)
        self.token = "" if options.break_host is None else secrets.token_urlsafe(_TOKEN_BYTES)
        self._workbench: asyncio.Future[Workbench] | None = None

    def add_to(self, app: FastAPI) -> None:
        """Put the page's routes into the gateway's app, beside its API."""
        app.state.ending = self.live.ending
        app.router.routes += [
            Route("/page/live", self._stream),
            Route("/page/break", self._break, methods=["POST"]),
            Route("/reports/", self._report),
            Route("/reports/{name}", self._report),
            *page_routes(facts=self._facts, answering=self._answering, admit=self.admit),
        ]

    async def _facts(self, request: Request) -> PageFacts:
        remote = self.scheduler.remote_model
        view, pairs = file_view(remote.model), takes_pairs(remote.model)
        inside: tuple[str, ...] = ()
        models = {"ours": self.model}
        if pairs:
            workbench = await self._answering()
            inside, models = tuple(workbench.models), workbench.names
        links = [("API", "docs")]
        for name, path in self._reports().items():
            links.append((f"Report: {path.parent.name}", f"reports/{quote(name)}"))
        return PageFacts(
            depth=remote.depth,
            width=view.width,
            height=view.height,
            pairs=pairs,
            inside=inside,
            models=models,
            swarm=True,
            token=self.token if _is_local(request) else "",
            links=links,
        )

    async def _answering(self) -> Workbench:
        # Loaded for the first visitor: a gateway without visitors needs no models.
        if self._workbench is None:
            model, calibration = self.model, self.scheduler.calibration
            loading = asyncio.to_thread(workbench_of, model, calibration=calibration)
            self._workbench = asyncio.ensure_future(loading)
        return await asyncio.shield(self._workbench)

    async def _stream(self, request: Request) -> Response:
        await self.admit(request)
        return await self.live.stream(request)

    async def _break(self, request: Request) -> Response:
        await self.admit(request)
        token = request.headers.get("x-page-token", "").encode()
        # In constant time, as keys are compared.
        allowed = bool(self.token) and hmac.compare_digest(token, self.token.encode())
        allowed = allowed and _is_local(request) and _is_own(request)
        if self.options.break_host is None or not allowed:
            raise HTTPError(
                HTTPStatus.FORBIDDEN,
                "Failures cannot be injected from here",
                hint="start the swarm with `layershuffle swarm up --page-may-break`, on this "
                "machine, and use its own page",
            )
        _, fields = await read_form(request, limits=LIMITS, take=lambda _: None)
        host, kind = fields.get("host", ""), fields.get("kind", "")
        for allowed_kind in BREAKS:
            if kind == allowed_kind and host in self.options.breakable:
                await self.options.break_host(host, allowed_kind)
                return JSONResponse({}, headers=HEADERS)
        # Hosts that joined from elsewhere may be processes of others.
        raise UsageError(
            f"{kind[:20]!r} is not a failure that can be injected into host {host[:80]!r}",
            hint=f"one of {', '.join(BREAKS)}, for {', '.join(sorted(self.options.breakable))}",
        )

    def _reports(self) -> dict[str, Path]:
        """Paths of the reports by the names of their studies, "" for that of the directory itself.

        Searched at every call, because studies end meanwhile.
        """
        if self.options.reports is None:
            return {}
        root = self.options.reports.resolve()
        reports = {}
        for path in (root / REPORT, *sorted(root.glob(f"*/{REPORT}"))):
            name = "" if path.parent == root else path.parent.name
            # A link may lead out of the directory, and unprintable names do not fit into a URL.
            inside = path.is_file() and path.resolve().is_relative_to(root)
            if inside and path.parent.name.isprintable():
                reports[name] = path
        return reports

    async def _report(self, request: Request) -> Response:
        # Looked up among the known names: no path of a client reaches the disk.
        path = self._reports().get(request.path_params.get("name", ""))
        if path is None:
            return Response("There is no such report", 404, HEADERS, "text/plain")
        return FileResponse(path, headers=_REPORT_HEADERS, media_type="text/html; charset=utf-8")


def _is_own(request: Request) -> bool:
    """Whether a request comes from the page itself, or from no page at all.

    Everybody whom a proxy on this machine lets in looks local, but their page has another origin.
    """
    origin = request.headers.get("origin")
    own = f"{request.scope['scheme']}://{request.headers.get('host', '')}"
    return origin in (None, own) and not is_foreign(request)


def _is_local(request: Request) -> bool:
    """Whether a request comes from this machine, and its header `Host` is a loopback address."""
    name = request.headers.get("host", "")
    host = name.partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    return is_loopback(host) and is_loopback(request.client.host if request.client else "")
