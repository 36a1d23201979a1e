"""The image view of a transformers model, from its image processor's file or its kind of model.

transformers resolves the file, because the meaning and the default of a key depend on the class of
the processor. Without a file, the numbers are those of the published checkpoints of that kind; they
are listed here because some defaults of the processor classes differ (DeiT, DINOv2).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_data_config
from transformers import AutoImageProcessor, ViTImageProcessor

from layershuffle.ground.errors import ModelFileError
from layershuffle.ground.text import one_line
from layershuffle.images.pixels import uncropped_size
from layershuffle.images.view import ImageView, Resize
from layershuffle.models.files import CONFIG, PROCESSORS, REFUSALS
from layershuffle.models.origin import Backbone, per_channel, size_pair, sketched
from layershuffle.models.timm_models import view_of_config

_HALF = (0.5, 0.5, 0.5)
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
# Pillow's numbers, as image processor files store them; transformers refuses its 4 and 5.
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Processor classes that only resize, crop, rescale and normalise. Others have additional steps
# (ConvNeXt's crop_pct, MobileViT's order of channels) that their settings do not show.
_PLAIN = (
    "Beit", "Bit", "Blip", "ChineseCLIP", "CLIP", "DeiT", "DINOv3ViT", "Pvt", "Siglip", "ViT",
)  # fmt: skip


# Fields of a view by kind of model, where they are not those of `_USUAL`.
_USUAL: dict[str, Any] = {"mean": _HALF, "std": _HALF, "resize": "squash"}
_IMAGENET = {"mean": _IMAGENET_MEAN, "std": _IMAGENET_STD}
_DINOV2 = {**_IMAGENET, "crop_pct": 224 / 256, "resize": "crop"}
_HABITS: dict[str, dict[str, Any]] = {
    "vit": {"interpolation": "bilinear"},
    "deit": {**_IMAGENET, "crop_pct": 224 / 256},
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2,
    "ijepa": _IMAGENET,
    "clip": {
        "mean": (0.48145466, 0.4578275, 0.40821073),
        "std": (0.26862954, 0.26130258, 0.27577711),
        "resize": "crop",
    },
}


def default_view(backbone: Backbone) -> ImageView:
    """The view of `backbone` according to its kind of model."""
    # In transformers' wrapper, timm's model has the view, unless the configuration overrides it.
    timm_model = getattr(backbone, "timm_model", None)
    if timm_model is not None:
        cfg = getattr(backbone.config, "pretrained_cfg", None) or timm_model.pretrained_cfg
        return view_of_config(timm_model, resolve_data_config(pretrained_cfg=dict(cfg)))
    (height, width), channels = _input_size(backbone)
    # The towers of CLIP and its like have a type of their own ("clip_vision_model").
    kind = backbone.config.model_type.removesuffix("_vision_model")
    habit = {**_USUAL, **_HABITS.get(kind, {})}
    for name in ("mean", "std"):
        habit[name] = per_channel(habit[name], channels)
    return ImageView(channels=channels, height=height, width=width, **habit)


def stored_view(backbone: Backbone, directory: Path) -> ImageView | None:
    """The view of the image processor's file in `directory`, `None` without one.

    Raises `ModelFileError` for a file that transformers cannot use or a view cannot express.
    """
    paths = [directory / name for name in PROCESSORS if (directory / name).is_file()]
    if not paths or hasattr(backbone, "timm_model"):  # timm's settings are in config.json
        return None
    size, channels = _input_size(backbone)
    try:
        processor = AutoImageProcessor.from_pretrained(directory, trust_remote_code=False)
        kind = type(processor).__name__
        if kind.removesuffix("Pil").removesuffix("ImageProcessor") not in _PLAIN:
            raise ModelFileError(
                f"The class {kind} prepares images in steps of its own",
                place=paths[-1],
                hint=f"replace {kind} by a ViTImageProcessor with the same result, or remove it",
            )
        view = _parsed_view(processor.to_dict(), size, channels=channels)
        if view.size != size:
            # Some models interpolate their positions (DINOv2), others refuse.
            sketch = sketched(lambda: type(backbone)(copy.deepcopy(backbone.config)))
            sketch(torch.zeros(1, channels, *view.size, device="meta"))
        return view
    except REFUSALS as error:
        raise ModelFileError(
            f"The image processor's settings are not usable ({one_line(error)})",
            place=paths[-1],
            hint=f"correct the file, or image_size ({size[0]} x {size[1]}) in {CONFIG}",
        ) from error


def _input_size(backbone: Backbone) -> tuple[tuple[int, int], int]:
    """((height, width), channels) of the model's input."""
    # CLIP and SigLIP have separate settings for their image tower.
    vision: Any = getattr(backbone.config, "vision_config", backbone.config)
    return size_pair(vision.image_size), int(getattr(vision, "num_channels", 3))


def _parsed_view(
    settings: Mapping[str, Any], default: tuple[int, int], *, channels: int
) -> ImageView:
    """The view of a processor's settings; `default`: (height, width) without resizing."""
    if settings.get("do_pad"):
        raise ValueError("images would be padded")
    resized, resize = _resized(settings["size"]) if settings["do_resize"] else (default, "crop")
    (height, width) = resized
    if settings.get("do_center_crop"):
        crop = settings["crop_size"]
        height, width = size_pair([crop["height"], crop["width"]])
    # A view's images are in [0, 1]; without rescaling, processors normalise images in [0, 255].
    factor = settings["rescale_factor"] if settings.get("do_rescale") else 1.0
    normalised = settings.get("do_normalize")
    mean = settings["image_mean"] if normalised else 0.0
    std = settings["image_std"] if normalised else 1.0
    resample: Any = settings.get("resample")
    if settings["do_resize"] and resample not in _RESAMPLE:
        raise ValueError(f"resample is one of Pillow's numbers {list(_RESAMPLE)}, not {resample!r}")
    view = ImageView(
        channels=channels,
        height=height,
        width=width,
        mean=tuple(value / (255 * factor) for value in per_channel(mean, channels)),
        std=tuple(value / (255 * factor) for value in per_channel(std, channels)),
        interpolation=_RESAMPLE[resample] if settings["do_resize"] else "bicubic",
        crop_pct=height / resized[0],
        resize=resize,
    )
    if uncropped_size(view) != (resized[1], resized[0]):
        raise ValueError(f"the crop {height} x {width} has another shape than {resized}")
    return view


def _resized(size: Mapping[str, int]) -> tuple[tuple[int, int], Resize]:
    """((height, width), resize) of a processor's size."""
    if size.keys() == {"height", "width"}:
        return size_pair([size["height"], size["width"]]), "squash"
    if size.keys() == {"shortest_edge"}:
        return size_pair(size["shortest_edge"]), "crop"
    raise ValueError(f"the size {dict(size)!r} is neither height and width nor shortest_edge")


def make_processor(view: ImageView) -> ViTImageProcessor | None:
    """An image processor for `view`: of the simplest class, for any kind of model.

    `None` for views that no processor of transformers supports: a crop that is not square, and the
    filters box and hamming.
    """
    width, height = uncropped_size(view)
    numbers = {name: number for number, name in _RESAMPLE.items()}
    if view.interpolation not in numbers or (view.resize == "crop" and height != width):
        return None
    squashed = {"height": height, "width": width}
    return ViTImageProcessor(
        do_convert_rgb=True if view.channels == 3 else None,
        size=squashed if view.resize == "squash" else {"shortest_edge": height},
        resample=numbers[view.interpolation],
        do_center_crop=view.resize == "crop" or (height, width) != view.size,
        crop_size={"height": view.height, "width": view.width},
        image_mean=list(view.mean),
        image_std=list(view.std),
    )
