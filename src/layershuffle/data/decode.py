"""Decode image files to pixels of a known mode, with errors that name the file.

Training uses `read_pixels`: torchvision decodes JPEGs with the model's channels (RGB or grey), and
Pillow everything else (`read_image`): CMYK, other file types, and files that torchvision refuses.
Both give the same bytes for the same JPEG. docs/decisions/011-input.md gives the reasons and the
gain.

All files (grey, palette, alpha, CMYK, 16 bits) become RGB or 8-bit grey. Transparency is dropped
and EXIF rotation ignored, as in torchvision's loader, so scores are comparable; 16-bit images are
scaled, not clipped as by Pillow's `convert`.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torchvision.io
from PIL import Image
from torch import Tensor

from layershuffle.errors import DataError, UsageError

# Errors of Pillow's decoders for damaged files. DecompressionBombWarning is only raised if warnings
# are errors; the size check below catches the same images otherwise.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
)
BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
MAX_PIXELS = 89_478_485  # Pillow's own default threshold: 268 MB as RGB

SKIP_HINT = "repair or delete the file, or pass --skip-corrupt to leave such images out"
NO_JPEG = "this torchvision decodes no JPEG: Pillow does, which takes about a fifth longer"


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
    """Whether the installed torchvision decodes JPEG, which is deprecated."""
    if not hasattr(torchvision.io, "decode_jpeg"):
        return False
    # The function may exist but fail, so a small image is tried.
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return _decoded(buffer.getvalue(), 3) is not None


def _content(path: Path, place: str | Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(error, place) from error


def _is_plain_jpeg(content: bytes, channels: int) -> bool:
    """Whether the header is that of a JPEG with the model's channels that is not too large."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            # torchvision's bytes equal Pillow's only without a conversion.
            small = image.width * image.height <= MAX_PIXELS
            return small and image.format == "JPEG" and image.mode == mode_for(channels)
    except (*BOMBS, *DECODE_ERRORS):
        return False  # Pillow will raise when it reads the file


def _decoded(content: bytes, channels: int) -> Tensor | None:
    """The pixels by torchvision; None if it refuses the file."""
    modes = torchvision.io.ImageReadMode
    with warnings.catch_warnings():
        # torchvision 0.29 warns that its decoders are deprecated. Without them there is NO_JPEG.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            # A bytearray, because torch warns about read-only memory.
            encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            pixels: Tensor = torchvision.io.decode_jpeg(
                encoded, mode=modes.RGB if channels == 3 else modes.GRAY
            )
        except RuntimeError:
            return None
    return pixels


def read_image(source: Path | bytes, channels: int, *, place: str | Path) -> Image.Image:
    """The image in `source` (a file or its bytes) as mode "RGB" (3 channels) or "L" (1 channel).

    Raises DataError, naming `place`, if it cannot be decoded or is too large to be one image.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > MAX_PIXELS:
                raise _bomb(f"{image.width}x{image.height} pixels", place)
            # Pillow opens files lazily, so this raises errors of damaged files within the `try`.
            image.load()
            return to_mode(image, channels, place=place)
    except BOMBS as error:
        raise _bomb(str(error), place) from error
    except DECODE_ERRORS as error:
        raise unreadable(error, place) from error


def unreadable(error: Exception, place: str | Path) -> DataError:
    """The error for an image that cannot be read because of `error`."""
    # The text of an OSError repeats the place.
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(f"Cannot read image ({reason})", place=place, hint=SKIP_HINT)


def to_mode(image: Image.Image, channels: int, *, place: str | Path | None) -> Image.Image:
    """A copy of the image as "RGB" or "L". Raises DataError if its pixel range is unknown."""
    if image.mode.startswith("I") or image.mode == "F":
        image = _eight_bits(image, place)
    if image.mode in ("P", "PA"):
        # A direct P -> RGB warns about palettes whose transparency is given as bytes.
        image = image.convert("RGBA")
    if channels == 1 and image.mode not in ("L", "1", "LA", "La"):
        image = image.convert("RGB")  # CMYK -> L exists, but skips the colour conversion
    return image.convert(mode_for(channels))


def mode_for(channels: int) -> str:
    """The Pillow mode of a view: "L" for 1 channel, "RGB" for 3. Raises UsageError for others."""
    modes = {1: "L", 3: "RGB"}
    if channels not in modes:
        raise UsageError(
            f"the model takes {channels} channels, but image files have 1 (grey) or 3 (RGB)",
            hint="use a model with 1 or 3 input channels",
        )
    return modes[channels]


def _eight_bits(image: Image.Image, place: str | Path | None) -> Image.Image:
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > 65535:
        raise DataError(
            f"pixels of mode {image.mode} have no known range",
            place=place,
            hint="convert the image to 8 or 16 bits per channel",
        )
    # 65535 / 257 = 255
    return Image.fromarray(((pixels.astype(np.int64) + 128) // 257).astype(np.uint8))


def _bomb(reason: str, place: str | Path) -> DataError:
    return DataError(
        f"image is too large to be decoded safely ({reason}; limit {MAX_PIXELS} pixels)",
        place=place,
        hint="shrink or delete the file, or pass --skip-corrupt to leave such images out",
    )
