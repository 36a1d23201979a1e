"""Claim: training resizes photographs faster than Pillow would, and reads small ones faster."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from _clocks import SMOKE, Effort, Side, cpu_timed
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from PIL import Image

from layershuffle.data import ImageView
from layershuffle.data.transforms import PixelTransform, PlainTransform
from layershuffle.images.pixels import read_image

VIEW = ImageView(
    channels=3, height=224, width=224, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic",
    crop_pct=0.875,
)  # fmt: skip
SMALL = 256
PHOTO, JPEG_QUALITY = (500, 375), 90


def photograph(seed: int) -> Image.Image:
    """An image of soft shapes with grain, whose JPEG is about as large as that of a photograph."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (PHOTO[1] // 16 + 1, PHOTO[0] // 16 + 1, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize(PHOTO, Image.Resampling.BICUBIC), np.float32)
    grain = draw.normal(0, 10, (*soft.shape[:2], 1))
    return Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image) -> bytes:
    """The JPEG file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def by_pillow(content: bytes) -> torch.Tensor:
    """As evaluation reads."""
    return PlainTransform(VIEW)(read_image(content, 3, place="a photograph"))


def by_torch(content: bytes) -> torch.Tensor:
    """As training reads."""
    return PixelTransform(VIEW)(read_image(content, 3, place="a photograph"))


def over(files: Sequence[bytes], work: Callable[[bytes], object]) -> Side:
    """The seconds that `work` takes for all files."""
    return cpu_timed(lambda: [work(file) for file in files])


def difference(files: Sequence[bytes]) -> dict[str, float]:
    """How far training's pixels are from evaluation's, of 255."""
    off = [(by_torch(file).int() - by_pillow(file).int()).abs() for file in files]
    every = torch.stack(off).float()
    return {
        "most": every.max().item(),
        "share of bytes": round((every > 0).float().mean().item(), 5),
    }


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Ratios of processor time on one core."""
    count = 2 if effort is SMOKE else 8
    originals = [photograph(seed) for seed in range(count)]
    files = [encoded(image) for image in originals]
    shorter = min(PHOTO)
    size = tuple(round(side * SMALL / shorter) for side in PHOTO)
    small = [encoded(image.resize(size, Image.Resampling.BICUBIC)) for image in originals]
    settings = {
        "images": count,
        "size": PHOTO,
        "view": 224,
        "kB": round(np.mean([*map(len, files)]) / 1e3),
    }
    yield compare(
        "photograph of 500x375, decoded, shrunk and cropped", "Pillow / training",
        a=over(files, by_pillow), b=over(files, by_torch), effort=effort,
        bound=Bound("at_least", 1.3), settings=settings,
        facts=difference(files),
    )  # fmt: skip
    yield compare(
        "training from copies of 256 pixels", "original / copy",
        a=over(files, by_torch), b=over(small, by_torch), effort=effort,
        bound=Bound("at_least", 2.0), settings=settings,
        facts={"kB of a copy": round(np.mean([*map(len, small)]) / 1e3)},
    )  # fmt: skip


CLAIM = Claim(theme="decode", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
