"""Pictures of random pixels, and their files."""

import io

import numpy as np
from PIL import Image

from layershuffle.images.view import ImageView


def noise(seed: int, *, size: tuple[int, int] = (8, 8)) -> Image.Image:
    """Coloured noise; `size` is (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The image as a file of that format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


# The view of the bundled models, close to the mean and standard deviation of the canvases.
DIGIT_VIEW = ImageView(
    channels=1, height=12, width=20, mean=(0.2,), std=(0.35,), interpolation="bilinear"
)
