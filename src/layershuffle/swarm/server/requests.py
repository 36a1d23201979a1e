"""Read a classification request: parse its form under limits, check its fields, decode its images.

Everything that makes a small file expensive is checked before anything is decoded: a file of a few
bytes can claim any size, a long thin image grows when its short side is enlarged, sixteen files of
70 kB can hold 400 million pixels, and some files with few pixels are expensive nevertheless.
"""

from __future__ import annotations

import asyncio
import io
import math
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

import torch
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from torch import Tensor

from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.errors import DataError, UsageError
from layershuffle.image_view import ImageView, resized_size
from layershuffle.pixels import BOMBS, DECODE_ERRORS, decoded
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.server.errors import HTTPError, unprocessable
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.schemas import IMAGE_FIELD
from layershuffle.text import nearest

MULTIPART = "multipart/form-data"
_FORM_HINT = f"send {MULTIPART} with image files in the field {IMAGE_FIELD!r}, not compressed"
_MAX_TOP = 1000
MAX_PASSES = 8
"""Most steps of an order, in multiples of the depth: a request must not occupy a whole swarm."""
_MAX_FIELD_BYTES = 8192  # an order of 1,000 blocks takes half of it
_MAX_DIGITS = 18  # of a Content-Length that are read
_MAX_PROBLEMS = 3  # that a refusal lists
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{1,70}")  # RFC 2046, section 5.1.1
# Named, because Pillow would otherwise try every decoder that it has. AVIF is missing: its decoder
# believes the compressed stream, not the size in the head that is checked here.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
# Those of TIFF that are bounded by the size of a strip or a tile.
COMPRESSIONS = ("raw", "packbits", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate")
MAX_SCANS = 32
"""Most scans of a JPEG. Progressive ones have about ten."""
MAX_MARKERS = 2000
"""Most markers of a JPEG. Cameras write about twenty; 16 MB have 250 if all is metadata."""
MAX_CHUNKS = 10_000
"""Most chunks of a PNG. 16 MB have 2,000 as libpng writes them, and 1,400,000 if all are empty."""
TIFF_TILE_WIDTH, TIFF_TILE_LENGTH = 322, 323
_HEAD_READS = 4 * MAX_MARKERS  # two for a marker, one each for its length and its content

_PLAIN_HINT = "save it as a plain JPEG, or as a progressive one with the usual scans"
_FORMATS_HINT = f"send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
# Bytes within a scan are excluded: a stuffed zero, restarts, padding.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SCAN, _END, _TEMPORARY = 0xDA, 0xD9, 0x01


class Options(BaseModel):
    """The fields of a request besides its images. Forms hold text, which pydantic converts."""

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
    top_k: int = Field(5, ge=1, le=_MAX_TOP, description="Classes in the answer, at most.")


class FormRequest(Options):
    """The body of a request: one file or several in the field `image`, and the options."""

    image: list[Annotated[str, Field(json_schema_extra={"format": "binary"})]]


BODY_SCHEMA = {
    "required": True,
    "content": {MULTIPART: {"schema": FormRequest.model_json_schema()}},
}
_FIELDS_HINT = f"a request has the fields {', '.join(FormRequest.model_fields)}"


@dataclass(frozen=True)
class Query:
    """The options of a request, with the defaults filled in.

    `min_blocks`: fewest blocks of an answer. `useful_blocks`: with fewer, a request waits longer.
    """

    deadline_ms: float
    min_blocks: int
    useful_blocks: int
    top_k: int


@dataclass(frozen=True)
class Bounds:
    """Bounds on the options of a request. `useful`: the default of `Query.useful_blocks`."""

    depth: int
    useful: int
    gateway: GatewayLimits
    swarm: Limits


async def read_query(
    request: Request, *, bounds: Bounds, take: Callable[[int], None]
) -> tuple[Query, list[bytes]]:
    """The options of `request`, and its image files. `take` is called with the number of bytes of
    every chunk that arrives, and may raise.

    Raises `HTTPError` (400, 408, 413, 415, 422) or `UsageError`.
    """
    files, fields = await read_form(request, limits=bounds.gateway, take=take)
    try:
        options = Options.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        causes = "; ".join(map(_describe_problem, problems[:_MAX_PROBLEMS]))
        raise unprocessable(causes, hint=_FIELDS_HINT) from error
    if not files:
        raise unprocessable("There is no image in the request", hint=_FORM_HINT)
    if options.min_blocks is not None and options.min_blocks > bounds.depth:
        raise unprocessable(
            f"min_blocks is {options.min_blocks}, but the model has {bounds.depth} blocks",
            hint=f"ask for at most {bounds.depth} (min_blocks; on a command line --min-blocks)",
        )
    low, high = bounds.gateway.min_deadline_ms, bounds.swarm.max_deadline_ms
    if options.deadline_ms is not None and not low <= options.deadline_ms <= high:
        raise unprocessable(
            f"deadline_ms is {options.deadline_ms:g}", hint=f"ask for {low:g} to {high:g} ms"
        )
    query = Query(
        deadline_ms=options.deadline_ms or bounds.swarm.deadline_ms,
        min_blocks=options.min_blocks or 1,
        useful_blocks=options.min_blocks or bounds.useful,
        top_k=options.top_k,
    )
    return query, files


def read_order(text: str, *, depth: int) -> ExecutionOrder:
    """The order that a request names, as text or JSON. Raises `UsageError` for an invalid order,
    too many steps, and a state from `depth` or more steps ago, because those are not kept."""
    is_json = text.lstrip().startswith("{")
    order = order_of(ExecutionOrder.from_json(text) if is_json else text, depth)
    if len(order) > MAX_PASSES * depth:
        raise UsageError(
            f"{len(order)} steps are too many", hint=f"take {MAX_PASSES * depth} at most"
        )
    for position, (block, version) in enumerate(order.steps):
        if position - version >= depth:
            raise UsageError(
                f"Block {block} at position {position} reads a state of {position - version} steps "
                "ago",
                hint=f"read one of {depth - 1} steps ago at most",
            )
    return order


def _boundary_of(headers: Mapping[str, str]) -> bytes:
    """The boundary of the form that a request with these headers announces.

    Raises `HTTPError`: 415 for bodies that are not a form, 400 for an invalid boundary.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    kind, parameters = parse_options_header(headers.get("content-type", ""))
    if encoding != "identity" or kind != MULTIPART.encode():
        raise HTTPError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body is not a form with files", hint=_FORM_HINT
        )
    boundary = parameters.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise _broken_form("its boundary is missing or wrong")
    return boundary


class _FormParser(MultiPartParser):
    """Starlette's parser, with `ended` set at the closing boundary, which Starlette ignores."""

    ended = False

    def on_end(self) -> None:
        self.ended = True


async def read_form(
    request: Request, *, limits: GatewayLimits, take: Callable[[int], None]
) -> tuple[list[bytes], dict[str, str]]:
    """The image files and the other fields of a form. Raises the errors of `read_query`.

    Parsing runs on the event loop: a chunk of 64 kB takes half a millisecond at worst, and other
    tasks run between chunks.
    """

    async def stream() -> AsyncGenerator[bytes, None]:
        announced = request.headers.get("content-length", "")
        _check_size(int(announced[:_MAX_DIGITS]) if announced.isdecimal() else 0, limits)
        received = 0  # counted as well: the announced length may be wrong or missing
        async for chunk in request.stream():
            received += len(chunk)
            _check_size(received, limits)
            take(len(chunk))
            yield chunk
        if not parser.ended:
            raise MultiPartException("it is cut short")

    # The parser decodes names with any codec that the client names in a charset, among them some
    # that raise or take quadratic time. So it is shown the boundary alone, and reads UTF-8.
    content_type = f'{MULTIPART}; boundary="{_boundary_of(request.headers).decode("ascii")}"'
    parser = _FormParser(
        Headers({"content-type": content_type}),
        stream(),
        max_files=limits.max_images,
        max_fields=len(FormRequest.model_fields),
        max_part_size=_MAX_FIELD_BYTES,
    )
    parser.spool_max_size = limits.max_body_bytes + 1  # no image is ever written to a disk
    try:
        async with asyncio.timeout(limits.body_ms / 1000):
            form = await parser.parse()
    except TimeoutError as error:
        raise HTTPError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"The body did not arrive within {limits.body_ms / 1000:g} s",
            hint="send smaller images",
        ) from error
    except MultiPartException as error:
        raise _broken_form(error.message.rstrip(".")) from error
    files: list[bytes] = []
    fields: dict[str, str] = {}
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) and name == IMAGE_FIELD:
                files.append(await value.read())
            elif isinstance(value, UploadFile):
                raise unprocessable(f"There is a file in the field {name[:40]!r}", hint=_FORM_HINT)
            elif name == IMAGE_FIELD:
                raise unprocessable(f"The field {IMAGE_FIELD!r} holds no file", hint=_FORM_HINT)
            elif name in fields:
                raise unprocessable(f"The field {name[:40]} is given twice", hint="give it once")
            else:
                fields[name] = value
    finally:
        await form.close()
    return files, fields


def _check_size(size: int, limits: GatewayLimits) -> None:
    if size > limits.max_body_bytes:
        raise HTTPError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body is larger than {limits.max_body_bytes} bytes",
            hint="send fewer or smaller images",
        )


def _describe_problem(problem: Mapping[str, Any]) -> str:
    field = ".".join(str(part)[:40] for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{field}: {problem['msg']}"
    match = nearest(field, FormRequest.model_fields)
    return f"{field} is unknown" + (f", did you mean {match}?" if match else "")


def _broken_form(why: str) -> HTTPError:
    return HTTPError(HTTPStatus.BAD_REQUEST, f"The form cannot be read: {why}", hint=_FORM_HINT)


# --- images ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """Turns files into a batch for one model. Runs in a thread."""

    view: ImageView
    limits: GatewayLimits

    def batch(self, files: Sequence[bytes], *, check: Callable[[], None] = lambda: None) -> Tensor:
        """The images as float32 `[files, channels, height, width]`. Raises `DataError`, with
        the number of the image if there are several.

        `check` is called before every step that takes long, and may raise to end the work.
        """
        transform = PlainTransform(self.view)
        waiting: deque[tuple[str | None, Image.Image]] = deque()
        total = 0
        for number, file in enumerate(files, start=1):
            check()
            place = f"image {number} of {len(files)}" if len(files) > 1 else None
            image = self._open(file, place)
            # Either way round, because it may be turned.
            total += max(self._size(size, place) for size in (image.size, image.size[::-1]))
            if total > self.limits.max_request_pixels:
                raise DataError(
                    f"The images of the request have too many pixels together ({total} and more; "
                    f"at most {self.limits.max_request_pixels})",
                    place=place,
                    hint="send several requests, or shrink the images",
                )
            waiting.append((place, image))
        pixels = []
        # Off the queue one by one: a decoded image is freed before the next one is decoded.
        while waiting:
            check()
            place, image = waiting.popleft()
            pixels.append(transform(self.decode(image, place)))
        return PixelFinish(self.view)(torch.stack(pixels))

    def decode(self, image: Image.Image, place: str | None) -> Image.Image:
        """Decode an opened image, in the mode that the model expects. Raises `DataError`."""
        with _data_errors(place, self.limits):
            # Opening read the head alone; here the pixels are decoded.
            return decoded(image, self.view.channels, place=place)

    def _open(self, file: bytes, place: str | None) -> Image.Image:
        """The image, with only its header read."""
        scans, markers = count_markers(file)
        for count, most, kind in ((scans, MAX_SCANS, "scans"), (markers, MAX_MARKERS, "markers")):
            if count > most:
                raise DataError(
                    f"The image has more than {most} {kind}", place=place, hint=_PLAIN_HINT
                )
        with _data_errors(place, self.limits):
            content = _BoundedFile(without_metadata(file))
            image = Image.open(content, formats=FORMATS)
        content.left = None  # a decoder reads in large pieces, and the pixels are bounded
        if isinstance(image, TiffImageFile):
            self._check_tiff(image, place)
        return image

    def _check_tiff(self, image: TiffImageFile, place: str | None) -> None:
        """Raises `DataError` for a tile larger than an image may be, and for other compressions."""
        tile = [image.tag_v2.get(tag, 0) for tag in (TIFF_TILE_WIDTH, TIFF_TILE_LENGTH)]
        if math.prod(tile) > self.limits.max_pixels:
            raise _too_large(f"tiles of {tile[0]}x{tile[1]} pixels", place, self.limits.max_pixels)
        if image.info.get("compression", "raw") not in COMPRESSIONS:
            raise DataError("The TIFF file is compressed unusually", place=place, hint=_PLAIN_HINT)

    def _size(self, size: tuple[int, int], place: str | None) -> int:
        """Number of pixels of an image of this size, as it is or resized, whichever is more.

        Raises `DataError` if they are too many.
        """
        most = self.limits.max_pixels
        width, height = size
        if width * height > most:
            raise _too_large(f"{width}x{height} pixels", place, most)
        # A long thin image grows when its short side is brought to the model's size.
        across, down = resized_size(size, self.view)
        if across * down > most:
            raise _too_large(f"{across}x{down} pixels at the model's size", place, most)
        return max(width * height, across * down)


def without_metadata(file: bytes) -> bytes:
    """A PNG without the chunks that its pixels do not need; other files unchanged.

    Pillow unpacks every compressed text and profile of a PNG. It bounds the texts, but not the
    number of profiles: 1 MB of them took 4.8 s under its strictest limits. Raises
    `ValueError` where there are more than `MAX_CHUNKS` chunks of any kind.
    """
    if not file.startswith(_PNG):
        return file
    parts, start, chunks = [_PNG], len(_PNG), 0
    # Data behind the end is never read.
    while start + 8 <= len(file) and not parts[-1].startswith(b"IEND", 4):
        chunks += 1
        if chunks > MAX_CHUNKS:
            raise ValueError("the image has too many chunks")
        kind = file[start + 4 : start + 8]
        end = start + 12 + int.from_bytes(file[start : start + 4])
        # Upper case marks chunks that no decoder may skip. Transparency and orientation are kept
        # too, because images are converted as in training.
        if kind[:1].isupper() or kind in (b"tRNS", b"eXIf"):
            parts.append(file[start:end])
        start = end
    return b"".join(parts)


class _BoundedFile(io.BytesIO):
    """A file whose header may be read in `_HEAD_READS` calls; further ones raise `ValueError`.

    Pillow reads a JPEG's header byte by byte in Python where it finds no segment: 16 MB of padding
    took 7 s. The count of markers misses that, because libjpeg and Pillow skip different bytes.
    """

    left: int | None = _HEAD_READS

    def read(self, size: int | None = -1, /) -> bytes:
        """As `io.BytesIO.read`."""
        if self.left is not None:
            if not self.left:
                raise ValueError("the header of the image is too long")
            self.left -= 1
        return super().read(size)


def count_markers(file: bytes) -> tuple[int, int]:
    """The numbers of scans and markers of a JPEG, counted to the first excess; else 0 and 0.

    libjpeg processes the whole image once per scan, and a scan needs only 42 bytes: a file of
    16 MB could keep it busy for hours. A marker takes four bytes, and one step of this loop.
    """
    scans = markers = 0
    marker = _MARKER.search(file, 2) if file.startswith(_JPEG) else None
    while marker is not None and scans <= MAX_SCANS and markers <= MAX_MARKERS:
        kind, start = file[marker.start() + 1], marker.end()
        if kind == _END:
            break
        scans, markers = scans + (kind == _SCAN), markers + 1
        length = 0 if kind == _TEMPORARY else int.from_bytes(file[start : start + 2])
        marker = _MARKER.search(file, start + length)
    return scans, markers


@contextmanager
def _data_errors(place: str | None, limits: GatewayLimits) -> Iterator[None]:
    """Raise the errors of Pillow as `DataError`."""
    try:
        yield
    except BOMBS as error:
        raise _too_large(str(error), place, limits.max_pixels) from error
    except DECODE_ERRORS as error:
        raise DataError("The image cannot be read", place=place, hint=_FORMATS_HINT) from error


def _too_large(size: str, place: str | None, most: int) -> DataError:
    return DataError(
        f"The image is too large ({size}; at most {most})",
        place=place,
        hint="shrink it; models look at a few hundred pixels per side",
    )
