"""Class names for image files, by one model in one order: what `layershuffle predict` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from layershuffle.core.checks.orders import checked_fixed
from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.core.policies import parse_modes
from layershuffle.core.runs import in_eval
from layershuffle.core.stack import depth_of, fixed_of, running
from layershuffle.core.tensors import in_float64, logits_of
from layershuffle.data.class_names import numbered
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.ground.bundled import packaged_file
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import Progress, unheard
from layershuffle.images.pixels import SKIP_HINT, read_image
from layershuffle.models import class_names_of, file_view, load, num_classes_of
from layershuffle.models.files import LOG

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


def drawn_order(
    mode: str, *, depth: int, seed: int, fixed: tuple[int, int] = (0, 0)
) -> ExecutionOrder:
    """One order of an order mode, as "sequential" or "kept:9:arbitrary", drawn from `seed`, with
    the ends `fixed` in their place.

    Raises `UsageError` for text that is no single mode, and for more blocks than `depth`.
    """
    modes = parse_modes(mode)
    if len(modes) > 1:
        raise UsageError(
            f"predict takes one order mode; {mode!r} names {len(modes)}", hint="give one of them"
        )
    return modes[0].policy(fixed=fixed).draw(depth, seed=seed, step=0)


def predict(
    model: nn.Module | str,
    images: Sequence[str | Path] | str | Path,
    *,
    order: ExecutionOrder | str | None = None,
    mode: str = "sequential",
    seed: int = 0,
    fixed: tuple[int, int] | None = None,
    top: int = 5,
    progress: Progress = unheard,
) -> list[Prediction | DataError]:
    """The `top` most probable classes of every image file, as `layershuffle predict` gives them.

    `model` is a wrapped model or a spec; `images` are paths, or one, and are prepared as in the
    model's training. The blocks run in `order`, or in one drawn for `mode` from `seed`; it keeps
    the ends of the model in their place, or those of `fixed`, and (0, 0) allows any order. A model
    without class names answers with their numbers. For a file that cannot be read, the list holds
    the error that says why. `progress` hears of images. Raises `UsageError` for an order or a mode
    that does not fit the model, and without an image or a class to name.

        (answer,) = ls.predict("bundled:digits-swarm", ["bundled:digit-pair.png"], order="0,3,2,11")
        answer.top[0].label, answer.top[0].probability
    """
    if isinstance(model, str):
        model = load(model)
    depth = depth_of(model)
    ends = fixed_of(model) if fixed is None else checked_fixed(fixed)
    if order is None:
        chosen = drawn_order(mode, depth=depth, seed=seed, fixed=ends)
    else:
        chosen = order_of(order, depth)
    if isinstance(images, str | Path):
        images = [images]
    paths = [user_path(image) for image in images]
    if not paths or top < 1:
        raise UsageError(
            "There is no image to answer for" if not paths else "top is 1 or more",
            hint="layershuffle predict MODEL IMAGE... --top 5",
        )
    classes = num_classes_of(model)
    if not classes:
        raise UsageError(
            "The model has no classifier, so it cannot name classes",
            hint="layershuffle fit MODEL --data ... gives it one",
        )
    if classes == 1:
        raise UsageError(
            "The model has a single output, so every answer would be 100 % of one class",
            hint="name a model with an output for each class; a regression has none",
        )
    names = class_names_of(model) or numbered(classes)
    device = next(model.parameters()).device
    view = file_view(model)
    transform = PlainTransform(view)
    finish = PixelFinish(view)
    predictions: list[Prediction | DataError] = []
    # Not inference_mode, as in `evaluate`: the model can be trained afterwards.
    with in_eval(model), torch.no_grad(), running(model, chosen, fixed=ends):
        for start in range(0, len(paths), _AT_ONCE):
            progress("images", start, len(paths))
            group = paths[start : start + _AT_ONCE]
            pixels = [_read(path, transform) for path in group]
            readable = [image for image in pixels if isinstance(image, Tensor)]
            answers: list[tuple[RankedClass, ...]] = []
            if readable:
                logits = logits_of(model(finish(torch.stack(readable)).to(device)), model)
                answers = _ranked(logits, names, top)
            answered = 0
            for path, image in zip(group, pixels, strict=True):
                if isinstance(image, DataError):
                    predictions.append(image)
                else:
                    predictions.append(Prediction(str(path), answers[answered]))
                    answered += 1
    return predictions


def _ranked(logits: Tensor, names: Sequence[str], top: int) -> list[tuple[RankedClass, ...]]:
    """The `top` most probable classes of every row of logits `[n, classes]`, best first."""
    # In float64: in float32 the probabilities of many classes do not add up to 1.
    best = in_float64(logits).softmax(dim=-1).topk(min(top, logits.shape[-1]))
    answers = []
    for indices, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        ranked = []
        for index, chance in zip(indices, chances, strict=True):
            ranked.append(RankedClass(names[index], index, chance))
        answers.append(tuple(ranked))
    return answers


def _read(path: Path, transform: PlainTransform) -> Tensor | DataError:
    """The pixels of the image at the size of the model, or why there are none."""
    try:
        pixels = transform(read_image(packaged_file(path), transform.view.channels, place=path))
    except DataError as error:
        # Only training leaves images out.
        whole = "give whole image files (PNG, JPEG and others)"
        hint = whole if error.hint == SKIP_HINT else error.hint
        return DataError(error.cause, place=path, hint=hint)
    if pixels.min() == pixels.max():
        with Image.open(packaged_file(path)) as image:
            # A photograph in the dark is blank in the same way, and no alpha hides anything of it.
            clear = image.has_transparency_data and image.convert("RGBA").getchannel("A")
            if clear and clear.getextrema() != (255, 255):
                LOG.warning("%s: models see one colour here, as they see no transparency", path)
    return pixels
