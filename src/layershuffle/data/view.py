"""How a host model wants its images, and pure helpers that fit image tensors to it.

Every source of this package hands out images that went through an `ImageView`: the channels,
size and normalisation the weights were trained with. The mismatch of a view is silent (the
accuracy just drops), so the view is one validated value that travels from the model to the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from layershuffle.errors import DataError, UsageError

INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
Resize = Literal["crop", "squash"]

# ITU-R 601 luma, the weights Pillow uses for RGB -> L: both routes to grey agree.
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class ImageView:
    """The input a host model expects.

    `mean` and `std` have one number per channel and apply to images in [0, 1]. `resize` is "crop"
    (the shorter side is brought to its size, the aspect ratio stays) or "squash" (both sides are);
    `crop_pct` is the share of the resized sides that the central crop then keeps at evaluation.
    Raises UsageError if the numbers do not fit together.
    """

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    resize: Resize = "crop"

    def __post_init__(self) -> None:
        sizes = {"channels": self.channels, "height": self.height, "width": self.width}
        for name, value in sizes.items():
            if value < 1:
                raise UsageError(f"{name} is {value}, must be at least 1", place="ImageView")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise UsageError(
                    f"{name} has {len(values)} numbers for {self.channels} channels",
                    place="ImageView",
                    hint=f"give one {name} per channel",
                )
        if min(self.std) <= 0:
            raise UsageError(f"std {self.std} must be above 0", place="ImageView")
        if self.interpolation not in INTERPOLATIONS:
            raise UsageError(
                f"interpolation {self.interpolation!r} is unknown",
                place="ImageView",
                hint=f"use one of {', '.join(INTERPOLATIONS)}",
            )
        if not 0 < self.crop_pct <= 1:
            raise UsageError(
                f"crop_pct is {self.crop_pct}, must be above 0 and at most 1", place="ImageView"
            )
        if self.resize not in ("crop", "squash"):
            raise UsageError(
                f"resize is {self.resize!r}", place="ImageView", hint="use crop or squash"
            )

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.height, self.width


def resized_as(view: ImageView, resize: Resize | None) -> ImageView:
    """`view` with images resized that way; `None` and the view's own way leave it as it is."""
    if resize is None or resize == view.resize:
        return view
    # Who asks for squash wants the whole image; a share to keep was meant for the other way.
    return replace(view, resize=resize, crop_pct=1.0 if resize == "squash" else view.crop_pct)


def normalise(images: Tensor, view: ImageView) -> Tensor:
    """(images - mean) / std, per channel, a new tensor; images [..., C, H, W] in [0, 1]."""
    mean = _constants(view.mean, images.dtype, images.device).view(-1, 1, 1)
    std = _constants(view.std, images.dtype, images.device).view(-1, 1, 1)
    return (images - mean) / std


def match_channels(images: Tensor, channels: int) -> Tensor:
    """Images [..., C, H, W] with `channels` channels: grey is repeated, RGB becomes luma.

    Raises DataError for every other pair of counts: there is no meaning to guess.
    """
    have = images.shape[-3]
    if have == channels:
        return images
    # expand makes a view: three equal channels need the memory of one.
    if have == 1:
        return images.expand(*images.shape[:-3], channels, *images.shape[-2:])
    if have == 3 and channels == 1:
        luma = _constants(_LUMA, images.dtype, images.device).view(3, 1, 1)
        return (images * luma).sum(dim=-3, keepdim=True)
    raise DataError(
        f"images have {have} channels, the model takes {channels}",
        hint="use grey or RGB images, or a model with 1 or 3 input channels",
    )


def resize_images(images: Tensor, size: tuple[int, int], *, mode: str = "bilinear") -> Tensor:
    """Images [N, C, H, W] at `size` (height, width), antialiased, clamped to [0, 1].

    Returned untouched, bit for bit, when they already have that size.
    """
    if tuple(images.shape[-2:]) == size:
        return images
    if mode == "nearest":
        # torch documents that plain "nearest" repeats a fault of OpenCV.
        return F.interpolate(images, size=size, mode="nearest-exact")
    out = F.interpolate(images, size=size, mode=mode, align_corners=False, antialias=True)
    return out.clamp(0, 1)  # bicubic overshoots


def fit_images(images: Tensor, view: ImageView, *, mode: str = "bilinear") -> Tensor:
    """Images [N, C, H, W] in [0, 1] as float32 [N, *view] with the view's normalisation.

    The whole image is kept: the aspect ratio gives way ("squash"), nothing is cropped.
    """
    resized = resize_images(images.float(), view.size, mode=mode)
    return normalise(match_channels(resized, view.channels), view)


class Finish(Protocol):
    """The last step from the items of a source to what the model takes, on the items' device."""

    @property
    def view(self) -> ImageView:
        """What the images are fitted to."""
        ...

    def __call__(self, pixels: Tensor, /) -> Tensor:
        """A batch of items as float32 [n, *view], normalised."""
        ...


@dataclass(frozen=True)
class PixelFinish:
    """The last step from pixels to what the model takes: pixels / levels, then `fit_images`.

    It runs where the pixels are, so that a batch travels to a GPU as bytes. In fp32 the numbers are
    the same, bit for bit, as if every image had been normalised by itself beforehand.
    """

    view: ImageView
    levels: int = 255

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [n, C, H, W] in 0..levels as float32 [n, *view], normalised."""
        # A tensor, because CUDA multiplies by the reciprocal of a plain number.
        levels = _constants((float(self.levels),), torch.float32, pixels.device)
        return fit_images(pixels.float() / levels, self.view)


@cache
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` on a device, sent there once: a copy per batch would make the host wait for it."""
    with torch.inference_mode(False):  # first used in an evaluation, they must do in training too
        return torch.tensor(values, dtype=dtype, device=device)
