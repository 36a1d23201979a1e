"""The subject of an analysis: a model, its test images, and the orders that the images run in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.core.draws import Stream
from layershuffle.core.hooks import BlockHook
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import drawn_blocks
from layershuffle.core.position import backbone_of
from layershuffle.core.stack import depth_of, fixed_of, running, with_hooks
from layershuffle.core.tensors import logits_of
from layershuffle.data import DataOptions, ImageData, Split, open_data
from layershuffle.data.loading import loader_processes
from layershuffle.data.splits import DeviceBatches, limited_test
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.ground.machine import Device, device_of
from layershuffle.ground.text import Progress
from layershuffle.images.view import resized_as
from layershuffle.models import image_view, load
from layershuffle.models.files import LOG
from layershuffle.models.origin import training_settings
from layershuffle.scoring.evaluate_spec import matched

# With fewer clusters, their spread is too uncertain to judge a difference.
FEWEST_CLUSTERS = 10


def balanced_orders(
    depth: int, *, first: int, count: int, seed: int, fixed: tuple[int, int] = (0, 0)
) -> list[ExecutionOrder]:
    """Orders number `first` to `first + count - 1` of an endless sequence, in which each `depth`
    orders are a Latin square.

    In a square every block is at every position in exactly one order, so few orders cover every
    (block, position). With ends `fixed` that keep their place, this holds for the blocks between
    them, of which there are fewer. The squares are E. J. Williams' (1949): with an even number of
    blocks, every block also follows every other one exactly once, so no block always has the same
    predecessor. A random relabelling of the blocks makes every single order a uniform permutation.
    """
    drawn = drawn_blocks(depth, fixed)
    begin = range(drawn.start)
    end = range(drawn.stop, depth)
    side = len(drawn)
    # 0, 1, side - 1, 2, side - 2, ...: neighbours differ by every distance once.
    zigzag = []
    for k in range(side):
        zigzag.append((k + 1) // 2 if k % 2 else side - k // 2)
    orders = []
    for index in range(first, first + count):
        square, row = divmod(index, side)
        blocks = Stream(seed, square).shuffled(drawn)
        between = [blocks[(k + row) % side] for k in zigzag]
        orders.append(ExecutionOrder((*begin, *between, *end), depth))
    return orders


class DoesNotApply(UsageError):
    """The question does not apply to this model or these data; the cause gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images `[n, channels, height, width]`, labels `[n]`, and the orders that they all run in.

    `first` is the number of the first image.
    """

    first: int
    images: Tensor
    labels: Tensor
    orders: list[ExecutionOrder]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A wrapped model in eval mode on its device, and its data.

    `counts`: how many test images there are, in how many orders they ran, and how many blocks are
    drawn.
    """

    model: nn.Module
    spec: str
    data: ImageData
    settings: AnalysisSettings
    progress: Progress
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return depth_of(self.model)

    @property
    def drawn(self) -> range:
        """The blocks, and the positions, between the ends that keep their place."""
        return drawn_blocks(self.depth, fixed_of(self.model))

    def logits(self, images: Tensor) -> Tensor:
        """Logits `[n, classes]`."""
        return logits_of(self.model(images), self.model)

    def run(
        self, images: Tensor, order: ExecutionOrder | Sequence[ExecutionOrder], *hooks: BlockHook
    ) -> Tensor:
        """Logits `[n, classes]` under one order or one per image, with hooks around the blocks."""
        with torch.no_grad(), running(self.model, order), with_hooks(self.model, *hooks):
            return self.logits(images)

    def batches(self, *, split: str = "test", share: float = 1.0) -> Iterator[Batch]:
        """The images, each batch with its own orders.

        Unless the settings give a number, an image runs in `share` x `drawn` orders, or in more for
        small sets, so every drawn block runs at every position of these. `split` is "test" or
        "holdout" (training images that are used for no test score). Raises `DataError` if there is
        no image.
        """
        settings = self.settings
        part = self._split(split)
        count = math.ceil(part.size / settings.batch_size)
        # Every batch takes the next rows of the square; all batches together must fill the table.
        orders = settings.num_orders or max(
            math.ceil(share * len(self.drawn)), math.ceil(len(self.drawn) / count)
        )
        number = -1
        for number, (images, labels) in enumerate(self._loader(part)):
            drawn = balanced_orders(
                self.depth,
                first=number * orders,
                count=orders,
                seed=settings.seed,
                fixed=fixed_of(self.model),
            )
            first = number * settings.batch_size
            self.progress(f"{split} images", first, part.size)
            yield Batch(first=first, images=images, labels=labels, orders=drawn)
        if number < 0:
            raise DataError(f"The {split} split has no image", place=self.data.spec)
        self.counts.update(
            images=part.size, orders=orders * (number + 1), drawn_blocks=len(self.drawn)
        )

    def clusters(self, *, by_batch: bool) -> NDArray[np.int64] | None:
        """Groups `[images, k]` of test images that may be wrong together; `None` for too few.

        These share a group of the data or, with `by_batch`, a batch and hence its orders. An
        interval needs `FEWEST_CLUSTERS` of either.
        """
        images = self.data.splits["test"].size
        columns = []
        if by_batch:
            columns.append(np.arange(images)[:, None] // self.settings.batch_size)
        groups = self.data.splits["test"].groups
        if groups is not None:
            columns.append(groups.numpy() + images)  # distinct from the numbers of batches
        if not columns:
            columns.append(np.arange(images)[:, None])
        if min(len(np.unique(column)) for column in columns) < FEWEST_CLUSTERS:
            return None
        return np.concatenate(columns, axis=1).astype(np.int64)

    def require_classes(self) -> None:
        """Raises `DataError` unless the data have the model's classes."""
        matched(self.model, self.data, name=self.spec)

    def _split(self, name: str) -> Split:
        if name == "test":
            return self.data.splits[name]
        # Opened only if needed, because most analyses use no training images.
        split = _open(self.data.spec, self.model, self.settings, train=True).splits[name]
        return limited_test(split.dataset, limit=self.settings.max_images)

    def _loader(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images and labels on the device of the model."""
        return iter(
            DeviceBatches(
                split,
                self.data.finish,
                batch_size=self.settings.batch_size,
                device=next(self.model.parameters()).device,
                processes=loader_processes(self.data.spec),
            )
        )


def open_subject(
    model_spec: str,
    data_spec: str,
    *,
    settings: AnalysisSettings,
    device: Device,
    progress: Progress,
) -> Subject:
    """The subject with the model on `device` and its test images."""
    model = load(model_spec)
    # In fp32 on any device, because the analyses measure small differences between states.
    model.to(device_of(device))
    data = _open(data_spec, model, settings, train=False)
    return Subject(model=model, spec=model_spec, data=data, settings=settings, progress=progress)


def _open(spec: str, model: nn.Module, settings: AnalysisSettings, *, train: bool) -> ImageData:
    options = DataOptions(
        train=train,
        holdout=training_settings(backbone_of(model)).get("holdout", DataOptions.holdout),
        max_test=settings.max_images,
        skip_corrupt=settings.skip_corrupt,
    )
    view = resized_as(image_view(model), settings.resize)
    data = open_data(spec, view, options=options)
    fitting = data
    # Most analyses do not use the classes; the others check them (`require_classes`).
    with suppress(DataError):
        fitting = matched(model, data, name="the model")
    for note in fitting.notes[len(data.notes) :]:
        LOG.warning(note)
    return fitting
