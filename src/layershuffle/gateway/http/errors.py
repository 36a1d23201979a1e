"""Turn errors into HTTP answers with their statuses, causes and hints."""

from __future__ import annotations

import logging
import math
import uuid
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from layershuffle.gateway.hosts.served_model import NotAnswered
from layershuffle.gateway.http.answers import ErrorAnswer, Problem
from layershuffle.ground.errors import DataError, LayerShuffleError, UsageError

LOG = logging.getLogger("layershuffle")
CLIENT_GONE = 499
"""The status of nginx for a client that gave up; nobody reads it."""
_LONGEST = 500  # characters of a cause: some causes quote the client
_SOON = 1.0  # seconds after which a client may try a busy gateway again


class HTTPError(LayerShuffleError):
    """The refusal of a request; `retry_after` in seconds, where a later try may help."""

    def __init__(
        self,
        status: HTTPStatus,
        cause: str,
        *,
        hint: str,
        place: str | Path | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(cause, place=place, hint=hint)
        self.status = status
        self.retry_after = retry_after


def busy(cause: str) -> HTTPError:
    """The refusal (429) of a client that may try again in a second."""
    return HTTPError(
        HTTPStatus.TOO_MANY_REQUESTS,
        cause,
        hint="wait as long as Retry-After says, and send less at a time",
        retry_after=_SOON,
    )


def error_response(
    error: Exception, *, wait: float | None = None, reference: str | None = None
) -> Response:
    """The response to a request that was refused, cannot be answered, or failed unexpectedly.

    `wait`: seconds after which another try may help, where `error` does not say it; `reference`:
    the id of the request in the log.
    """
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):  # a wrong path or method
        hint = "see /openapi.json for the paths and methods"
        body = _body(str(error.detail), hint)
        return JSONResponse(body, error.status_code, error.headers)
    status = error_status(error)
    headers = {}
    if status == HTTPStatus.INTERNAL_SERVER_ERROR or not isinstance(error, LayerShuffleError):
        # The cause of an internal failure may name files and hosts: the client gets only an id.
        reference = uuid.uuid4().hex
        LOG.error("Request %s failed", reference, exc_info=error, extra={"request": reference})
        hint = "give the operator this id: it is in the log"
        return JSONResponse(_body("The gateway failed", hint, reference=reference), status)
    if isinstance(error, HTTPError):
        wait = error.retry_after
    if wait is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait)))  # whole seconds
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    place = f" ({error.place})" if error.place else ""
    body = _body(error.cause + place, error.hint or "", reference=reference)
    return JSONResponse(body, status, headers)


async def answer_plainly(request: Request, error: Exception) -> Response:
    """The response to `error`; a handler for an app."""
    del request
    return error_response(error)


def error_status(error: Exception) -> int:
    """The HTTP status for `error`.

    It is 422 for a request that can be read but not carried out, and 500 for unexpected errors.
    """
    if isinstance(error, ClientDisconnect):
        return CLIENT_GONE
    if isinstance(error, HTTPError):
        return error.status
    if isinstance(error, NotAnswered):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, UsageError | DataError):
        return HTTPStatus.UNPROCESSABLE_ENTITY
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _body(cause: str, hint: str, *, reference: str | None = None) -> dict[str, Any]:
    problem = Problem(cause=cause[:_LONGEST], hint=hint, id=reference)
    return ErrorAnswer(error=problem).model_dump(mode="json")
