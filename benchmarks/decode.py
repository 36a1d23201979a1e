"""Claim: training reads JPEG files faster than Pillow alone, and a cache of them faster still."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from PIL import Image

from layershuffle.bench.timing import SMOKE, Effort, Side, cpu_timed
from layershuffle.bench.workloads import JPEG_QUALITY, PHOTO, photograph
from layershuffle.data import DataOptions, ImageView, open_data
from layershuffle.data.cache import shrunk
from layershuffle.data.decode import decodes_jpeg, pixel_tensor, read_image, read_pixels
from layershuffle.data.transforms import PixelTransform, PlainTransform

VIEW = ImageView(
    channels=3, height=224, width=224, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic",
    crop_pct=0.875,
)  # fmt: skip
LARGE, CACHED = (4000, 3000), 256


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
    return PixelTransform(VIEW)(read_pixels(content, 3, place="a photograph"))


def by_both(content: bytes) -> torch.Tensor:
    """As training reads where torchvision decodes no JPEG."""
    return PixelTransform(VIEW)(pixel_tensor(read_image(content, 3, place="a photograph")))


def large_to_cache(content: bytes, least: int | None) -> Image.Image:
    """As `layershuffle cache` reads and shrinks."""
    return shrunk(read_image(content, 3, place="a photograph", least=least), CACHED)


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


def resized_to_jpeg(record: dict[str, Any]) -> dict[str, Any]:
    """For `Dataset.map`: the image shrunk, as the bytes of a JPEG file."""
    image = shrunk(record["image"].convert("RGB"), CACHED)
    return {"image": {"bytes": encoded(image), "path": None}}


def resized(record: dict[str, Any]) -> dict[str, Any]:
    """For `Dataset.map`: the image shrunk; `datasets` then stores a PNG file."""
    return {"image": shrunk(record["image"].convert("RGB"), CACHED)}


def against_datasets(
    originals: Sequence[Image.Image], effort: Effort, settings: dict[str, Any]
) -> Iterator[ClaimRow]:
    """The cache against copies of the same images made by `Dataset.map` and `save_to_disk`."""
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for part in ("train", "val"):
            for number, image in enumerate(originals):
                folder = root / "photos" / part / f"class-{number % 2}"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{number}.jpg").write_bytes(encoded(image))
                small = root / "cache" / part / folder.name / f"{number}.jpg"
                small.parent.mkdir(parents=True, exist_ok=True)
                small.write_bytes(encoded(shrunk(image, CACHED)))
        source = datasets.load_dataset(str(root / "photos"), cache_dir=str(root / "hf"))
        source.map(resized_to_jpeg).save_to_disk(str(root / "jpeg"))
        source.map(resized).save_to_disk(str(root / "png"))
        options = DataOptions(holdout=None)
        specs = {"cache": f"folder:{root / 'cache'}", "jpeg": f"hf:{root / 'jpeg'}"}
        specs["png"] = f"hf:{root / 'png'}"
        read = {
            name: open_data(spec, VIEW, options=options).splits["train"].dataset
            for name, spec in specs.items()
        }
        sides = {
            name: cpu_timed(lambda images=images: [images[n] for n in range(len(images))])
            for name, images in read.items()
        }
        for kind, how in (("jpeg", "its map function encodes JPEG"), ("png", "map resizes alone")):
            yield compare(
                f"hf: instead of the cache, {how}",
                "hf: / cache",
                a=sides[kind],
                b=sides["cache"],
                effort=effort,
                settings=settings,
            )


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Ratios of processor time on one core."""
    count = 2 if effort is SMOKE else 8
    originals = [photograph(seed) for seed in range(count)]
    files = [encoded(image) for image in originals]
    cached = [encoded(shrunk(image, CACHED)) for image in originals]
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
        facts={**difference(files), "torchvision decodes": decodes_jpeg()},
    )  # fmt: skip
    yield compare(
        "the same where Pillow has to decode", "Pillow / training without torchvision's decoder",
        a=over(files, by_pillow), b=over(files, by_both), effort=effort, settings=settings,
    )  # fmt: skip
    yield compare(
        "decoding alone", "Pillow / torchvision",
        a=over(files, lambda file: pixel_tensor(read_image(file, 3, place=""))),
        b=over(files, lambda file: read_pixels(file, 3, place="")), effort=effort,
        settings=settings,
    )  # fmt: skip
    yield compare(
        "training from a cache of 256 pixels", "original / cache",
        a=over(files, by_torch), b=over(cached, by_torch), effort=effort,
        bound=Bound("at_least", 2.0), settings=settings,
        facts={"kB of a cached file": round(np.mean([*map(len, cached)]) / 1e3)},
    )  # fmt: skip
    yield from against_datasets(originals, effort, settings)
    large = [encoded(photograph(0, (400, 300) if effort is SMOKE else LARGE))]
    yield compare(
        "a photograph of 12 megapixels into a cache", "decoded whole / decoded at a fraction",
        a=over(large, lambda file: large_to_cache(file, None)),
        b=over(large, lambda file: large_to_cache(file, 2 * CACHED)), effort=effort,
        bound=Bound("at_least", 2.0), settings={"size": LARGE},
    )  # fmt: skip


CLAIM = Claim(theme="decode", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
