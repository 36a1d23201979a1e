"""The HTTP face of a swarm: routes, keys, errors. What is decided is decided elsewhere.

POST /v1/classify   images in, classes and the route out
GET  /v1/swarm      hosts, blocks, latencies, counters
GET  /healthz       200 while any block can be run
GET  /metrics       for Prometheus
GET  /docs          this API, as OpenAPI
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from layershuffle._version import __version__
from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.models import num_classes_of
from layershuffle.swarm.calibration import Calibration
from layershuffle.swarm.remote_model import RemoteModel, class_names
from layershuffle.swarm.server import schemas
from layershuffle.swarm.server.auth import Keys, Rates, key_in
from layershuffle.swarm.server.errors import Refused, body_of, busy, retry_seconds, status_of
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.metrics import CONTENT_TYPE, Metrics
from layershuffle.swarm.server.requests import BODY_SCHEMA
from layershuffle.swarm.server.scheduler import RequestScheduler, Strangers
from layershuffle.swarm.server.schemas import Classification, ErrorAnswer, Health, SwarmAnswer

LOG = logging.getLogger("layershuffle")
_CLASSIFY = "/v1/classify"
_CLIENT_GONE = 499  # nobody reads it
_REFUSALS = {
    400: "The body is broken.",
    401: "The API key is missing or wrong.",
    408: "The body took too long to come in.",
    413: "The body, or the number of images, is too large.",
    415: "The body is neither JSON nor a form.",
    422: "A field or an image is wrong.",
    429: "Too many requests; see Retry-After.",
    503: "The deadline passed before there was an answer, too few blocks could be run, or the "
    "pipeline broke; see Retry-After.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in _REFUSALS.items()
}
_GUARDED: dict[int | str, dict[str, Any]] = {status: _ERRORS[status] for status in (401, 429)}


def create_app(
    front: RemoteModel,
    *,
    limits: GatewayLimits | None = None,
    labels: Sequence[str] | None = None,
    calibration: Calibration | None = None,
    keys: Sequence[str] = (),
    model: str = "",
    strangers: Callable[[], Strangers] = frozenset,
    watching: Callable[[], bool] | None = None,
    audits: Callable[[], tuple[int, int]] | None = None,
) -> FastAPI:
    """The gateway of the swarm that `front` walks; it closes `front` when the server ends.

    `labels` are the names of the classes (default: those that `calibration` or the model knows),
    `keys` the API keys, none for an open gateway, `model` what /v1/swarm calls the model.
    `strangers`: the blocks, with their hosts, of another model than the calibrated one; `watching`:
    whether somebody watches over the hosts; `audits`: visits that were repeated, and those of them
    that differed. Raises `UsageError` for short keys, and for labels or a calibration of another
    model.
    """
    limits = limits or GatewayLimits()
    names = _labels(front, labels=labels, calibration=calibration)
    desk = RequestScheduler(
        front, limits=limits, labels=names, calibration=calibration, strangers=strangers
    )
    metrics = Metrics(front.router, watching=watching, audits=audits)
    gateway = _Gateway(desk, Keys(keys), model, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await asyncio.to_thread(gateway.desk.close)  # its threads may need this loop to end

    app = FastAPI(
        title="LayerShuffle swarm",
        description="Image classification by a model whose blocks are spread over hosts that may "
        "die at any time. Every answer says which blocks it used.",
        version=__version__,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.keyed = bool(gateway.keys)
    _add_routes(app, gateway)
    app.add_exception_handler(LayerShuffleError, gateway.told)
    app.add_exception_handler(HTTPException, _told_plainly)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, gateway.failed)
    return app


def _add_routes(app: FastAPI, gateway: _Gateway) -> None:
    guarded = [Depends(gateway.admit)]

    @app.post(
        _CLASSIFY,
        dependencies=guarded,
        responses=_ERRORS,
        openapi_extra={"requestBody": BODY_SCHEMA},
        summary="Classify one image or several",
    )
    async def classify(request: Request) -> Classification:
        answer = await gateway.desk.classify(request)
        gateway.metrics.answered(answer)
        return answer

    @app.get(
        "/v1/swarm", dependencies=guarded, responses=_GUARDED, summary="The hosts, as they are now"
    )
    async def swarm() -> SwarmAnswer:
        return gateway.swarm()

    @app.get(
        "/healthz",
        responses={503: {"model": Health, "description": "No block can be run."}},
        summary="Whether requests can be answered",
    )
    async def healthz(response: Response) -> Health:
        health = gateway.health()
        if not health.ok:
            response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return health

    @app.get(
        "/metrics",
        dependencies=guarded,
        responses=_GUARDED,
        response_class=Response,
        summary="Counters for Prometheus",
    )
    async def metrics() -> Response:
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE)


_Bearer = Annotated[Any, Depends(HTTPBearer(auto_error=False))]
_Header = Annotated[str | None, Depends(APIKeyHeader(name="X-API-Key", auto_error=False))]


class _Gateway:
    """What the routes share."""

    def __init__(self, desk: RequestScheduler, keys: Keys, model: str, metrics: Metrics) -> None:
        self.desk, self.keys, self.model, self.metrics = desk, keys, model, metrics
        self.router = desk.front.router
        self._rates = Rates(desk.limits)

    async def admit(self, request: Request, bearer: _Bearer, header: _Header) -> None:
        """Let a request through, or raise `Refused`: 429 or 401."""
        del bearer, header  # declared for the OpenAPI page, read below as they came
        address = request.client.host if request.client else ""
        wait = self._rates.wait(address, now=self.router.clock())
        if wait:
            raise busy("Too many requests from your address", wait=wait)
        headers = request.headers
        if not self.keys.open_for(key_in(headers.get("authorization"), headers.get("x-api-key"))):
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                "The API key is missing or wrong",
                hint="send it as Authorization: Bearer KEY, or as X-API-Key: KEY",
            )

    def swarm(self) -> SwarmAnswer:
        """What /v1/swarm says."""
        router, calibration = self.router, self.desk.calibration
        return SwarmAnswer(
            model=self.model,
            depth=router.depth,
            classes=len(self.desk.labels),
            routing=router.routing,
            wire=router.wire,
            unreachable_blocks=schemas.unreachable(router.swarm, depth=router.depth),
            hosts=schemas.hosts_of(router.swarm, now=router.clock()),
            counters=dict(self.metrics.counters),
            audits=self.metrics.audits(),
            calibration=None if calibration is None else calibration.facts,
            limits=router.limits,
        )

    def health(self) -> Health:
        """What /healthz says."""
        watching = self.metrics.watching() if self.metrics.watching is not None else None
        return schemas.health(self.router.swarm, depth=self.router.depth, watching=watching)

    async def told(self, request: Request, error: Exception) -> Response:
        """The answer to a request that was refused or could not be answered."""
        assert isinstance(error, LayerShuffleError)
        status = status_of(error)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            return await self.failed(request, error)
        self._count(request, status)
        place = f" ({error.place})" if error.place else ""
        body = body_of(error.cause + place, error.hint or "")
        return JSONResponse(body, status, self._headers(status, error))

    async def failed(self, request: Request, error: Exception) -> Response:
        """The answer to a request that broke on a fault of ours: an id, and no more."""
        reference = uuid.uuid4().hex
        LOG.error("request %s failed", reference, exc_info=error)
        self._count(request, HTTPStatus.INTERNAL_SERVER_ERROR)
        body = body_of(
            "The gateway failed", "give the operator this id: it is in the log", reference=reference
        )
        return JSONResponse(body, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _headers(self, status: HTTPStatus, error: LayerShuffleError) -> dict[str, str]:
        if status == HTTPStatus.UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        wait = error.retry_after if isinstance(error, Refused) else None
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            wait = schemas.retry_after(self.router.swarm, now=self.router.clock())
        return {} if wait is None else {"Retry-After": str(retry_seconds(wait))}

    def _count(self, request: Request, status: HTTPStatus) -> None:
        # Not request.url: it is made with the Host header, which may be anything.
        if request.scope["path"] == _CLASSIFY and request.method == "POST":
            self.metrics.turned_away(status)


async def _told_plainly(request: Request, error: Exception) -> Response:
    """The answer to a wrong path or method."""
    del request
    assert isinstance(error, HTTPException)
    body = body_of(str(error.detail), "see /docs for what there is")
    return JSONResponse(body, error.status_code, error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody is there to be answered."""
    del request, error
    return Response(status_code=_CLIENT_GONE)


def _labels(
    front: RemoteModel, *, labels: Sequence[str] | None, calibration: Calibration | None
) -> tuple[str, ...]:
    classes = num_classes_of(front.model)
    if calibration is not None and len(calibration.rows) != front.depth:
        raise UsageError(
            f"The calibration is of {len(calibration.rows)} blocks, the model has {front.depth}"
        )
    if labels is None:
        labels = class_names(front.model) if calibration is None else calibration.classes
    if len(labels) != classes:
        raise UsageError(f"{len(labels)} labels do not name {classes} classes")
    return tuple(labels)
