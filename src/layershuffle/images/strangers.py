"""The image in a file that a stranger sent to a gateway, decoded within bounds.

Everything that makes a small file expensive is checked before it is decoded. A file of a few bytes
can claim any size, a long thin image grows when its short side is enlarged, and some files with few
pixels are expensive nevertheless. The pixels are then those of `images/pixels`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from layershuffle.ground.errors import DataError
from layershuffle.images.pixels import (
    DECODE_ERRORS,
    normalised,
    pillow_mode,
    resized_size,
    to_mode,
    turn_of,
    upright,
    view_pixels,
)
from layershuffle.images.view import ImageView

# Named, because Pillow would otherwise try every decoder that it has. AVIF is missing: its decoder
# believes the compressed stream, not the size in the head that is checked here.
FORMATS = ("JPEG", "PNG", "WEBP")
MOST_SIDE = 16_384
"""Most pixels of a side of an image. Resizing goes over each side of the image by itself."""
MOST_BYTES = 150_000_000
"""Most bytes that an image may take at a time, in addition to its file, while it is decoded and
resized. A photograph that has to be turned takes 8 a pixel, so it has 18 million pixels at most."""
MAX_SCANS = 32
"""Most scans of a JPEG. Progressive ones have about ten."""
MAX_MARKERS = 2000
"""Most markers of a JPEG. Cameras write about twenty; 16 MB have 250 if all is metadata."""
MAX_CHUNKS = 10_000
"""Most chunks of a PNG. 16 MB have 2,000 as libpng writes them, and 1,400,000 if all are empty."""
_STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}  # bytes a pixel in Pillow; else 4
_HEAD_READS = 4 * MAX_MARKERS  # two for a marker, one each for its length and its content

_PLAIN_HINT = "save it as a plain JPEG, or as a progressive one with the usual scans"
_FORMATS_HINT = f"send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
# Bytes within a scan are excluded: a stuffed zero, restarts, padding.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SCAN = 0xDA
_END = 0xD9
_TEMPORARY = 0x01


def image_batch(file: bytes, view: ImageView, *, most_pixels: int) -> NDArray[np.float32]:
    """The image in the file of a stranger, as float32 `[1, channels, height, width]`.

    Raises `DataError` if it cannot be decoded, or if its sides, its pixels or the memory that it
    takes are beyond the bounds.
    """
    scans, markers = count_markers(file)
    for count, most, kind in ((scans, MAX_SCANS, "scans"), (markers, MAX_MARKERS, "markers")):
        if count > most:
            raise DataError(f"The image has more than {most} {kind}", hint=_PLAIN_HINT)
    with _faults_of_strangers(most_pixels):
        content = _BoundedFile(without_metadata(file))
        image = Image.open(content, formats=FORMATS)
        content.left = None  # a decoder reads in large pieces, and the pixels are bounded
        _check_size(image, view, scans=scans, most_pixels=most_pixels)
        # Opening read the head alone; here the pixels are decoded.
        shown = upright(image)
        if shown is not image:
            image.close()  # three copies of a photograph would be in memory
        pixels = shown
        if shown.mode != pillow_mode(view.channels):
            pixels = to_mode(shown, view.channels, place=None)
            shown.close()
    return normalised(view_pixels(pixels, view), view)[None]


def image_size(file: bytes, *, most_pixels: int) -> tuple[int, int]:
    """(width, height) of the image in the file of a stranger as it is stored, by its head alone.

    Raises `DataError` if the head cannot be read.
    """
    with _faults_of_strangers(most_pixels):
        return Image.open(_BoundedFile(without_metadata(file)), formats=FORMATS).size


@contextmanager
def _faults_of_strangers(most_pixels: int) -> Iterator[None]:
    """Within, an image that cannot be read, or is too large for Pillow, is a `DataError`."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise _too_large(str(error), f"{most_pixels} pixels") from error
    except DECODE_ERRORS as error:
        raise DataError("The image cannot be read", hint=_FORMATS_HINT) from error


def _check_size(image: Image.Image, view: ImageView, *, scans: int, most_pixels: int) -> None:
    """Raises `DataError` if sides, pixels or memory of the image are beyond the bounds.

    They are checked as the image is, and as it is resized.
    """
    width, height = image.size
    if max(width, height) > MOST_SIDE:
        raise _too_large(f"{width}x{height} pixels", f"{MOST_SIDE} a side")
    if width * height > most_pixels:
        raise _too_large(f"{width}x{height} pixels", f"{most_pixels}")
    # A long thin image grows when its short side is brought to the model's size. Both orientations
    # are checked, because it may be turned.
    for size in (image.size, image.size[::-1]):
        new_width, new_height = resized_size(size, view)
        if new_width * new_height > most_pixels:
            raise _too_large(
                f"{new_width}x{new_height} pixels at the model's size", f"{most_pixels}"
            )
        needed = decoding_bytes(
            image,
            size=size,
            resized=(new_width, new_height),
            scans=scans,
            channels=view.channels,
        )
        if needed > MOST_BYTES:
            raise _too_large(
                f"it takes {needed / 1e6:.0f} MB to decode and resize", f"{MOST_BYTES / 1e6:.0f} MB"
            )


def decoding_bytes(
    image: Image.Image,
    *,
    size: tuple[int, int],
    resized: tuple[int, int],
    scans: int,
    channels: int,
) -> int:
    """The most bytes that an opened image takes at a time from its decoding to its resizing.

    `size` and `resized`: its (width, height), upright and for the model, which takes so many
    `channels`; `scans`: of a JPEG.
    """
    width, height = size
    new_width, new_height = resized
    area = width * height
    stored = _STORED.get(image.mode, 4)
    decoding = stored
    if image.format == "WEBP":
        decoding += 12  # the frame, the one before, and what is handed over
    if scans > 1:
        decoding += 2 * len(image.getbands())  # the coefficients of all pixels, until the last scan
    # Only of a JPEG the head says it: other files may have it behind the pixels.
    upright = image.format == "JPEG" and turn_of(image) is None
    turning = 0 if upright else 2 * stored
    converting = stored + _converted_bytes(image.mode, channels)
    # Columns first, then rows; the result is copied twice until it is an array.
    resizing = 4 * (area + new_width * height) + (4 + 2 * 3) * new_width * new_height
    return max(area * max(decoding, turning, converting), resizing)


def _converted_bytes(mode: str, channels: int) -> int:
    """Bytes a pixel that `to_mode` holds at most, beside the image that it is given."""
    target = _STORED.get(pillow_mode(channels), 4)
    if mode == pillow_mode(channels):
        return 0
    if mode in ("P", "PA"):
        return 8  # through RGBA
    if mode.startswith("I;16"):
        return 2 + 1 + target  # its numbers, and their eight bits
    if channels == 1 and mode not in ("1", "LA", "La", "RGB"):
        return 4 + target  # through RGB
    return target


def without_metadata(file: bytes) -> bytes:
    """A PNG without the chunks that its pixels do not need; other files unchanged.

    Pillow unpacks every compressed text and profile of a PNG. It bounds the texts, but not the
    number of profiles: 1 MB of them took 4.8 s under its strictest limits. Raises
    `ValueError` where there are more than `MAX_CHUNKS` chunks of any kind.
    """
    if not file.startswith(_PNG):
        return file
    parts = [_PNG]
    start = len(_PNG)
    chunks = 0
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
        """Read as `io.BytesIO.read` does. Raises `ValueError` if the header is too long."""
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
    scans = 0
    markers = 0
    marker = _MARKER.search(file, 2) if file.startswith(_JPEG) else None
    while marker is not None and scans <= MAX_SCANS and markers <= MAX_MARKERS:
        kind = file[marker.start() + 1]
        start = marker.end()
        if kind == _END:
            break
        scans += kind == _SCAN
        markers += 1
        length = 0 if kind == _TEMPORARY else int.from_bytes(file[start : start + 2])
        marker = _MARKER.search(file, start + length)
    return scans, markers


def _too_large(size: str, most: str) -> DataError:
    return DataError(
        f"The image is too large ({size}; at most {most})",
        hint="shrink it; models look at a few hundred pixels per side",
    )
