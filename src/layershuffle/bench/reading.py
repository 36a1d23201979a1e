"""`bench input`: JPEG files through the loader that training uses."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader

from layershuffle.bench.choices import Chosen
from layershuffle.bench.report import Report, throughput
from layershuffle.bench.subjects import random_spec
from layershuffle.data import DataOptions, open_data
from layershuffle.machine import versions
from layershuffle.models import image_view, load
from layershuffle.training.fit import collate

PHOTO, FILES, QUALITY = (500, 375), 256, 90


def write_photographs(directory: Path, count: int) -> None:
    """Generated JPEG files of 500 x 375 in class folders under train and val."""
    for number in range(count):
        part, group = ("val" if number % 8 < 2 else "train"), number % 2
        folder = directory / part / f"class-{group}"
        folder.mkdir(parents=True, exist_ok=True)
        photograph(number).save(folder / f"{number}.jpg", quality=QUALITY)


def photograph(seed: int) -> Image.Image:
    """Soft shapes with grain: its file is about as large as that of a photograph."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (24, 32, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize(PHOTO, Image.Resampling.BICUBIC), np.float32)
    grain = draw.normal(0, 10, (*soft.shape[:2], 1))
    return Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8))


def bench_input(chosen: Chosen, *, files: int = FILES) -> Report:
    """Reading for `chosen.model`, whole passes; the first one, from a cold start, left out."""
    view = image_view(load(random_spec(chosen.model)))
    with tempfile.TemporaryDirectory(prefix="layershuffle-bench-") as place:
        write_photographs(Path(place), files)
        data = open_data(f"folder:{place}", view, options=DataOptions(holdout=None))
        split = data.splits["train"]
        loader = DataLoader(
            split.dataset,
            batch_size=min(chosen.batch, split.size or 1),
            num_workers=chosen.workers,
            collate_fn=collate,
            pin_memory=chosen.device == "cuda",
            persistent_workers=chosen.workers > 0,
        )
        seconds = [_pass(loader) for _ in range(1 + chosen.steps)][1:]
    return Report(
        kind="input",
        conditions=chosen.conditions(),
        rate=throughput(seconds, split.size or 0),
        facts={
            "processes": chosen.workers,
            "files": f"{split.size} JPEG files of {PHOTO[0]} x {PHOTO[1]}, quality {QUALITY}, to "
            f"{view.width} x {view.height}, read again and again",
        },
        versions=versions(),
    )


def _pass(loader: DataLoader[object]) -> float:
    begun = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begun
