"""Requests that get no answer: the HTTP status, and what the client is told."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

from layershuffle.errors import DataError, LayerShuffleError, UsageError
from layershuffle.swarm.remote_model import NotAnswered
from layershuffle.swarm.server.schemas import ErrorAnswer, Problem

_SOON = 1.0  # seconds after which a busy gateway is worth another try
_LONGEST = 500  # characters of a cause: some of them repeat what the client sent


class Refused(LayerShuffleError):
    """A request that is turned away; `retry_after` in seconds, where coming later may help."""

    def __init__(
        self, status: HTTPStatus, cause: str, *, hint: str, retry_after: float | None = None
    ) -> None:
        super().__init__(cause, hint=hint)
        self.status, self.retry_after = status, retry_after


def busy(cause: str, *, wait: float = _SOON) -> Refused:
    """The answer to a client that is to come later, after `wait` seconds."""
    return Refused(
        HTTPStatus.TOO_MANY_REQUESTS,
        cause,
        hint="wait as long as Retry-After says, and send less at one time",
        retry_after=wait,
    )


def status_of(error: LayerShuffleError) -> HTTPStatus:
    """The HTTP status that tells a client of `error`."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, NotAnswered):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, UsageError | DataError):
        return HTTPStatus.UNPROCESSABLE_ENTITY
    return HTTPStatus.INTERNAL_SERVER_ERROR


def retry_seconds(wait: float) -> int:
    """A `Retry-After`: whole seconds, at least one."""
    return max(1, math.ceil(wait))


def body_of(cause: str, hint: str, *, reference: str | None = None) -> dict[str, Any]:
    """The JSON body for an error; what no encoding can carry is replaced."""
    problem = Problem(cause=_told(cause), hint=_told(hint), id=reference)
    return ErrorAnswer(error=problem).model_dump(mode="json")


def _told(text: str) -> str:
    plain = text.encode("utf-8", "replace").decode("utf-8")
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 1] + "…"
