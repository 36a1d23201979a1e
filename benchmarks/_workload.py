"""A model with random weights and a batch of noise. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.data.transforms import PixelFinish
from layershuffle.models import image_view, load, num_classes_of


@dataclass(frozen=True)
class Workload:
    """A wrapped model and a batch for it.

    `pixels` uint8 `[batch, channels, height, width]` and `labels` int64 `[batch]` are in the
    memory of the CPU, pinned if the model is on a GPU; `finish` converts pixels to `images`, on the
    model's device.
    """

    spec: str
    model: nn.Module
    pixels: Tensor
    labels: Tensor
    finish: PixelFinish
    images: Tensor

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for a result file."""
        return {"model": self.spec, "batch": len(self.pixels)}


def make_workload(
    spec: str, *, batch_size: int, device: str = "cpu", model: nn.Module | None = None
) -> Workload:
    """The wrapped `model`, else that of `spec`, on `device`, and a batch of noise."""
    model = (model or load(spec, seed=0)).to(device)
    classes = num_classes_of(model)
    view = image_view(model)
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, view.channels, view.height, view.width)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(classes, (batch_size,), generator=generator)
    # As from a loader: copies from pinned memory are asynchronous.
    if device == "cuda":
        pixels = pixels.pin_memory()
        labels = labels.pin_memory()
    finish = PixelFinish(view)
    images = finish(pixels.to(device))
    return Workload(spec, model, pixels, labels, finish, images)
