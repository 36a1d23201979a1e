"""The HTTP routes of a swarm, its API keys, and the one handler that turns errors into answers.

POST /v1/classify   an image in, its classes and the route out
GET  /v1/swarm      hosts, blocks, latencies, counters
GET  /livez         200 while the gateway answers at all
GET  /readyz        200 while answers are accurate enough
GET  /healthz       200 while any block can be run, and what is wrong
GET  /metrics       for Prometheus
GET  /              the page, unless it is switched off
POST /operator/...  commands of the operator (`admin`)
GET  /openapi.json  the description of this API
/v1/host, /v1/files/...  hosts dial in (`members`)
GET  /join          a browser tab becomes one of them (`join`)
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from layershuffle._version import __version__
from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.calibration import Calibration
from layershuffle.swarm.remote_model import RemoteModel
from layershuffle.swarm.server import schemas
from layershuffle.swarm.server.errors import LOG, HTTPError, answer_to, busy, status_of
from layershuffle.swarm.server.images import takes_pairs
from layershuffle.swarm.server.keys import Keys, Rate, key_in
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.metrics import CONTENT_TYPE, Metrics
from layershuffle.swarm.server.page import PageFacts, facts_of, page_routes
from layershuffle.swarm.server.requests import BODY_SCHEMA, Options, wrong_options
from layershuffle.swarm.server.scheduler import RequestScheduler
from layershuffle.swarm.server.schemas import Classification, ErrorAnswer, Health, SwarmAnswer
from layershuffle.swarm.server.upkeep import Upkeep
from layershuffle.swarm.state import retry_after

if TYPE_CHECKING:
    from layershuffle.swarm.coordinator import Coordinator
    from layershuffle.swarm.server.workbench import Workbench

_Admit = Callable[[Request], Awaitable[None]]
_CLASSIFY = "/v1/classify"
_LOGGED = 0.1, 10  # requests without an answer in the log, a second, and at once
_REFUSALS = {
    401: "The API key is missing or wrong.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is a form, or compressed.",
    422: "An option or the image is wrong.",
    429: "Too many requests; see Retry-After.",
    503: "The deadline passed before there was an answer, too few blocks could be run, or the "
    "pipeline broke; see Retry-After.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in _REFUSALS.items()
}
_GUARDED: dict[int | str, dict[str, Any]] = {status: _ERRORS[status] for status in (401, 429)}
_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "No; `why` has the reasons."}
}


def create_app(
    remote_model: RemoteModel,
    *,
    limits: GatewayLimits | None = None,
    calibration: Calibration | None = None,
    keys: Keys | None = None,
    model: str = "",
    coordinator: Coordinator | None = None,
    upkeep: Upkeep | None = None,
    page: bool = False,
    min_accuracy: float | None = None,
    operate: Callable[[FastAPI, _Admit], None] | None = None,
    hosts: Sequence[BaseRoute] = (),
    decoder_threads: Executor | None = None,
) -> FastAPI:
    """The gateway to `remote_model`, which it closes when the server ends.

    `keys`: the API keys, none for an open gateway; `model`: the model's name in /v1/swarm;
    `coordinator`: that of the hosts, which knows of watch and audits; `upkeep`: of the gateway's
    files; `page`: whether there is a page at /;
    `min_accuracy`: top-1 in percent that must be expected for /readyz; `operate` adds the
    operator's routes, given the check of the rates; `hosts`: the routes of hosts that dial in;
    `decoder_threads`: the executor that decodes images (default: its own threads). Raises
    `UsageError` for a calibration of another model.
    """
    scheduler = RequestScheduler(
        remote_model,
        limits=limits or GatewayLimits(),
        labels=_labels(remote_model, calibration),
        calibration=calibration,
        decoder_threads=decoder_threads,
    )
    metrics = Metrics(scheduler, model=model, coordinator=coordinator, upkeep=upkeep)
    gateway = Gateway(
        scheduler,
        keys=keys or Keys(),
        model=model,
        metrics=metrics,
        min_accuracy=min_accuracy,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await asyncio.to_thread(scheduler.close)  # it may wait for work that needs the loop

    app = FastAPI(
        title="LayerShuffle swarm",
        description="Image classification by a model whose blocks are spread over hosts that may "
        "die at any time. Every answer says which blocks it used.",
        version=__version__,
        # FastAPI's pages load scripts from another origin.
        docs_url=None,
        redoc_url=None,
        # A redirect would contain the Host header, which the client chooses.
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.keys, app.state.gateway = gateway.keys, gateway
    _add_routes(app, gateway)
    if page:
        app.router.routes += _page_of(gateway)
    app.router.routes += hosts
    if operate is not None:
        operate(app, gateway.check_rate)
    app.add_middleware(HeadAsGet)
    # Starlette calls the handler of the most specific class, so all of these need ours.
    for kind in (
        LayerShuffleError, RequestValidationError, HTTPException, ClientDisconnect, Exception,
    ):  # fmt: skip
        app.add_exception_handler(kind, gateway.answer_error)
    return app


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    guarded, errors, refusals = [Depends(gateway.admit)], dict(_ERRORS), dict(_GUARDED)
    if gateway.keys:
        # For the OpenAPI description: `admit` reads the headers itself.
        guarded += [
            Depends(HTTPBearer(auto_error=False)),
            Depends(APIKeyHeader(name="X-API-Key", auto_error=False)),
        ]
    else:
        del errors[401], refusals[401]

    @app.post(
        _CLASSIFY,
        dependencies=guarded,
        responses=errors,
        response_model=Classification,
        openapi_extra={"requestBody": BODY_SCHEMA},
        summary="Classify an image",
    )
    async def classify(request: Request, options: Annotated[Options, Query()]) -> Response:
        gateway.charge(request)
        answer = await gateway.scheduler.classify(request, options)
        gateway.metrics.count_answer(answer)
        # As a response, or FastAPI would validate it once more.
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.get(
        "/v1/swarm", dependencies=guarded, responses=refusals, summary="The hosts, as they are now"
    )
    async def swarm() -> SwarmAnswer:
        return gateway.swarm()

    # Without a key: load balancers and service managers have none.
    @app.get("/livez", summary="Whether the gateway runs")
    async def livez() -> dict[str, bool]:
        return {"ok": True}

    @app.get("/readyz", responses=_UNHEALTHY, summary="Whether answers are accurate enough")
    async def readyz(response: Response) -> Health:
        return _with_status(gateway.readiness(), response)

    @app.get("/healthz", responses=_UNHEALTHY, summary="Whether requests can be answered")
    async def healthz(response: Response) -> Health:
        return _with_status(gateway.metrics.health(), response)

    @app.get(
        "/metrics",
        dependencies=guarded,
        responses=refusals,
        response_class=Response,
        summary="Counters for Prometheus",
    )
    async def metrics() -> Response:
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE)


def _with_status(health: Health, response: Response) -> Health:
    if not health.ok:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return health


def _page_of(gateway: Gateway) -> Sequence[BaseRoute]:
    """The routes of the page, whose models are loaded for the first visitor."""
    scheduler, loaded = gateway.scheduler, dict[str, asyncio.Future[Any]]()
    manifest = scheduler.remote_model.model.manifest
    view = manifest.file_view

    async def workbench() -> Workbench:
        if gateway.model not in loaded:  # at first, and after a roll
            # It imports torch, which the gateway itself does without.
            from layershuffle.swarm.server.workbench import workbench_of

            loading = asyncio.to_thread(
                workbench_of, gateway.model, calibration=scheduler.calibration
            )
            loaded.clear()
            loaded[gateway.model] = asyncio.ensure_future(loading)
        bench: Workbench = await asyncio.shield(loaded[gateway.model])
        return bench

    async def facts() -> PageFacts:
        # A model of other images answers through its hosts alone: it may be large.
        if takes_pairs(view, manifest.class_names or ()):
            return facts_of(await workbench(), swarm=gateway.model)
        depth = scheduler.remote_model.depth
        return PageFacts(
            depth=depth,
            width=view.width,
            height=view.height,
            pairs=False,
            models={},
            swarm=gateway.model,
        )

    return page_routes(
        facts=facts, workbench=workbench, admission=scheduler.admission, admit=gateway.admit
    )


class Gateway:
    """State that the routes share."""

    def __init__(
        self,
        scheduler: RequestScheduler,
        *,
        keys: Keys,
        model: str,
        metrics: Metrics,
        min_accuracy: float | None,
    ) -> None:
        self.min_accuracy = min_accuracy
        self.scheduler, self.keys, self.model, self.metrics = scheduler, keys, model, metrics
        self.router = scheduler.remote_model.router
        self._logged = Rate(*_LOGGED)

    async def check_rate(self, request: Request) -> None:
        """Count a request against the rate of its client. Raises `HTTPError` (429)."""
        self.scheduler.admission.admit(request)

    async def admit(self, request: Request) -> None:
        """Check a request. Raises `HTTPError`: 429 (checked first) or 401."""
        # Rates are checked before keys, so that guessing keys is slow too.
        await self.check_rate(request)
        if not self.keys.accept(_key_of(request)):
            raise HTTPError(
                HTTPStatus.UNAUTHORIZED,
                "The API key is missing or wrong",
                hint="send it as Authorization: Bearer KEY, or as X-API-Key: KEY",
            )

    def charge(self, request: Request) -> None:
        """Count a request against the quota of its key. Raises `HTTPError` (429)."""
        if wait := self.keys.wait(_key_of(request), now=self.scheduler.admission.clock()):
            raise busy("The quota of your API key is used up", wait=wait)

    def readiness(self) -> Health:
        """The health; it is not ok if the accuracy to expect now is below `min_accuracy`."""
        health = self.metrics.health()
        if self.min_accuracy is None or not health.ok:
            return health
        expected, why = self.scheduler.expected_now()
        if expected is not None and expected.top1 >= self.min_accuracy:
            return health
        low = f"{expected.top1:.1f} % are expected" if expected else f"unknown ({why})"
        reason = f"the accuracy of answers is below {self.min_accuracy:g} %: {low}"
        whys = [health.why, reason] if health.why else [reason]
        return health.model_copy(update={"ok": False, "why": "; ".join(whys)})

    def swarm(self) -> SwarmAnswer:
        """The answer of /v1/swarm."""
        router, calibration = self.router, self.scheduler.calibration
        expected, why = self.scheduler.expected_now()
        return SwarmAnswer(
            model=self.model,
            depth=router.depth,
            classes=len(self.scheduler.labels),
            routing=router.routing,
            wire=router.wire,
            unreachable_blocks=schemas.unreachable(router.swarm, depth=router.depth),
            hosts=schemas.hosts_of(router.swarm, visits=self.metrics.visits(), now=router.clock()),
            counters=dict(self.metrics.requests),
            audits=self.metrics.audits(),
            calibration=None if calibration is None else calibration.facts,
            expected=expected,
            expected_why=why,
            limits=router.limits,
        )

    async def answer_error(self, request: Request, error: Exception) -> Response:
        """Count the refusal, and return `errors.answer_to(error)`."""
        if isinstance(error, HTTPException | ClientDisconnect):
            return answer_to(error)
        if isinstance(error, RequestValidationError):
            error = wrong_options(error)
        status, wait, reference = status_of(error), None, None
        # Not request.url: it contains the Host header, which the client chooses.
        if request.scope["path"] == _CLASSIFY and request.method == "POST":
            self.metrics.count_refusal(status)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            now, reference = self.router.clock(), uuid.uuid4().hex
            wait = retry_after(self.router.swarm, now=now)
            # A night without hosts must not fill the disk.
            if not self._logged.wait(now):
                text = "Request %s was not answered: %s"
                why = schemas.encodable(str(error))
                LOG.warning(text, reference, why, extra={"request": reference})
        return answer_to(error, wait=wait, reference=reference)


class HeadAsGet:
    """Answers HEAD as GET; the server drops the body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # the server keeps its own
        await self._app(scope, receive, send)


def _key_of(request: Request) -> bytes | None:
    return key_in(request.headers.get("authorization"), request.headers.get("x-api-key"))


def _labels(remote_model: RemoteModel, calibration: Calibration | None) -> tuple[str, ...]:
    """The names of the classes: those of the model, else those of the calibration, else numbers."""
    if calibration is not None and len(calibration.queue) != remote_model.depth:
        raise UsageError(
            f"The calibration has {len(calibration.queue)} blocks, but the model has "
            f"{remote_model.depth}",
            hint="layershuffle swarm calibrate MODEL --data SPEC",
        )
    of_calibration = None if calibration is None else calibration.classes
    manifest = remote_model.model.manifest
    return tuple(manifest.class_names or of_calibration or map(str, range(manifest.classes)))
