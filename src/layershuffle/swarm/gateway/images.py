"""From the bytes of image files to what the model's view wants. Runs in a thread.

The format, the pixels, and the size after resizing are checked before anything is decoded: a file
of a few bytes can claim any size, and a long thin image grows when its short side is enlarged.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from layershuffle.data.images import BOMBS, DECODE_ERRORS, to_mode
from layershuffle.data.transforms import PlainTransform, resized_size
from layershuffle.data.view import Finish, ImageView
from layershuffle.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_FORMATS_HINT = f"send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


@dataclass(frozen=True)
class Decoder:
    """Turns files into a batch for one model."""

    view: ImageView
    resize: Literal["crop", "squash"]
    max_pixels: int

    def batch(self, files: Sequence[bytes]) -> Tensor:
        """Float32 `[files, channels, height, width]`. Raises `DataError` naming the image."""
        transform = PlainTransform(self.view, resize=self.resize)
        pixels = [
            transform(self._image(file, place=f"image {number} of {len(files)}"))
            for number, file in enumerate(files, start=1)
        ]
        return Finish(self.view)(torch.stack(pixels))

    def _image(self, file: bytes, *, place: str) -> Image.Image:
        try:
            with Image.open(io.BytesIO(file), formats=FORMATS) as image:
                self._check(image.size, place)
                image.load()
                return to_mode(image, self.view.channels, place=place)
        except BOMBS as error:
            raise self._too_large(str(error), place) from error
        except DECODE_ERRORS as error:
            raise DataError("The image cannot be read", place=place, hint=_FORMATS_HINT) from error

    def _check(self, size: tuple[int, int], place: str) -> None:
        width, height = size
        if width * height > self.max_pixels:
            raise self._too_large(f"{width}x{height} pixels", place)
        if self.resize == "crop":
            width, height = resized_size(size, self.view)
            if width * height > self.max_pixels:
                raise self._too_large(f"{width}x{height} pixels at the model's size", place)

    def _too_large(self, what: str, place: str) -> DataError:
        return DataError(
            f"The image is too large ({what}; at most {self.max_pixels})",
            place=place,
            hint="shrink it; models look at a few hundred pixels per side",
        )
