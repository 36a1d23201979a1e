"""Pillow images to the tensors a view asks for: one plain way, one augmented way.

Plain is the paper's resize-and-crop (arXiv 2407.04513, section 4), for evaluation and training
alike. Augmented is timm's training transform with the view's settings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from layershuffle.data.view import ImageView, normalise

Transform = Callable[[Image.Image], Tensor]

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


@dataclass(frozen=True)
class PlainTransform:
    """Resize, centre crop, [0, 1], normalise; the same tensor for the same image, always.

    "crop" brings the shorter side to round(size / crop_pct) and cuts the centre; "squash"
    resizes straight to the view and keeps all of the image. Small images are enlarged.
    """

    view: ImageView
    resize: Literal["crop", "squash"] = "crop"

    def __call__(self, image: Image.Image) -> Tensor:
        """Float32 [C, H, W]."""
        sized = self._squashed(image) if self.resize == "squash" else self._cropped(image)
        return normalise(image_tensor(sized), self.view)

    def _squashed(self, image: Image.Image) -> Image.Image:
        size = (self.view.width, self.view.height)
        return image.resize(size, _RESAMPLING[self.view.interpolation])

    def _cropped(self, image: Image.Image) -> Image.Image:
        size = resized_size(image.size, self.view)
        resized = image.resize(size, _RESAMPLING[self.view.interpolation])
        left = round((size[0] - self.view.width) / 2)
        top = round((size[1] - self.view.height) / 2)
        return resized.crop((left, top, left + self.view.width, top + self.view.height))


def resized_size(size: tuple[int, int], view: ImageView) -> tuple[int, int]:
    """(width, height) before the crop: as small as covers the view divided by crop_pct.

    The longer side is rounded down, as torchvision's Resize does.
    """
    width, height = size
    goal_width = round(view.width / view.crop_pct)
    goal_height = round(view.height / view.crop_pct)
    if goal_width * height >= goal_height * width:  # the width is the tight side
        return goal_width, max(goal_height, int(goal_width * height / width))
    return max(goal_width, int(goal_height * width / height)), goal_height


def image_tensor(image: Image.Image) -> Tensor:
    """Float32 [C, H, W] in [0, 1] from an "L" or "RGB" image."""
    pixels = np.array(image, dtype=np.float32) / 255
    channels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(channels))


def augment_transform(view: ImageView) -> Transform:
    """timm's training transform at the view's size, interpolation and normalisation.

    Random resized crop (area 8 to 100 percent), horizontal flip, colour jitter 0.4: timm's
    defaults. It draws from the global generators: call it inside `seeded_globals` only.
    """
    transform = create_transform(
        input_size=(view.channels, view.height, view.width),
        is_training=True,
        interpolation=view.interpolation,
        mean=view.mean,
        std=view.std,
    )
    return cast(Transform, transform)


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's global CPU generators start at `seed`, then are put back.

    The one place of this package that touches them: timm's and torchvision's transforms draw
    from the global generators and take no generator of their own. Seeding each item alone makes
    it a pure function of its seed (worker count, order and resume do not matter), and putting the
    states back keeps the transforms from moving anybody else's draws. torch.manual_seed would
    reseed the CUDA generators too, hence the state of a private generator. Not for threads that
    draw at the same time: the generators are one per process.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
