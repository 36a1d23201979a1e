"""Image files to uint8 tensors by the fastest decoder at hand: what training reads through.

torchvision decodes JPEGs that hold what the model takes (RGB, or grey for one channel), Pillow all
the rest (`layershuffle.data.images`): CMYK, other file types, and files that torchvision refuses.
Both give the same bytes for the same JPEG. Why, and what it is worth: docs/decisions/011-input.md.
"""

from __future__ import annotations

import io
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torchvision.io
from PIL import Image
from torch import Tensor

from layershuffle.data.images import (
    BOMBS,
    DECODE_ERRORS,
    MAX_PIXELS,
    mode_for,
    read_image,
    unreadable,
)

NO_JPEG = "this torchvision decodes no JPEG: Pillow does, which takes about a quarter longer"


def read_pixels(source: Path | bytes, channels: int, *, place: str | Path) -> Tensor:
    """The image in `source` (a file or its bytes) as pixels uint8 [channels, H, W].

    Raises DataError, naming `place`, if it cannot be decoded or is too large to be one image.
    """
    content = source if isinstance(source, bytes) else _content(source, place)
    if decodes_jpeg() and _is_plain_jpeg(content, channels):
        pixels = _decoded(content, channels)
        if pixels is not None:
            return pixels
    return pixel_tensor(read_image(source, channels, place=place))


def pixel_tensor(image: Image.Image) -> Tensor:
    """Pixels uint8 [C, H, W] of an "L" or "RGB" image; in memory the channels may come last."""
    # A copy. Handing over Pillow's memory through Arrow made no measurable difference.
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


@cache
def decodes_jpeg() -> bool:
    """Whether the installed torchvision decodes JPEG; it has announced to give that up."""
    if not hasattr(torchvision.io, "decode_jpeg"):
        return False
    # The function may exist and still raise when it is called, so a small image is tried.
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return _decoded(buffer.getvalue(), 3) is not None


def _content(path: Path, place: str | Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(error, place) from error


def _is_plain_jpeg(content: bytes, channels: int) -> bool:
    """By its header alone: a JPEG with the model's channels that is not too large."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            # No conversion is left to torchvision: only then are its bytes equal to Pillow's.
            small = image.width * image.height <= MAX_PIXELS
            return small and image.format == "JPEG" and image.mode == mode_for(channels)
    except (*BOMBS, *DECODE_ERRORS):
        return False  # Pillow says what is wrong when it reads the whole file


def _decoded(content: bytes, channels: int) -> Tensor | None:
    """None if torchvision refuses the file."""
    modes = torchvision.io.ImageReadMode
    with warnings.catch_warnings():
        # torchvision 0.29 warns that its decoders will go. The note NO_JPEG says so once they have.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            # A bytearray, because torch warns about memory that it may not write to.
            encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            pixels: Tensor = torchvision.io.decode_jpeg(
                encoded, mode=modes.RGB if channels == 3 else modes.GRAY
            )
        except RuntimeError:
            return None
    return pixels
