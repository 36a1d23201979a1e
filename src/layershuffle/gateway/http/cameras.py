"""The door for cameras: the HTTP form of DeepStack and CodeProject.AI.

Components of Home Assistant and Node-RED send an image in it and read labels with boxes. The
form becomes a request to /v1/classify: its bounds, its key and its place are those of all others.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import Message as Event

from layershuffle.gateway.http.errors import HTTPError
from layershuffle.gateway.http.requests import Gateway, Options
from layershuffle.ground.errors import UsageError

CAMERAS = "/v1/vision/custom"
MIN_CONFIDENCE = 0.45
"""The least probability of a label, where the form has none. It is DeepStack's own."""
_MAX_PARTS = 16  # of a form; components send three
_MAX_HEAD = 4096  # bytes of the head of a part
_MAX_KIND = 256  # characters of the Content-Type of a form; components send about eighty
# Strangers send the text. The parser of `email` takes seconds for 60,000 semicolons.
_BOUNDARY = re.compile(
    r"multipart/form-data\b.*?\bboundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))", re.I
)
_NAME = re.compile(
    rb'^content-disposition:[^\r\n]*?[;\s]name=(?:"([^"\r\n]*)"|([^\s;"]+))', re.I | re.M
)
_HINT = "send multipart/form-data with the file as image, and min_confidence from 0 to 1"


def add_cameras(
    app: FastAPI, gateway: Gateway, *, responses: dict[int | str, dict[str, Any]]
) -> None:
    """Add the routes for cameras, where the last part of the model's spec is its name.

    `responses`: the refusals, for the description of the API.
    """
    model = re.split(r"[/:]", gateway.model.rstrip("/"))[-1]

    @app.post(
        f"{CAMERAS}/list",
        responses=responses,
        summary="The names of models, as home automation asks for them",
    )
    async def names(request: Request) -> dict[str, Any]:
        await _admitted(request, gateway)
        return {"success": True, "models": [model]}

    @app.post(
        f"{CAMERAS}/{{name}}",
        responses=responses,
        summary="Classify an image, as home automation sends it",
    )
    async def classify(request: Request, name: str) -> dict[str, Any]:
        plain, form = await _admitted(request, gateway)
        if name != model:
            cause = f"There is no model {name[:40]} here"
            raise HTTPError(HTTPStatus.NOT_FOUND, cause, hint=f"its name is {model}")
        least = _least_probability(form)
        image = form.get("image", b"")
        if not image:
            raise UsageError("There is no image in the form", hint=_HINT)
        plain = _with_body(plain, image)
        # Of the form nothing stays here: the gateway counts the image until it is decoded.
        del form, image
        answer, (width, height) = await gateway.classify(plain, Options.model_validate({}))
        gateway.counters.count_answer(answer)
        box = {"x_min": 0, "y_min": 0, "x_max": width, "y_max": height}
        predictions = []
        for guess in answer.top:
            if guess.probability >= least:
                predictions.append({"label": guess.label, "confidence": guess.probability, **box})
        return {"success": True, "predictions": predictions}


async def _admitted(request: Request, gateway: Gateway) -> tuple[Request, dict[str, bytes]]:
    """The request without its body, and the fields of its form, of which one may be its key.

    The body is read before the key is known: within the memory and the time of an address. Raises
    the errors of `Admission`.
    """
    kind = request.headers.get("content-type", "")
    headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
    plain = Request({**request.scope, "headers": headers}, request.receive)
    async with gateway.admission.received(plain) as received:
        form = form_fields(received.body, kind=kind)
    keyed = plain
    if form.get("api_key") and "authorization" not in request.headers:
        key = (b"authorization", b"Bearer " + form["api_key"])
        keyed = Request({**request.scope, "headers": [*headers, key]}, request.receive)
    await gateway.admission.admit(keyed)
    return plain, form


def _least_probability(form: dict[str, bytes]) -> float:
    """The field `min_confidence`. Raises `UsageError` if it is no number from 0 to 1."""
    try:
        least = float(form.get("min_confidence", MIN_CONFIDENCE))
    except ValueError:
        least = -1.0
    if 0 <= least <= 1:
        return least
    raise UsageError("min_confidence is no number from 0 to 1", hint=_HINT)


def _with_body(request: Request, body: bytes) -> Request:
    """The request with a body that has arrived already."""
    headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-length"]
    events: list[Event] = [{"type": "http.request", "body": body}]

    async def receive() -> Event:
        return events.pop() if events else await request.receive()

    return Request({**request.scope, "headers": headers}, receive)


def form_fields(body: bytes, *, kind: str) -> dict[str, bytes]:
    """The fields of a form by name (RFC 7578), none of another `kind` (Content-Type) of body."""
    found = _BOUNDARY.match(kind[:_MAX_KIND])
    fields: dict[str, bytes] = {}
    if found is None:
        return fields
    boundary = found[1] or found[2]
    # The delimiter never occurs within a field. What is before the first one is no field.
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    for part in (b"\r\n" + body).split(delimiter, _MAX_PARTS)[1:]:
        end = part.find(b"\r\n\r\n", 0, _MAX_HEAD)
        name = _NAME.search(part, 0, max(0, end))
        if name is not None:
            fields[(name[1] or name[2] or b"").decode(errors="replace")] = part[end + 4 :]
    return fields
