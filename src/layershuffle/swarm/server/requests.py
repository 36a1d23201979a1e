"""From a request's body to what is asked. Pure, and meant for a thread: bodies can be large."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from layershuffle.errors import UsageError
from layershuffle.orders import order_of
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.server.errors import Refused
from layershuffle.swarm.server.limits import GatewayLimits

JSON, MULTIPART = "application/json", "multipart/form-data"
IMAGE_FIELD = "image"
_MANY_ERRORS = 20  # not worth listing
_MANY_ITEMS = 4096  # of a JSON body: base64 has no commas, so a real request stays far below
_MAX_TOP = 1000

Order = Annotated[str, Field(max_length=4096)] | Annotated[list[int], Field(max_length=1024)]


class Options(BaseModel):
    """What a request may say beside its images."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    deadline_ms: float | None = Field(
        None, gt=0, description="Milliseconds until the answer is to be out."
    )
    min_blocks: int | None = Field(
        None, ge=1, description="Fewest blocks of an answer; with less there is none."
    )
    order: Order | None = Field(
        None, description='Blocks to run, in this order: "3,0,2" or [3, 0, 2]; each at most once.'
    )
    top_k: int = Field(5, ge=1, le=_MAX_TOP, description="Classes in the answer, at most.")


class JsonRequest(Options):
    """The body of a JSON request: one image or several, as base64 text."""

    image: str | None = None
    images: list[str] | None = None


class FormRequest(Options):
    """The body of a multipart request: one file or several in the field `image`."""

    image: list[Annotated[str, Field(json_schema_extra={"format": "binary"})]]


_T = TypeVar("_T", bound=Options)
BODY_SCHEMA = {
    "required": True,
    "content": {
        MULTIPART: {"schema": FormRequest.model_json_schema()},
        JSON: {"schema": JsonRequest.model_json_schema()},
    },
}


@dataclass(frozen=True)
class Query:
    """A request as it is carried out, but for its images: every option with its value."""

    deadline_ms: float
    min_blocks: int
    order: tuple[int, ...] | None
    top_k: int


@dataclass(frozen=True)
class Bounds:
    """What a request may ask for here."""

    depth: int
    gateway: GatewayLimits
    swarm: Limits


def kind_of(headers: Mapping[str, str]) -> Literal["json", "multipart"]:
    """How the body is written. Raises `Refused` (415) for what cannot be read."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    kind, _ = parse_options_header(headers.get("content-type", ""))
    if encoding == "identity" and kind == JSON.encode():
        return "json"
    if encoding == "identity" and kind == MULTIPART.encode():
        return "multipart"
    raise Refused(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "The body is neither JSON nor a form with files",
        hint=f"send {MULTIPART} with files in the field {IMAGE_FIELD!r}, or {JSON}; not compressed",
    )


def query_of(
    body: bytes, headers: Mapping[str, str], *, bounds: Bounds
) -> tuple[Query, Sequence[bytes]]:
    """What `body` asks, and its image files. Raises `Refused` (400, 413, 415, 422) or
    `UsageError`."""
    if kind_of(headers) == "json":
        _check_items(body)
        asked = _checked(lambda: JsonRequest.model_validate_json(body, strict=True))
        images = _decoded(asked, most=bounds.gateway.max_images)
        return _query(asked, images, bounds), images
    _, parameters = parse_options_header(headers["content-type"])
    boundary = parameters.get(b"boundary", b"")
    files, fields = read_form(body, boundary, most=bounds.gateway.max_images)
    options = _checked(lambda: Options.model_validate(fields))
    return _query(options, files, bounds), files


def _query(asked: Options, files: Sequence[bytes], bounds: Bounds) -> Query:
    if not files:
        raise _unprocessable("There is no image in the request", hint="send one or several")
    order = _order(asked.order, bounds.depth)
    most = bounds.depth if order is None else len(order)
    if asked.min_blocks is not None and asked.min_blocks > most:
        raise _unprocessable(
            f"min_blocks is {asked.min_blocks}, but at most {most} blocks can run",
            hint="ask for fewer",
        )
    return Query(
        deadline_ms=_deadline(asked.deadline_ms, bounds),
        min_blocks=asked.min_blocks or min(bounds.gateway.min_blocks, most),
        order=order,
        top_k=asked.top_k,
    )


def _deadline(asked: float | None, bounds: Bounds) -> float:
    if asked is None:
        return bounds.swarm.deadline_ms
    low, high = bounds.gateway.min_deadline_ms, bounds.swarm.max_deadline_ms
    if not low <= asked <= high:
        raise _unprocessable(
            f"deadline_ms is {asked:g}", hint=f"ask for {low:g} to {high:g} milliseconds"
        )
    return asked


def _order(asked: str | list[int] | None, depth: int) -> tuple[int, ...] | None:
    if asked is None:
        return None
    order = order_of(asked, depth)
    if order.has_repeats:
        raise UsageError("A block stands twice in the order", hint="name each block once at most")
    return order.blocks


def _decoded(asked: JsonRequest, *, most: int) -> tuple[bytes, ...]:
    if asked.image is not None and asked.images is not None:
        raise _unprocessable("There are both image and images", hint="send one of the two")
    texts = [asked.image] if asked.image is not None else asked.images or []
    if len(texts) > most:
        raise _too_many(most)
    try:
        return tuple(base64.b64decode(text, validate=True) for text in texts)
    except (binascii.Error, ValueError) as error:
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            "An image is not base64",
            hint="send the file's bytes in plain base64, without line breaks or a data: prefix",
        ) from error


def _check_items(body: bytes) -> None:
    """Refuse JSON of very many small things, each of which would take 500 bytes to be refused."""
    if body.count(b",") > _MANY_ITEMS:
        raise _unprocessable("The body holds too many values", hint=_known_fields())


def _checked(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: ValidationError) -> Refused:
    if error.error_count() > _MANY_ERRORS:
        return _unprocessable(f"{error.error_count()} fields are wrong", hint=_known_fields())
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    if problems[0]["type"] == "json_invalid":
        return Refused(
            HTTPStatus.BAD_REQUEST,
            f"The body is not JSON ({problems[0]['msg']})",
            hint="check the body, or its content type",
        )
    return _unprocessable("; ".join(map(_words, problems[:3])), hint=_known_fields())


def _words(problem: Mapping[str, Any]) -> str:
    place = ".".join(str(part)[:40] for part in problem["loc"]) or "the body"
    if problem["type"] != "extra_forbidden":
        return f"{place}: {problem['msg']}"
    near = get_close_matches(place, JsonRequest.model_fields, n=1)
    return f"{place} is unknown" + (f", did you mean {near[0]}?" if near else "")


def _known_fields() -> str:
    return f"a request has the fields {', '.join(JsonRequest.model_fields)}"


def _unprocessable(cause: str, *, hint: str) -> Refused:
    return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, cause, hint=hint)


def _too_many(most: int) -> Refused:
    return Refused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"There are more than {most} images in the request",
        hint="send several requests",
    )


@dataclass
class _Form:
    """A multipart form as it is read: files of the image field, texts of the others."""

    most: int
    files: list[bytes] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    _header: bytes = b""
    _value: bytes = b""
    _name: str | None = None
    _data: bytearray = field(default_factory=bytearray)

    def begin(self) -> None:
        """A part begins."""
        self._name, self._data = None, bytearray()
        if len(self.fields) > len(Options.model_fields):
            raise _unprocessable("There are too many fields", hint=_known_fields())

    def header_name(self, data: bytes, start: int, end: int) -> None:
        """More of a header's name."""
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        """More of a header's value."""
        self._value += data[start:end]

    def header_end(self) -> None:
        """A header is complete; one of them names the field."""
        if self._header.lower() == b"content-disposition":
            _, parameters = parse_options_header(self._value)
            name = parameters.get(b"name")
            self._name = None if name is None else name.decode("utf-8", "replace")
        self._header, self._value = b"", b""

    def data(self, data: bytes, start: int, end: int) -> None:
        """More of a part's content."""
        self._data += data[start:end]

    def end(self) -> None:
        """A part is complete."""
        if self._name is None:
            raise _broken_form()
        if self._name == IMAGE_FIELD:
            if len(self.files) == self.most:
                raise _too_many(self.most)
            self.files.append(bytes(self._data))
            return
        if self._name in self.fields:
            raise _unprocessable(f"The field {self._name[:40]} is given twice", hint="give it once")
        self.fields[self._name] = self._data.decode("utf-8", "replace")

    def finish(self) -> None:
        """The closing boundary has come."""
        self.ended = True


def read_form(body: bytes, boundary: bytes, *, most: int) -> tuple[list[bytes], dict[str, str]]:
    """The files and fields in a multipart body. Raises `Refused` if it is broken or cut short."""
    form = _Form(most)
    try:
        if not boundary:
            raise _broken_form()
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": form.begin,
                "on_part_data": form.data,
                "on_part_end": form.end,
                "on_header_field": form.header_name,
                "on_header_value": form.header_value,
                "on_header_end": form.header_end,
                "on_end": form.finish,
            },
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise _broken_form() from error
    if not form.ended:
        raise _broken_form()
    return form.files, form.fields


def _broken_form() -> Refused:
    return Refused(
        HTTPStatus.BAD_REQUEST,
        "The form is broken or cut short",
        hint=f"send {MULTIPART} with its boundary, each part with a name",
    )
