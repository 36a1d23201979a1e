"""Claim: training reads JPEG files faster than Pillow alone, and a cache of them faster still."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from PIL import Image

from layershuffle.bench.claims import Claim, run_claim
from layershuffle.bench.pairs import SMOKE, Bound, Effort, Row, cpu_timed, paired
from layershuffle.data import ImageView
from layershuffle.data.cache import shrunk
from layershuffle.data.decode import decodes_jpeg, pixel_tensor, read_pixels
from layershuffle.data.images import read_image
from layershuffle.data.transforms import PixelTransform, PlainTransform

VIEW = ImageView(
    channels=3, height=224, width=224, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic",
    crop_pct=0.875,
)  # fmt: skip
PHOTO, LARGE, CACHED = (500, 375), (4000, 3000), 256
QUALITY = 90


def photo(seed: int, size: tuple[int, int]) -> Image.Image:
    """Soft shapes with fine grain: a file as large as a photograph of that size has."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (size[1] // 16 + 2, size[0] // 16 + 2, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.float32)
    grain = draw.normal(0, 10, (*soft.shape[:2], 1))
    return Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image) -> bytes:
    """The JPEG file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def by_pillow(content: bytes) -> torch.Tensor:
    """As evaluation reads."""
    return PlainTransform(VIEW)(read_image(content, 3, place="a photograph"))


def by_torch(content: bytes) -> torch.Tensor:
    """As training reads."""
    return PixelTransform(VIEW)(read_pixels(content, 3, place="a photograph"))


def by_both(content: bytes) -> torch.Tensor:
    """As training reads where torchvision decodes no JPEG."""
    return PixelTransform(VIEW)(pixel_tensor(read_image(content, 3, place="a photograph")))


def large_to_cache(content: bytes, least: int | None) -> Image.Image:
    """As `layershuffle cache` reads and shrinks."""
    return shrunk(read_image(content, 3, place="a photograph", least=least), CACHED)


def over(files: Sequence[bytes], work: Callable[[bytes], object]) -> Callable[[], float]:
    """The seconds that `work` takes for all files."""
    return cpu_timed(lambda: [work(one) for one in files])


def difference(files: Sequence[bytes]) -> dict[str, float]:
    """How far training's pixels are from evaluation's, of 255."""
    off = [(by_torch(one).int() - by_pillow(one).int()).abs() for one in files]
    every = torch.stack(off).float()
    return {
        "most": every.max().item(),
        "share of bytes": round((every > 0).float().mean().item(), 5),
    }


def rows(effort: Effort) -> Iterator[Row]:
    """Ratios of processor time on one core."""
    count = 1 if effort is SMOKE else 8
    originals = [photo(seed, PHOTO) for seed in range(count)]
    files = [encoded(one) for one in originals]
    cached = [encoded(shrunk(one, CACHED)) for one in originals]
    settings = {
        "images": count,
        "size": PHOTO,
        "view": 224,
        "kB": round(np.mean([*map(len, files)]) / 1e3),
    }
    yield paired(
        "photograph of 500x375, decoded, shrunk and cropped", "Pillow / training",
        a=over(files, by_pillow), b=over(files, by_torch), effort=effort,
        bound=Bound("at_least", 1.3), settings=settings,
        facts={**difference(files), "torchvision decodes": decodes_jpeg()},
    )  # fmt: skip
    yield paired(
        "the same where Pillow has to decode", "Pillow / training without torchvision's decoder",
        a=over(files, by_pillow), b=over(files, by_both), effort=effort, settings=settings,
    )  # fmt: skip
    yield paired(
        "decoding alone", "Pillow / torchvision",
        a=over(files, lambda one: pixel_tensor(read_image(one, 3, place=""))),
        b=over(files, lambda one: read_pixels(one, 3, place="")), effort=effort, settings=settings,
    )  # fmt: skip
    yield paired(
        "training from a cache of 256 pixels", "original / cache",
        a=over(files, by_torch), b=over(cached, by_torch), effort=effort,
        bound=Bound("at_least", 2.0), settings=settings,
        facts={"kB of a cached file": round(np.mean([*map(len, cached)]) / 1e3)},
    )  # fmt: skip
    large = [encoded(photo(0, (400, 300) if effort is SMOKE else LARGE))]
    yield paired(
        "a photograph of 12 megapixels into a cache", "decoded whole / decoded at a fraction",
        a=over(large, lambda one: large_to_cache(one, None)),
        b=over(large, lambda one: large_to_cache(one, 2 * CACHED)), effort=effort,
        bound=Bound("at_least", 2.0), settings={"size": LARGE},
    )  # fmt: skip


CLAIM = Claim(theme="decode", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
