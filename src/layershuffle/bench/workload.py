"""A model with random weights and a batch of noise. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.data.transforms import PixelFinish
from layershuffle.errors import UsageError
from layershuffle.models import image_view, load, num_classes_of


@dataclass(frozen=True)
class Workload:
    """A wrapped model and a batch for it.

    `pixels` uint8 `[batch, channels, height, width]` and `labels` int64 `[batch]` are on the host,
    pinned if the model is on a GPU; `finish` converts pixels to `images`, on the model's device.
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
    """The wrapped `model`, else that of `spec`, on `device`, and a batch of noise.

    Raises `UsageError` for a model without classes, for which there are no labels.
    """
    model = (model or load(random_spec(spec), seed=0)).to(device)
    classes = num_classes_of(model)
    if not classes:
        raise UsageError("The model has no classes", place=spec, hint="give it num_classes=1000")
    view = image_view(model)
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, view.channels, view.height, view.width)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(classes, (batch_size,), generator=generator)
    # As from a loader: copies from pinned memory are asynchronous.
    if device == "cuda":
        pixels, labels = pixels.pin_memory(), labels.pin_memory()
    finish = PixelFinish(view)
    images = finish(pixels.to(device))
    return Workload(spec, model, pixels, labels, finish, images)


def random_spec(spec: str) -> str:
    """`spec` with random weights where it leaves them open: speed does not depend on them."""
    libraries = ("timm", "hf", "torchvision")  # models of bundled: and dir: are local
    if spec.partition(":")[0] not in libraries or "pretrained=" in spec or "weights=" in spec:
        return spec
    return f"{spec}{'&' if '?' in spec else '?'}pretrained=false"
