"""From the bytes of image files to what the model's view wants. Runs in a thread.

The format, the pixels, and the size after resizing are checked before anything is decoded: a file
of a few bytes can claim any size, and a long thin image grows when its short side is enlarged. The
pixels of all images together are bounded as well: sixteen files of 70 kB can hold 400 million.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from layershuffle.data.images import BOMBS, DECODE_ERRORS, to_mode
from layershuffle.data.transforms import PlainTransform, resized_size
from layershuffle.data.view import Finish, ImageView
from layershuffle.errors import DataError
from layershuffle.swarm.server.bombs import MOST_SCANS, lean, scans_of
from layershuffle.swarm.server.limits import GatewayLimits

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_FORMATS_HINT = f"send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


@dataclass(frozen=True)
class Decoder:
    """Turns files into a batch for one model."""

    view: ImageView
    resize: Literal["crop", "squash"]
    limits: GatewayLimits

    def batch(self, files: Sequence[bytes], *, check: Callable[[], None] = lambda: None) -> Tensor:
        """Float32 `[files, channels, height, width]`. Raises `DataError` naming the image.

        `check` is called before every step that takes long, and may raise to end the work.
        """
        transform = PlainTransform(self.view, resize=self.resize)
        waiting = self._looked_at(files, check)
        pixels = []
        while waiting:
            check()
            place, image = waiting.popleft()
            pixels.append(transform(self._decoded(image, place)))
        return Finish(self.view)(torch.stack(pixels))

    def _looked_at(
        self, files: Sequence[bytes], check: Callable[[], None]
    ) -> deque[tuple[str, Image.Image]]:
        """Every image with its place, none decoded yet, and all together within the limits."""
        looked_at: deque[tuple[str, Image.Image]] = deque()
        total = 0
        for number, file in enumerate(files, start=1):
            check()
            place = f"image {number} of {len(files)}"
            image = self._opened(file, place)
            total += self._size(image.size, place)
            if total > self.limits.max_request_pixels:
                raise self._too_many(total, place)
            looked_at.append((place, image))
        return looked_at

    def _opened(self, file: bytes, place: str) -> Image.Image:
        """The image, of which no more than the head has been read."""
        if scans_of(file) > MOST_SCANS:
            raise DataError(
                f"The image has more than {MOST_SCANS} scans",
                place=place,
                hint="save it as a plain JPEG, or as a progressive one with the usual scans",
            )
        with _told(place, self.limits):
            return Image.open(io.BytesIO(lean(file)), formats=FORMATS)

    def _decoded(self, image: Image.Image, place: str) -> Image.Image:
        with _told(place, self.limits):
            image.load()
            return to_mode(image, self.view.channels, place=place)

    def _size(self, size: tuple[int, int], place: str) -> int:
        """Pixels of an image of this size, as it is or resized. Raises `DataError` if too many."""
        most = self.limits.max_pixels
        width, height = size
        if width * height > most:
            raise _too_large(f"{width}x{height} pixels", place, most)
        resized = 0
        if self.resize == "crop":
            across, down = resized_size(size, self.view)
            resized = across * down
            if resized > most:
                raise _too_large(f"{across}x{down} pixels at the model's size", place, most)
        return max(width * height, resized)

    def _too_many(self, total: int, place: str) -> DataError:
        return DataError(
            f"The images of the request have too many pixels together ({total} and more; at most "
            f"{self.limits.max_request_pixels})",
            place=place,
            hint="send several requests, or shrink the images",
        )


@contextmanager
def _told(place: str, limits: GatewayLimits) -> Iterator[None]:
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
