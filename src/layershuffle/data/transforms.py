"""Transforms of images between decoder and model: resize, crop, normalise.

First, an image becomes pixels of the view's size. `PlainTransform` resizes and crops with Pillow,
for evaluation, bit-equal to timm's transform. `PixelTransform` does the same with torch, for faster
training. `augment_transform` is timm's training transform with the view's settings. Then whole
batches become normalised floats, on the model's device (`PixelFinish`).
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from layershuffle.data.splits import Item, derived_seed
from layershuffle.ground.errors import DataError
from layershuffle.images.pixels import channels_first, resized_size, view_pixels, view_rows
from layershuffle.images.view import ImageView

Transform = Callable[[Image.Image], Tensor]

# ITU-R 601 luma, the weights that Pillow uses for RGB -> L, so both conversions to grey agree.
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class PlainTransform:
    """`view_pixels`: resize by Pillow and centre crop, deterministic."""

    view: ImageView

    def __call__(self, image: Image.Image) -> Tensor:
        """Pixels uint8 [C, H, W]."""
        return torch.from_numpy(np.ascontiguousarray(view_pixels(image, self.view)))


@dataclass(frozen=True)
class PixelTransform(PlainTransform):
    """`PlainTransform` with torch's uint8 kernels: resizing is about 4 times as fast as Pillow's.

    Its rounding differs from Pillow's by 1 of 255 in 1 of 200 bytes of a shrunk photograph.
    """

    def __call__(self, image: Image.Image) -> Tensor:
        """Pixels uint8 [C, H, W]."""
        view = self.view
        width, height = resized_size(image.size, view)
        pixels = torch.from_numpy(channels_first(image))
        if image.size != (width, height):
            # torchvision.transforms.v2 gives the same bytes but takes 2 to 5 % longer per image.
            # With antialias, as in Pillow's filters, or shrinking would skip pixels.
            pixels = F.interpolate(
                pixels[None], size=(height, width), mode=view.interpolation, antialias=True
            )[0]
        rows = view_rows(height, view.height)
        columns = view_rows(width, view.width)
        return pixels[:, rows, columns].contiguous()


def augment_transform(view: ImageView) -> Transform:
    """timm's training transform at the view's size and interpolation, to pixels uint8 [C, H, W].

    Random resized crop (area 8 to 100 percent), horizontal flip, colour jitter 0.4: timm's
    defaults. It draws from the global generators, so call it only inside `seeded_globals`.
    """
    from timm.data import create_transform  # timm takes seconds to import

    transform = create_transform(
        input_size=(view.channels, view.height, view.width),
        is_training=True,
        interpolation=view.interpolation,
        # Without normalisation timm's last step gives uint8 pixels.
        normalize=False,
    )
    return cast(Transform, transform)


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's global CPU generators within, and restore them afterwards.

    timm's and torchvision's transforms draw from them and accept no generator. Not thread-safe,
    because the process shares the generators.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        # numpy's seeds have 32 bits.
        np.random.seed(seed % 2**32)
        # torch.manual_seed would reseed the generators of GPUs too.
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


# --- data sets ------------------------------------------------------------------------------------


class ImageTable(Protocol):
    """Labelled images of one split, read one at a time."""

    @property
    def labels(self) -> Sequence[int]:
        """Class index of every image."""

    def image(self, index: int) -> Image.Image:
        """Image `index` as "RGB" or "L". Raises DataError, naming it, if it cannot be read."""

    def name(self, index: int) -> str:
        """The name of image `index` for messages."""

    def identity(self, index: int) -> str:
        """What tells image `index` from another one in its place, without opening it."""


class Images(Dataset[Item]):
    """The images `indices` of a table, each through one transform.

    With a `seed` the transform draws: the pixels of row i in epoch e are a pure function of (seed,
    e, i). So a resumed run sees the same images as an uninterrupted one. Then `set_epoch` must be
    called before each epoch. accelerate's DataLoaderShard does so, except if its batch sampler
    wraps a seedable sampler (several processes): then call it yourself.
    """

    def __init__(
        self,
        table: ImageTable,
        indices: Sequence[int],
        transform: Transform,
        *,
        seed: int | None = None,
    ) -> None:
        self.table = table
        self.indices = indices
        self.transform = transform
        self.seed = seed
        # In shared memory, so loader processes that outlive an epoch see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # untyped in torch

    def set_epoch(self, epoch: int) -> None:
        """Use the augmentation of `epoch` from now on, in every process."""
        self._epoch.fill_(epoch)

    def contents(self, classes: Sequence[str]) -> dict[str, tuple[int, str]]:
        """By class, the number of its images and a digest of their identities, in order."""
        counts = Counter[int]()
        digests = defaultdict[int, Any](hashlib.sha256)
        for row in self.indices:
            label = self.table.labels[row]
            counts[label] += 1
            digests[label].update(f"{self.table.identity(row)}\0".encode(errors="surrogateescape"))
        contents = {}
        for label in sorted(counts):
            contents[classes[label]] = (counts[label], digests[label].hexdigest())
        return contents

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Item:
        row = self.indices[index]
        image = self.table.image(row)
        label = self.table.labels[row]
        if self.seed is None:
            try:
                return self.transform(image), label
            except DataError as error:  # the size of the image is none for this view
                place = self.table.name(row)
                raise DataError(error.cause, place=place, hint=error.hint) from error
        with seeded_globals(derived_seed("augment", self.seed, int(self._epoch), row)):
            return self.transform(image).contiguous(), label


# --- on the device --------------------------------------------------------------------------------


def match_channels(images: Tensor, channels: int) -> Tensor:
    """Images [..., 1 or 3, H, W] with 1 or 3 channels: grey is repeated, RGB becomes luma."""
    if images.shape[-3] > channels:
        luma = _constants(_LUMA, images.dtype, images.device).view(3, 1, 1)
        return (images * luma).sum(dim=-3, keepdim=True)
    # expand makes a view, so three equal channels need the memory of one.
    return images.expand(*images.shape[:-3], channels, *images.shape[-2:])


def fit_images(images: Tensor, view: ImageView) -> Tensor:
    """Images [N, C, H, W] in [0, 1] as float32 [N, *view] with the view's normalisation.

    They are resized bilinearly; nothing is cropped, so the aspect ratio may change.
    """
    images = images.float()
    size = (view.height, view.width)
    if images.shape[-2:] != size:
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True).clamp(0, 1)
    mean = _constants(view.mean, images.dtype, images.device).view(-1, 1, 1)
    std = _constants(view.std, images.dtype, images.device).view(-1, 1, 1)
    return (match_channels(images, view.channels) - mean) / std


def stretched(size: tuple[int, int], view: ImageView) -> tuple[str, ...]:
    """The note that `fit_images` changes images of `size` (height, width), if it does."""
    if size == view.size:
        return ()
    rows, columns = size
    height, width = view.size
    return (f"images of {rows}x{columns} were stretched to {height}x{width} (bilinear)",)


@dataclass(frozen=True)
class PixelFinish:
    """The conversion of pixels to the model's input: pixels / levels, then `fit_images`.

    It runs on the device of the pixels, so a batch is copied to a GPU as bytes. In fp32 the result
    is bit-equal to normalising every image separately.
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
    """`values` on a device, cached, because a copy per batch would synchronise with the device."""
    with torch.inference_mode(False):  # or they could not be used in training
        return torch.tensor(values, dtype=dtype, device=device)
