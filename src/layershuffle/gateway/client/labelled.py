"""Test images of a data set as files with their classes, as clients of a swarm send them."""

from __future__ import annotations

import io
from dataclasses import replace

from PIL import Image
from torch import Tensor, nn

from layershuffle.data import DataOptions, open_data
from layershuffle.gateway.client.judging import Labelled
from layershuffle.images.pixels import uncropped_size
from layershuffle.models import file_view
from layershuffle.scoring.evaluate_spec import matched

_MOST_IMAGES = 1000


def labelled_images(model: nn.Module, data: str, *, count: int) -> tuple[Labelled, ...]:
    """The first test images of a data spec, at most `count` and 1,000, as PNG files.

    They are resized to the size at which the model's preparation of images starts, so the server
    prepares them exactly as a calibration does. Raises `DataError` for data with other classes than
    the model's.
    """
    view = file_view(model)
    width, height = uncropped_size(view)
    # Without normalisation, because image files hold pixels.
    zeros = (0.0,) * view.channels
    ones = (1.0,) * view.channels
    raw = replace(view, height=height, width=width, crop_pct=1.0, mean=zeros, std=ones)
    count = min(count, _MOST_IMAGES)
    opened = open_data(data, raw, options=DataOptions(train=False, max_test=count))
    opened = matched(model, opened, name="the model")
    split = opened.splits["test"]
    images = []
    for number in range(min(count, split.size)):
        pixels, label = split.dataset[number]
        images.append(Labelled(_png(opened.finish(pixels[None])[0]), int(label)))
    return tuple(images)


def _png(image: Tensor) -> bytes:
    """An image, float32 `[channels, height, width]` of 0 to 1, as a PNG file."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    return file.getvalue()
