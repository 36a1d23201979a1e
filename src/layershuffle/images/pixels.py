"""The one place where an image file becomes pixels, as a viewer shows it, whoever sent it.

Every format that Pillow decodes by itself is opened, and every image (grey, palette, alpha, CMYK,
16 bits) becomes RGB or 8-bit grey. It is turned as its EXIF orientation says; of an animation the
first picture is taken. Transparency is dropped, that is, the colours under it are shown, as by the
loaders of torchvision, timm and transformers. 16-bit values are scaled, not clipped as by Pillow's
`convert`.

Everything that makes a small file of a stranger expensive is checked before it is decoded. A file
of a few bytes can claim any size, a long thin image grows when its short side is enlarged, and some
files with few pixels are expensive nevertheless.
"""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from layershuffle.ground.errors import DataError, UsageError
from layershuffle.ground.text import one_line
from layershuffle.images.view import INTERPOLATIONS, ImageView

# What it warns of, `read_image` refuses.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Errors of Pillow's decoders for damaged files.
DECODE_ERRORS = (
    AttributeError,  # of SPIDER
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
)
MAX_PIXELS = 89_478_485  # Pillow's own default threshold: 268 MB as RGB
_PIECE = 1 << 20  # pixels of 16 bits that are scaled at a time
# Pillow's bounds on what a PNG file carries beside its pixels, which no viewer shows.
_LONG_TEXT = re.compile(r"MAX_TEXT_CHUNK|memory used in text chunks")
SKIP_HINT = "repair or delete the file, or pass --skip-corrupt to leave such images out"

# Pillow decodes these by another program, or not at all.
_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}

# Exif 2.32, tag 0x0112: what is left to do to show the image upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


_RESAMPLING = {name: Image.Resampling[name.upper()] for name in INTERPOLATIONS}


@cache
def formats() -> tuple[str, ...]:
    """The names of the formats that are opened, as Pillow calls them."""
    Image.init()
    return tuple(sorted(Image.OPEN.keys() - _NOT_DECODED))


@cache
def extensions() -> tuple[str, ...]:
    """The endings of the names of image files, in lower case: ".jpg", ".png" and others."""
    # Pillow opens a camera's .mpo as a JPEG file.
    kinds = {*formats(), "MPO"}
    endings = Image.registered_extensions()
    return tuple(ending for ending, kind in endings.items() if kind in kinds)


def read_image(source: Path | bytes, channels: int, *, place: str | Path) -> Image.Image:
    """The image in `source` (a file or its bytes) as mode "RGB" (3 channels) or "L" (1 channel).

    Raises DataError, naming `place`, if it cannot be decoded or is too large to be one image.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    with faults_named(place), Image.open(file, formats=formats()) as image:
        if image.width * image.height > MAX_PIXELS:
            raise DataError(
                f"The image has {image.width} x {image.height} pixels, at most {MAX_PIXELS}",
                place=place,
                hint="shrink it",
            )
        return decoded(image, channels, place=place)


@contextmanager
def faults_named(place: str | Path) -> Iterator[None]:
    """Within, an image that cannot be decoded is a DataError that names `place`."""
    try:
        yield
    except (Image.DecompressionBombError, *DECODE_ERRORS) as error:
        # The text of an OSError repeats the place, or names a buffer of this process.
        reason = getattr(error, "strerror", None) or one_line(error)
        if isinstance(error, UnidentifiedImageError):
            reason = "it is of no known format"
        hint = SKIP_HINT
        if _LONG_TEXT.search(reason):
            reason = "a text or colour profile beside its pixels is longer than Pillow reads"
            hint = "save the image again without its metadata; its pixels are whole"
        raise DataError(f"Cannot read image ({reason})", place=place, hint=hint) from error


def decoded(image: Image.Image, channels: int, *, place: str | Path | None) -> Image.Image:
    """An opened image, upright, as "RGB" or "L".

    Raises DataError if its pixel range is unknown, and one of `DECODE_ERRORS` if it is damaged.
    """
    return to_mode(upright(image), channels, place=place)


def upright(image: Image.Image) -> Image.Image:
    """An opened image, decoded and turned as its EXIF orientation says; the same object if there is
    nothing to turn. Raises one of `DECODE_ERRORS` if it is damaged."""
    # Pillow opens files lazily; some formats hold their EXIF data behind the pixels.
    image.load()
    turn = turn_of(image)
    if turn is None:
        return image
    return image.transpose(turn)


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """What is left to do to show an opened image upright, by the EXIF data read so far."""
    # ImageOps.exif_transpose writes the other EXIF tags again, and fails where one is damaged:
    # in 2 of 100 files with a changed byte, which viewers show.
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except DECODE_ERRORS:
        return None


def to_mode(image: Image.Image, channels: int, *, place: str | Path | None) -> Image.Image:
    """A copy of the image as "RGB" or "L". Raises DataError if its pixel range is unknown."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise DataError(
                f"pixels of mode {image.mode} have no known range",
                place=place,
                hint="convert the image to 8 or 16 bits per channel",
            )
        image = Image.fromarray(_eight_bits(values))
    if image.mode in ("P", "PA"):
        # A direct P -> RGB warns about palettes whose transparency is given as bytes.
        image = image.convert("RGBA")
    if channels == 1 and image.mode not in ("L", "1", "LA", "La", "RGB"):
        image = image.convert("RGB")  # CMYK -> L exists, but skips the colour conversion
    return image.convert(pillow_mode(channels))


def _eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Whole numbers from 0 to 65535, of any shape, divided by 257 and rounded: 0 to 255."""
    rounded = np.empty(values.size, np.uint8)
    flat = values.reshape(-1)
    # Piece by piece: all at once takes 16 bytes a pixel.
    for start in range(0, values.size, _PIECE):
        piece = flat[start : start + _PIECE].astype(np.int64)
        rounded[start : start + _PIECE] = (piece + 128) // 257
    return rounded.reshape(values.shape)


def pillow_mode(channels: int) -> str:
    """The Pillow mode of a view: "L" for 1 channel, "RGB" for 3. Raises UsageError for others."""
    modes = {1: "L", 3: "RGB"}
    if channels not in modes:
        raise UsageError(
            f"the model takes {channels} channels, but image files have 1 (grey) or 3 (RGB)",
            hint="use a model with 1 or 3 input channels",
        )
    return modes[channels]


# --- files of strangers ---------------------------------------------------------------------------

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
MAX_EXIF = 1 << 18
"""Most bytes of EXIF data; cameras write one segment of a JPEG, which has 64 KB. Pillow makes a
number of every 8 bytes of an orientation: 15 MB took 3 s."""
_STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}  # bytes a pixel in Pillow; else 4
_HEAD_READS = 4 * MAX_MARKERS  # two for a marker, one each for its length and its content

_PLAIN_HINT = "save it as a plain JPEG, or as a progressive one with the usual scans"
_FORMATS_HINT = f"send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
# Bytes within a scan are excluded: a stuffed zero, restarts, padding.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SCAN = 0xDA
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_END = 0xD9
_APPLICATIONS = range(0xE0, 0xF0)
# JFIF and Adobe say what the colours are, EXIF and XMP how it is turned.
_SHOWN = (0xE0, 0xE1, 0xEE)
_COMMENT = 0xFE
_BARE = (0xC8, 0xD8, _END, *range(0xF0, 0xFE))  # behind these Pillow expects no content
_EXIF = b"Exif\0\0"
_TEMPORARY = 0x01


def image_batch(
    file: bytes, view: ImageView, *, most_pixels: int
) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """The image in the file of a stranger, as float32 `[1, channels, height, width]`, and its
    (width, height) as it is stored.

    Raises `DataError` if it cannot be decoded, or if its sides, its pixels or the memory that it
    takes are beyond the bounds.
    """
    with _faults_of_strangers(most_pixels):
        # Counted is what is decoded: what is left out may stand between the bytes of a marker.
        content = without_metadata(file)
        scans, markers = count_markers(content)
        for count, most, kind in ((scans, MAX_SCANS, "scans"), (markers, MAX_MARKERS, "markers")):
            if count > most:
                raise DataError(f"The image has more than {most} {kind}", hint=_PLAIN_HINT)
        image = _opened(content)
        size = image.size
        del content  # else it would stay in memory until the end
        _check_size(image, view, scans=scans, most_pixels=most_pixels)
        # Opening read the head alone; here the pixels are decoded.
        shown = upright(image)
        if shown is not image:
            image.close()  # three copies of a photograph would be in memory
        pixels = shown
        if shown.mode != pillow_mode(view.channels):
            pixels = to_mode(shown, view.channels, place=None)
            shown.close()
    return normalised(view_pixels(pixels, view), view)[None], size


def _opened(file: bytes) -> Image.Image:
    """The image in the file of a stranger, without its metadata, of which the head is read.

    Raises `DataError` for more EXIF data than `MAX_EXIF`, and `DECODE_ERRORS`.
    """
    content = _BoundedFile(file)
    image = Image.open(content, formats=FORMATS)
    content.left = None  # a decoder reads in large pieces, and the pixels are bounded
    _check_exif(len(image.info.get("exif", b"")))  # of a WebP
    return image


def _check_exif(size: int) -> None:
    """Refuse EXIF data of more than `MAX_EXIF` bytes by a `DataError`."""
    if size > MAX_EXIF:
        raise DataError(
            f"The image has more than {MAX_EXIF} bytes of EXIF data",
            hint="save it without its metadata",
        )


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
    # libjpeg keeps the coefficients of all pixels until the last scan, of a progressive file also
    # if there is one scan alone.
    if scans > 1 or image.info.get("progressive"):
        decoding += 2 * len(image.getbands())
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
    """A JPEG or PNG without the parts that its pixels do not need; other files unchanged.

    Raises `DataError` for more EXIF data than `MAX_EXIF` and for a JPEG with `MAX_MARKERS` before
    its first scan, and `ValueError` for a PNG with more than `MAX_CHUNKS` chunks of any kind.
    """
    if file.startswith(_PNG):
        return _png_without_metadata(file)
    if file.startswith(_JPEG):
        return _jpeg_without_metadata(file)
    return file


def _png_without_metadata(file: bytes) -> bytes:
    """A PNG without the chunks that its pixels do not need.

    Pillow unpacks every compressed text and profile. It bounds the texts, but not the number of
    profiles: 1 MB of them took 4.8 s under its strictest limits.
    """
    parts = [_PNG]
    start = len(_PNG)
    chunks = 0
    # Data behind the end is never read.
    while start + 8 <= len(file) and not parts[-1].startswith(b"IEND", 4):
        chunks += 1
        if chunks > MAX_CHUNKS:
            raise ValueError("the image has too many chunks")
        kind = file[start + 4 : start + 8]
        size = int.from_bytes(file[start : start + 4])
        end = start + 12 + size
        if kind == b"eXIf":
            _check_exif(size)
        # Upper case marks chunks that no decoder may skip. Transparency and orientation are kept
        # too, because images are converted as in training.
        if kind[:1].isupper() or kind in (b"tRNS", b"eXIf"):
            parts.append(file[start:end])
        start = end
    return b"".join(parts)


def _jpeg_without_metadata(file: bytes) -> bytes:
    """A JPEG without the segments that its pixels do not need.

    Pillow goes over the resources of an editor in Python, 15 MB of them in 0.7 s, and puts the
    pieces of EXIF data together one by one.
    """
    parts: list[bytes] = []
    start = 0
    exif = 0
    for _ in range(MAX_MARKERS):
        marker = _MARKER.search(file, start or 2)
        kind = _SCAN if marker is None else file[marker.start() + 1]
        if marker is None or kind == _SCAN:
            break
        place = marker.end()
        end = place
        if kind not in _BARE:
            end += int.from_bytes(file[place : place + 2])
        if kind == _SHOWN[1] and file.startswith(_EXIF, place + 2):
            exif += end - place
            _check_exif(exif)
        if kind == _COMMENT or (kind in _APPLICATIONS and kind not in _SHOWN):
            # Bytes that fill up would become the beginning of a marker with what follows.
            parts.append(file[start : marker.start()].rstrip(b"\xff"))
        else:
            parts.append(file[start:end])
        start = end
    else:
        raise DataError(f"The image has more than {MAX_MARKERS} markers", hint=_PLAIN_HINT)
    return b"".join([*parts, file[start:]])


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
    16 MB could keep it busy for hours. A marker takes four bytes, and one step of this loop. A
    first scan without all components counts twice: another is expected, whether or not it comes.
    """
    scans = 0
    components = 0
    markers = 0
    marker = _MARKER.search(file, 2) if file.startswith(_JPEG) else None
    while marker is not None and scans <= MAX_SCANS and markers <= MAX_MARKERS:
        kind = file[marker.start() + 1]
        start = marker.end()
        if kind == _END:
            break
        if kind in _FRAMES:
            components = int.from_bytes(file[start + 7 : start + 8])
        if kind == _SCAN:
            lacks = not scans and int.from_bytes(file[start + 2 : start + 3]) < components
            scans += 2 if lacks else 1
        markers += 1
        length = 0 if kind == _TEMPORARY else int.from_bytes(file[start : start + 2])
        marker = _MARKER.search(file, start + length)
    return scans, markers


def _too_large(size: str, most: str) -> DataError:
    return DataError(
        f"The image is too large ({size}; at most {most})",
        hint="shrink it; models look at a few hundred pixels per side",
    )


# --- what a model sees of an image ----------------------------------------------------------------


def uncropped_size(view: ImageView) -> tuple[int, int]:
    """(width, height) of which the crop keeps the share `crop_pct`."""
    # 43 / (43 / 50) is slightly less than 50, but must not become 49.
    width = math.floor(view.width / view.crop_pct + 1e-9)
    height = math.floor(view.height / view.crop_pct + 1e-9)
    return width, height


def resized_size(size: tuple[int, int], view: ImageView) -> tuple[int, int]:
    """(width, height) of an image of `size` before the crop, rounded as in timm.

    "squash": the uncropped size; "crop": the smallest size that covers it. Raises DataError for a
    long thin image, which the enlargement of its short side would make too large.
    """
    width, height = size
    goal_width, goal_height = uncropped_size(view)
    if view.resize == "squash":
        return goal_width, goal_height
    # For squares timm uses torchvision's Resize, which rounds the longer side down.
    whole = int if goal_width == goal_height else round
    if goal_width * height >= goal_height * width:  # the width is the tight side
        new_width = goal_width
        new_height = max(goal_height, whole(goal_width * height / width))
    else:
        new_width = max(goal_width, whole(goal_height * width / height))
        new_height = goal_height
    if new_width * new_height > MAX_PIXELS:
        raise DataError(
            f"The image has {width} x {height} pixels; with its short side at the model's size "
            f"{new_width} x {new_height}, at most {MAX_PIXELS}",
            hint="crop it",
        )
    return new_width, new_height


def view_pixels(image: Image.Image, view: ImageView) -> NDArray[np.uint8]:
    """Pixels `[C, H, W]` of an "L" or "RGB" image, resized by Pillow and cropped to the view.

    Bit-equal to timm's transform. `view.resize` decides which sides are resized; small images are
    enlarged.
    """
    width, height = resized_size(image.size, view)
    # Resizing only the cropped part (`box=`) is 1.4 times as fast, but its boxes are 32-bit
    # floats, and 1 byte in 30,000 differs. Scores must not change.
    pixels = channels_first(image.resize((width, height), _RESAMPLING[view.interpolation]))
    return pixels[:, view_rows(height, view.height), view_rows(width, view.width)]


def channels_first(image: Image.Image) -> NDArray[np.uint8]:
    """Pixels `[C, H, W]` of an "L" or "RGB" image; in memory the channels may come last."""
    # A copy. Handing over Pillow's memory through Arrow made no measurable difference.
    pixels = np.array(image)
    if pixels.ndim == 2:
        return pixels[None]
    return pixels.transpose(2, 0, 1)


def view_rows(length: int, kept: int) -> slice:
    """The middle `kept` of `length` rows, rounded as in torchvision's centre crop."""
    first = round((length - kept) / 2)
    return slice(first, first + kept)


def normalised(pixels: NDArray[np.uint8], view: ImageView) -> NDArray[np.float32]:
    """Pixels `[C, H, W]` as their model takes them, float32: (pixels / 255 - mean) / std."""
    mean = np.array(view.mean, np.float32).reshape(-1, 1, 1)
    std = np.array(view.std, np.float32).reshape(-1, 1, 1)
    values: NDArray[np.float32] = (pixels.astype(np.float32) / np.float32(255) - mean) / std
    return values
