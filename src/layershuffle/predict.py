"""Class names for image files, by one model in one order: what `layershuffle predict` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from layershuffle.data.class_names import numbered
from layershuffle.data.decode import read_image
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.data.view import ImageView
from layershuffle.errors import DataError, UsageError
from layershuffle.models import class_names_of, file_view, logits_of, num_classes_of
from layershuffle.modes import parse_modes
from layershuffle.orders import ExecutionOrder
from layershuffle.progress import Progress, unheard
from layershuffle.runs import in_eval
from layershuffle.stack import running

_AT_ONCE = 64  # images in memory: a user may name a whole folder


@dataclass(frozen=True)
class RankedClass:
    """One class of an answer: its name, its number, and its probability in [0, 1]."""

    label: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, best first."""

    image: str
    top: tuple[RankedClass, ...]


def order_for(mode: str, *, depth: int, seed: int) -> ExecutionOrder:
    """One order of an order mode, as "sequential" or "kept:9:arbitrary", drawn from `seed`.

    Raises `UsageError` for text that is no single mode, and for more blocks than `depth`.
    """
    modes = parse_modes(mode)
    if len(modes) > 1:
        raise UsageError(f"predict takes one order mode; {mode!r} names {len(modes)}")
    return modes[0].policy().draw(depth, seed=seed, step=0)


def predict_files(
    model: nn.Module,
    images: Sequence[Path],
    *,
    order: ExecutionOrder,
    top: int,
    progress: Progress = unheard,
) -> list[Prediction]:
    """The `top` most probable classes of every image file; the blocks run in `order`.

    Images are prepared as in the model's training. A model without class names answers with their
    numbers. `progress` hears of images. Raises `UsageError` without an image or a class to name,
    `DataError` naming the file that cannot be read.
    """
    if not images or top < 1:
        raise UsageError(
            "There is no image to answer for" if not images else "top is 1 or more",
            hint="layershuffle predict MODEL IMAGE... --top 5",
        )
    classes, view = num_classes_of(model), file_view(model)
    if not classes:
        raise UsageError(
            "The model has no classifier, so it cannot name classes",
            hint="layershuffle fit --model ... --data ... gives it one",
        )
    names = class_names_of(model) or numbered(classes)
    device = next(model.parameters()).device
    predictions = []
    with in_eval(model), torch.inference_mode(), running(model, order):
        for start in range(0, len(images), _AT_ONCE):
            progress("images", start, len(images))
            paths = images[start : start + _AT_ONCE]
            logits = logits_of(model(_prepared(paths, view).to(device)))
            # In float64: in float32 the probabilities of many classes do not add up to 1.
            best = logits.double().softmax(dim=-1).topk(min(top, classes))
            for path, chances, indices in zip(
                paths, best.values.tolist(), best.indices.tolist(), strict=True
            ):
                ranked = zip(indices, chances, strict=True)
                top_classes = tuple(RankedClass(names[i], i, chance) for i, chance in ranked)
                predictions.append(Prediction(str(path), top_classes))
    return predictions


def _prepared(paths: Sequence[Path], view: ImageView) -> Tensor:
    """The images as the model takes them, float32 `[n, channels, height, width]`."""
    transform, pixels = PlainTransform(view), []
    for path in paths:
        try:
            pixels.append(transform(read_image(path, view.channels, place=path)))
        except DataError as error:
            # The error's own hint is about training data, where images may be left out.
            raise DataError(
                error.cause, place=path, hint="name image files (PNG, JPEG and others)"
            ) from error
    return PixelFinish(view)(torch.stack(pixels))
