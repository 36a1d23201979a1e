"""From the bytes of image files to what the model's view wants. Runs in a thread.

Everything that makes a small file dear is checked before anything is decoded: a file of a few bytes
can claim any size, a long thin image grows when its short side is enlarged, sixteen files of 70 kB
can hold 400 million pixels, and there are files that are dear although their pixels are few.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from layershuffle.data.images import BOMBS, DECODE_ERRORS, to_mode
from layershuffle.data.transforms import PlainTransform, resized_size
from layershuffle.data.view import ImageView, PixelFinish
from layershuffle.errors import DataError
from layershuffle.swarm.server.limits import GatewayLimits

# Named, because Pillow would otherwise try every decoder that it has.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MAX_SCANS = 32
"""Of a JPEG. Progressive ones have about ten."""

_FORMATS_HINT = f"send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
# Not bytes within a scan: a stuffed zero, restarts, filling.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SCAN, _END, _TEMPORARY = 0xDA, 0xD9, 0x01


@dataclass(frozen=True)
class Decoder:
    """Turns files into a batch for one model."""

    view: ImageView
    limits: GatewayLimits

    def batch(self, files: Sequence[bytes], *, check: Callable[[], None] = lambda: None) -> Tensor:
        """Float32 `[files, channels, height, width]`. Raises `DataError` naming the image.

        `check` is called before every step that takes long, and may raise to end the work.
        """
        transform = PlainTransform(self.view)
        waiting: deque[tuple[str, Image.Image]] = deque()
        total = 0
        for number, file in enumerate(files, start=1):
            check()
            place = f"image {number} of {len(files)}"
            image = self._open(file, place)
            total += self._size(image.size, place)
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

    def decode(self, image: Image.Image, place: str) -> Image.Image:
        """The pixels of an opened image, in the mode that the model wants."""
        with _data_errors(place, self.limits):
            # Opening read the head alone; here the pixels are decoded.
            image.load()
            return to_mode(image, self.view.channels, place=place)

    def _open(self, file: bytes, place: str) -> Image.Image:
        """The image, of which no more than the head has been read."""
        if count_scans(file) > MAX_SCANS:
            raise DataError(
                f"The image has more than {MAX_SCANS} scans",
                place=place,
                hint="save it as a plain JPEG, or as a progressive one with the usual scans",
            )
        with _data_errors(place, self.limits):
            return Image.open(io.BytesIO(without_metadata(file)), formats=FORMATS)

    def _size(self, size: tuple[int, int], place: str) -> int:
        """Pixels of an image of this size, as it is or resized, whichever is more.

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
    """A PNG without the chunks that its pixels do not need; other files as they are.

    Pillow unpacks every compressed text and profile of a PNG. It bounds the texts, but not the
    number of profiles: 1 MB of them took it 4.8 s under the strictest limits it knows.
    """
    if not file.startswith(_PNG):
        return file
    parts, start = [_PNG], len(_PNG)
    while start + 8 <= len(file):
        kind = file[start + 4 : start + 8]
        end = start + 12 + int.from_bytes(file[start : start + 4])
        # Upper case marks chunks that no decoder may skip. Transparency is kept beside them: an
        # image is converted here as it was in training.
        if kind[:1].isupper() or kind == b"tRNS":
            parts.append(file[start:end])
        start = end
    return b"".join(parts)


def count_scans(file: bytes) -> int:
    """The scans of a JPEG, counted up to one more than `MAX_SCANS`; 0 for other files.

    libjpeg goes over the whole image once per scan, and 42 bytes are enough for one: a file of
    16 MB could keep it busy for hours.
    """
    count = 0
    marker = _MARKER.search(file, 2) if file.startswith(_JPEG) else None
    while marker is not None and count <= MAX_SCANS:
        kind, start = file[marker.start() + 1], marker.end()
        if kind == _END:
            break
        count += kind == _SCAN
        length = 0 if kind == _TEMPORARY else int.from_bytes(file[start : start + 2])
        marker = _MARKER.search(file, start + length)
    return count


@contextmanager
def _data_errors(place: str, limits: GatewayLimits) -> Iterator[None]:
    """What Pillow raises, as `DataError`."""
    try:
        yield
    except BOMBS as error:
        raise _too_large(str(error), place, limits.max_pixels) from error
    except DECODE_ERRORS as error:
        raise DataError("The image cannot be read", place=place, hint=_FORMATS_HINT) from error


def _too_large(what: str, place: str, most: int) -> DataError:
    return DataError(
        f"The image is too large ({what}; at most {most})",
        place=place,
        hint="shrink it; models look at a few hundred pixels per side",
    )
