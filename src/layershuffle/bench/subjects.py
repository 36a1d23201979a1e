"""What is measured on: models with random weights, generated images. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.bench.machine import DTYPES
from layershuffle.data.view import Finish
from layershuffle.errors import UsageError
from layershuffle.models import image_view, load, num_classes_of
from layershuffle.models.spec import parse_spec

PICO = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=10&img_size=32&patch_size=16"
    "&embed_dim=16&num_heads=2&depth=12"
)
"""For smokes: 12 blocks that cost nothing."""
WIDTH_64 = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
    "&patch_size=4&embed_dim=64&num_heads=4&mlp_ratio=2&depth=12"
)
"""The model of the digits recipes: 12 blocks, 16 tokens, 0.41 M parameters."""
WIDTH_192 = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&img_size=32&patch_size=4&depth=12"
)
"""A ViT-Ti for images of 32 pixels: 12 blocks, 65 tokens, 5.4 M parameters."""
VIT_B = "timm:vit_base_patch16_224?pretrained=false"
"""The paper's model: 12 blocks, 197 tokens, 86.6 M parameters."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A wrapped model and a batch for it.

    `pixels` uint8 `[batch, channels, height, width]` and `labels` `[batch]` on the host, pinned
    where the model is on a GPU; `finish` makes of them the `images` that lie beside the model.
    """

    spec: str
    model: nn.Module
    pixels: Tensor
    labels: Tensor
    finish: Finish
    images: Tensor

    @property
    def settings(self) -> dict[str, Any]:
        """What a result says of it."""
        return {"model": self.spec, "batch": len(self.pixels)}


def subject(spec: str, *, batch: int, device: str = "cpu", seed: int = 0) -> Subject:
    """The model of `spec` on `device`, in eval mode, with a batch of noise.

    Raises `UsageError` for a spec that asks for trained weights.
    """
    model = load(random_spec(spec), seed=seed)
    return subject_around(model, spec=spec, batch=batch, device=device)


def subject_around(model: nn.Module, *, spec: str, batch: int, device: str = "cpu") -> Subject:
    """As `subject`, around a wrapped model that is there already."""
    model.to(device)
    view = image_view(model)
    generator = torch.Generator().manual_seed(0)
    shape = (batch, view.channels, view.height, view.width)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(num_classes_of(model), (batch,), generator=generator)
    if device == "cuda":
        pixels, labels = pixels.pin_memory(), labels.pin_memory()
    finish = Finish(view)
    images = finish(pixels.to(device))
    return Subject(
        spec=spec, model=model, pixels=pixels, labels=labels, finish=finish, images=images
    )


def converted(on: Subject, precision: str) -> Subject:
    """`on` with weights and images in `precision`, as inference runs; its model itself changes."""
    dtype = DTYPES[precision]
    on.model.to(dtype)
    return replace(on, images=on.images.to(dtype))


def random_spec(spec: str) -> str:
    """`spec` with random weights instead of trained ones: speed does not depend on them."""
    parsed = parse_spec(spec)
    name = {"timm": "pretrained", "hf": "pretrained", "torchvision": "weights"}.get(parsed.scheme)
    if name is None:
        return spec
    asked = parsed.settings.get(name)
    if asked not in (None, False, "none"):
        raise UsageError(
            f"{spec!r} asks for trained weights; speed is measured with random ones",
            hint=f"leave {name} out",
        )
    if name in parsed.settings:
        return spec
    value = "none" if name == "weights" else "false"
    return f"{spec}{'&' if '?' in spec else '?'}{name}={value}"
