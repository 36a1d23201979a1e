"""An image file becomes pixels as a viewer shows it, and then what a model sees of them.

Every format that Pillow decodes by itself is opened, and every image (grey, palette, alpha, CMYK,
16 bits) becomes RGB or 8-bit grey. It is turned as its EXIF orientation says; of an animation the
first picture is taken. Transparency is dropped, that is, the colours under it are shown, as by the
loaders of torchvision, timm and transformers. 16-bit values are scaled, not clipped as by Pillow's
`convert`.

The files of `read_image` are a person's own. `images/strangers` decodes what a gateway receives.
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
