"""A classification request: its options are the query of the address, its image is the body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from layershuffle.swarm.server.errors import HTTPError, unprocessable
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.text import nearest

_MAX_TOP = 1000
_MAX_DIGITS = 18  # of a Content-Length that are read
_MAX_PROBLEMS = 3  # that a refusal lists
_BODY_HINT = (
    "send one image as the body, neither as a form nor compressed: curl --data-binary @FILE"
)
BODY_SCHEMA = {
    "required": True,
    "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
}


class Options(BaseModel):
    """The options of a request. An address holds text, which pydantic converts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    deadline_ms: float | None = Field(
        None, gt=0, description="Milliseconds until the answer must be sent."
    )
    min_blocks: int | None = Field(
        None,
        ge=1,
        description="Fewest blocks of an answer; with fewer, the request fails. Default: the "
        "request waits until its deadline for half of the accuracy, then answers with fewer.",
    )
    confidence: Annotated[float, Field(gt=0, le=1)] | Literal["off"] | None = Field(
        None,
        description="The chance of being right at which the request ends with fewer blocks; `off` "
        "runs all of them. Default: what lost at most 0.3 points of top-1 when it was measured.",
    )
    top: int = Field(5, ge=1, le=_MAX_TOP, description="Classes in the answer, at most.")


async def read_body(
    request: Request, *, limits: GatewayLimits, take: Callable[[int], None]
) -> bytes:
    """The body of `request`. `take` is called with the number of bytes of every chunk that arrives,
    and may raise. Raises `HTTPError` (408, 413, 415) and `ClientDisconnect`."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    # Other kinds are not looked at: curl calls every body a form of fields.
    is_form = request.headers.get("content-type", "").lower().startswith("multipart/")
    if encoding != "identity" or is_form:
        raise HTTPError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body is not an image alone", hint=_BODY_HINT
        )
    announced = request.headers.get("content-length", "")
    _check_size(int(announced[:_MAX_DIGITS]) if announced.isdecimal() else 0, limits)
    body = bytearray()  # counted as well: the announced length may be missing
    try:
        async with asyncio.timeout(limits.body_ms / 1000):
            async for chunk in request.stream():
                _check_size(len(body) + len(chunk), limits)
                take(len(chunk))
                body += chunk
    except TimeoutError as error:
        raise HTTPError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"The body did not arrive within {limits.body_ms / 1000:g} s",
            hint="send a smaller image",
        ) from error
    return bytes(body)


def image_in(body: bytes) -> bytes:
    """The image that a body is. Raises `HTTPError` (422) for an empty one."""
    if not body:
        raise unprocessable("There is no image in the request", hint=_BODY_HINT)
    return body


def wrong_options(error: RequestValidationError) -> HTTPError:
    """The refusal (422) of options that are unknown or out of their bounds."""
    problems = "; ".join(map(_describe_problem, error.errors()[:_MAX_PROBLEMS]))
    return unprocessable(problems, hint=f"a request has the options {', '.join(_NAMES)}")


_NAMES = tuple(Options.model_fields)


def _check_size(size: int, limits: GatewayLimits) -> None:
    if size > limits.max_body_bytes:
        raise HTTPError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body is larger than {limits.max_body_bytes} bytes",
            hint="send a smaller image",
        )


def _describe_problem(problem: Mapping[str, Any]) -> str:
    name = str(problem["loc"][1])[:40]
    if problem["type"] != "extra_forbidden":
        return f"{name}: {problem['msg']}"
    match = nearest(name, _NAMES)
    return f"{name} is unknown" + (f", did you mean {match}?" if match else "")
