"""The HTTP routes of a gateway, and the one handler that turns errors into answers.

`start` adds those of hosts, which dial in (`hosts/connections`), of tabs that become hosts
(`page`), and of the operator (`operator`).
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from layershuffle._version import __version__
from layershuffle.gateway.brain.state import retry_after
from layershuffle.gateway.http.answers import (
    Classification,
    ErrorAnswer,
    Health,
    SwarmAnswer,
    encodable,
)
from layershuffle.gateway.http.cameras import CAMERAS, add_cameras
from layershuffle.gateway.http.errors import LOG, answer_plainly, error_response, error_status
from layershuffle.gateway.http.files import page_routes
from layershuffle.gateway.http.metrics import CONTENT_TYPE, Metrics
from layershuffle.gateway.http.requests import Gateway, Options
from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.ground.text import nearest

_CLASSIFY = "/v1/classify"
_LOGGED_AT_ONCE = 10  # requests without an answer that are logged at once
_LOGGED_EVERY = 10.0  # seconds until one more is logged
_MAX_PROBLEMS = 3  # that a refusal lists
_IMAGE = {
    "required": True,
    "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
}
_DESCRIPTIONS = {
    401: "The API key is missing or wrong.",
    403: "Another site's page sent the request, or it names the gateway otherwise.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is a form, or compressed.",
    422: "An option or the image is wrong.",
    429: "Too many requests; see Retry-After.",
    503: "The deadline passed before there was an answer, or too few blocks could be run; see "
    "Retry-After.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in _DESCRIPTIONS.items()
}
_NO_MODEL: dict[str, Any] = {"model": ErrorAnswer, "description": "There is no such model."}
_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "No; `why` has the reasons."}
}


class Quiet:
    """Lets `burst` lines into the log at once, and one more every `every` seconds.

    This is a token bucket: a line takes a token, and a token comes every `every` seconds.
    """

    def __init__(self, burst: int, *, every: float) -> None:
        self._burst = burst
        self._every = every
        self._tokens = float(burst)
        self._last_time = -math.inf

    def may_speak(self, now: float) -> bool:
        """Whether a line may be written at `now`, in seconds; if so, it counts."""
        elapsed = max(0.0, now - self._last_time)
        self._tokens = min(self._burst, self._tokens + elapsed / self._every)
        self._last_time = max(now, self._last_time)
        # Sums of many shares are rounded: a token may lack 1e-16.
        if self._tokens < 1 - 1e-9:
            return False
        self._tokens -= 1
        return True


def create_app(gateway: Gateway, *, page: bool = False) -> FastAPI:
    """The API of `gateway`, which is closed when the server ends; with `page`, its page at /."""
    logged = Quiet(_LOGGED_AT_ONCE, every=_LOGGED_EVERY)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await asyncio.to_thread(gateway.close)  # it may wait for work that needs the loop

    async def answer_options(request: Request, error: RequestValidationError) -> Response:
        return await answer_error(request, _wrong_options(error))

    async def answer_error(request: Request, error: Exception) -> Response:
        wait = None
        reference = None
        status = error_status(error)
        # Not request.url: it contains the Host header, which the client chooses.
        path = request.scope["path"]
        classifies = path.startswith((_CLASSIFY, f"{CAMERAS}/")) and path != f"{CAMERAS}/list"
        if classifies and request.method == "POST":
            gateway.counters.count_refusal(status)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            now = gateway.router.clock()
            reference = uuid.uuid4().hex
            wait = retry_after(gateway.router.swarm, now=now)
            # A night without hosts must not fill the disk.
            if logged.may_speak(now):
                text = "Request %s was not answered: %s"
                LOG.warning(text, reference, encodable(str(error)), extra={"request": reference})
        return error_response(error, wait=wait, reference=reference)

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
        # Starlette calls the handler of the most specific class, so all of these need ours.
        exception_handlers={
            RequestValidationError: answer_options,
            HTTPException: answer_plainly,
            ClientDisconnect: answer_error,
            LayerShuffleError: answer_error,
            Exception: answer_error,
        },
    )
    app.state.gateway = gateway
    _add_routes(app, gateway)
    if page:
        app.router.routes += page_routes(gateway)
    return app


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    metrics = Metrics(gateway)
    guarded: list[Any] = [Depends(gateway.admission.admit)]
    errors = dict(_ERRORS)
    if gateway.keys:
        # For the OpenAPI description: `admit` reads the header itself.
        guarded.append(Depends(HTTPBearer(auto_error=False)))
    unwelcome = 401 if gateway.keys else 403
    del errors[403 if gateway.keys else 401]
    refusals: dict[int | str, dict[str, Any]] = {unwelcome: errors[unwelcome]}

    app.add_api_route(
        _CLASSIFY,
        gateway.respond,
        methods=["POST"],
        dependencies=guarded,
        responses=errors,
        response_model=Classification,
        openapi_extra={"requestBody": _IMAGE},
        name="classify",
        description="The body is one image: JPEG, PNG or WebP.",
        summary="Classify an image",
    )
    add_cameras(app, gateway, responses={404: _NO_MODEL, **errors})

    @app.get(
        "/v1/swarm", dependencies=guarded, responses=refusals, summary="The hosts, as they are now"
    )
    async def swarm() -> SwarmAnswer:
        return metrics.swarm()

    # Without a key: load balancers and service managers have none.
    @app.get("/livez", summary="Whether the gateway runs")
    async def livez() -> dict[str, bool]:
        return {"ok": True}

    @app.get("/readyz", responses=_UNHEALTHY, summary="Whether answers are accurate enough")
    async def readyz(response: Response) -> Health:
        return _with_status(metrics.readiness(), response)

    @app.get("/healthz", responses=_UNHEALTHY, summary="Whether requests can be answered")
    async def healthz(response: Response) -> Health:
        return _with_status(metrics.health(), response)

    @app.get(
        "/metrics",
        dependencies=guarded,
        responses=refusals,
        response_class=Response,
        summary="Counters for Prometheus",
    )
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _with_status(health: Health, response: Response) -> Health:
    if not health.ok:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return health


def _wrong_options(error: RequestValidationError) -> UsageError:
    """The refusal of options that are unknown or out of their bounds."""
    names = tuple(Options.model_fields)
    problems = []
    for problem in error.errors()[:_MAX_PROBLEMS]:
        name = str((*problem["loc"], "body")[1])[:40]
        text = f"{name}: {problem['msg']}"
        if problem["type"] == "extra_forbidden":
            match = nearest(name, names)
            text = f"{name} is unknown" + (f", did you mean {match}?" if match else "")
        problems.append(text)
    return UsageError("; ".join(problems), hint=f"a request has the options {', '.join(names)}")
