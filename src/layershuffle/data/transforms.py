"""Images to the pixels a view asks for: plain, plain but faster, and augmented.

Plain is the resize-and-crop of the view by Pillow, for evaluation: bit-equal to timm's transform,
and scores do not depend on anything that made training faster. `PixelTransform` is the same by
torch, for training. Augmented is timm's training transform with the view's settings.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from layershuffle.data.decode import pixel_tensor
from layershuffle.data.view import ImageView
from layershuffle.errors import UsageError

Transform = Callable[[Image.Image], Tensor]
_Size = tuple[int, int]

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


@dataclass(frozen=True)
class PlainTransform:
    """Resize and centre crop by Pillow; the same pixels for the same image, always.

    The view says which sides are resized; small images are enlarged.
    """

    view: ImageView

    def __call__(self, image: Image.Image) -> Tensor:
        """Pixels uint8 [C, H, W]."""
        size, (left, top) = _size_and_corner(image.size, self.view)
        # Resizing only the part that stays (`box=`) is 1.4 times as fast, but its boxes are
        # 32-bit floats, and 1 byte in 30,000 comes out different. Scores are not to move.
        sized = image.resize(size, _RESAMPLING[self.view.interpolation])
        box = (left, top, left + self.view.width, top + self.view.height)
        return pixel_tensor(sized.crop(box)).contiguous()


@dataclass(frozen=True)
class PixelTransform:
    """`PlainTransform` on pixels, by torch's uint8 kernels: about 4 times as fast as Pillow.

    Rounds differently here and there: by 1 of 255 in 1 of 200 bytes when a photograph shrinks.
    Raises UsageError for views that ask for the nearest pixel: torch chooses others than Pillow.
    """

    view: ImageView

    def __post_init__(self) -> None:
        if self.view.interpolation == "nearest":
            raise UsageError("Torch's nearest pixel is not Pillow's", hint="use PlainTransform")

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [C, H, W] of the view's size, from such pixels of any size."""
        view, size = self.view, (pixels.shape[-1], pixels.shape[-2])
        (width, height), (left, top) = _size_and_corner(size, view)
        if size != (width, height):
            # torchvision.transforms.v2 gives the same bytes and takes 2 to 5 % longer per image.
            # antialias as Pillow's filters have it: without it, shrinking would skip pixels.
            pixels = F.interpolate(
                pixels[None], size=(height, width), mode=view.interpolation, antialias=True
            )[0]
        return pixels[:, top : top + view.height, left : left + view.width].contiguous()


def _size_and_corner(size: _Size, view: ImageView) -> tuple[_Size, _Size]:
    """The (width, height) to resize to, and the (left, top) of the crop that follows."""
    width, height = resized_size(size, view)
    # Rounded as in torchvision's centre crop, with which this gave the same bytes.
    corner = round((width - view.width) / 2), round((height - view.height) / 2)
    return (width, height), corner


def resized_size(size: tuple[int, int], view: ImageView) -> tuple[int, int]:
    """(width, height) before the crop of an image of `size`, rounded as timm does.

    "squash": the uncropped size; "crop": as small as covers it.
    """
    width, height = size
    goal_width, goal_height = uncropped_size(view)
    if view.resize == "squash":
        return goal_width, goal_height
    # timm leaves squares to torchvision's Resize, which rounds the longer side down.
    whole = int if goal_width == goal_height else round
    if goal_width * height >= goal_height * width:  # the width is the tight side
        return goal_width, max(goal_height, whole(goal_width * height / width))
    return max(goal_width, whole(goal_height * width / height)), goal_height


def uncropped_size(view: ImageView) -> tuple[int, int]:
    """(width, height) of which the crop keeps the share `crop_pct`: the view's own size."""
    # 43 / (43 / 50) is a little less than 50, and must not become 49.
    across, down = (math.floor(side / view.crop_pct + 1e-9) for side in (view.width, view.height))
    return across, down


def augment_transform(view: ImageView) -> Transform:
    """timm's training transform at the view's size and interpolation, to pixels uint8 [C, H, W].

    Random resized crop (area 8 to 100 percent), horizontal flip, colour jitter 0.4: timm's
    defaults. It draws from the global generators: call it inside `seeded_globals` only.
    """
    transform = create_transform(
        input_size=(view.channels, view.height, view.width),
        is_training=True,
        interpolation=view.interpolation,
        # Without normalising timm ends with uint8 pixels, which is what travels to the device.
        normalize=False,
    )
    return cast(Transform, transform)


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's global CPU generators inside; restore them afterwards.

    This is the only place of this package that touches them: timm's and torchvision's transforms
    draw from the global generators and take no generator of their own. Seeding each item by itself
    makes it a pure function of its seed, whatever the worker count, the order and the resumption,
    and restoring the states keeps the transforms from changing anybody else's draws.
    torch.manual_seed would reseed the CUDA generators too, hence the state of a private generator.
    Not safe for threads that draw at the same time: the generators are shared by the process.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        # numpy takes seeds of 32 bits, Python and torch take all 63.
        np.random.seed(seed % 2**32)
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
