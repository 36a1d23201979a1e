"""`bench input`: JPEG files through the loader that training uses."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Sampler

from layershuffle.bench.choices import Chosen
from layershuffle.bench.report import Report, throughput
from layershuffle.bench.subjects import random_spec
from layershuffle.data import DataOptions, open_data
from layershuffle.machine import versions
from layershuffle.models import image_view, load

PHOTO, FILES, QUALITY = (500, 375), 256, 90
_LEAST_STEPS = 4


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


class Again(Sampler[list[int]]):
    """Batches of numbers below `count`, ascending, from the start again, without end.

    So that a few files make as many batches, of the size asked for, as the processes can read.
    """

    def __init__(self, count: int, *, batch: int) -> None:
        self._count, self._batch = count, batch

    def __iter__(self) -> Iterator[list[int]]:
        numbers = cycle(range(self._count))
        while True:
            yield list(islice(numbers, self._batch))


def bench_input(chosen: Chosen, *, files: int = FILES) -> Report:
    """Reading for `chosen.model`, on and on; the batches of the cold start are left out.

    A step is a batch of every process: each of them reads in every step.
    """
    view = image_view(load(random_spec(chosen.model)))
    with tempfile.TemporaryDirectory(prefix="layershuffle-bench-") as place:
        write_photographs(Path(place), files)
        data = open_data(f"folder:{place}", view, options=DataOptions(holdout=None))
        split = data.splits["train"]
        loader = DataLoader(
            split.dataset,
            batch_sampler=Again(split.size or 1, batch=chosen.batch),
            num_workers=chosen.workers,
            pin_memory=chosen.device == "cuda",
        )
        seconds = steady(iter(loader), workers=chosen.workers, steps=chosen.steps)
    return Report(
        kind="input",
        conditions=chosen.conditions("uint8"),
        rate=throughput(seconds, max(1, chosen.workers) * chosen.batch),
        facts={
            "processes": chosen.workers,
            "files": f"{split.size} JPEG files of {PHOTO[0]} x {PHOTO[1]}, quality {QUALITY}, to "
            f"{view.width} x {view.height}, read again and again",
        },
        versions=versions(),
    )


def steady(
    batches: Iterator[object],
    *,
    workers: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of `steps` steps, no fewer than four, of a batch from each of `workers` processes.

    Left out before: what the processes have read ahead while they start, two batches each.
    """
    each = max(1, workers)
    deque(islice(batches, 2 * each), maxlen=0)
    seconds = []
    for _ in range(max(_LEAST_STEPS, steps)):
        begun = clock()
        deque(islice(batches, each), maxlen=0)
        seconds.append(clock() - begun)
    return seconds
