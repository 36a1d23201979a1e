"""How a transformers model wants its images: its image processor's file, or the kind of model.

Without a file the numbers are those of the published checkpoints of that kind; they are listed
here because the defaults of the processor classes differ from them in places (DeiT, DINOv2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layershuffle.data.view import ImageView
from layershuffle.errors import ModelFileError
from layershuffle.models.files import PROCESSOR
from layershuffle.models.origin import Host, per_channel, size_pair
from layershuffle.models.timm_host import image_view as timm_view

_HALF = (0.5, 0.5, 0.5)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Pillow's numbers, as image processor files store them; 1 is Lanczos, nearest to bicubic.
_RESAMPLE = {0: "nearest", 1: "bicubic", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class _Habit:
    mean: tuple[float, ...] = _HALF
    std: tuple[float, ...] = _HALF
    interpolation: str = "bicubic"
    crop_pct: float = 1.0


_IMAGENET = _Habit(_IMAGENET_MEAN, _IMAGENET_STD, crop_pct=224 / 256)
_HABITS = {
    "vit": _Habit(interpolation="bilinear"),
    "deit": _IMAGENET,
    "dinov2": _IMAGENET,
    "dinov2_with_registers": _IMAGENET,
    "ijepa": _Habit(_IMAGENET_MEAN, _IMAGENET_STD),
}


def view_of(host: Host, processor: Mapping[str, Any] | None) -> ImageView:
    """The view of `host`, from the processor's settings if there are any.

    Raises `ModelFileError` for settings that cannot be used.
    """
    # timm's model inside of transformers' wrapper knows how its weights were trained.
    timm_model = getattr(host, "timm_model", None)
    if timm_model is not None:
        return timm_view(timm_model)
    config: Any = host.config
    # CLIP and SigLIP keep the settings of their image tower apart.
    vision = getattr(config, "vision_config", config)
    size, channels = size_pair(vision.image_size), int(getattr(vision, "num_channels", 3))
    habit = _HABITS.get(config.model_type, _Habit())
    if processor is not None:
        try:
            return _from_processor(processor, size, channels=channels, habit=habit)
        except (TypeError, ValueError) as error:  # a UsageError of ImageView is a ValueError
            raise ModelFileError(
                f"The image processor's settings are not usable ({error})",
                place=PROCESSOR,
                hint="correct the file beside the model",
            ) from error
    return ImageView(
        channels=channels,
        height=size[0],
        width=size[1],
        mean=per_channel(habit.mean, channels),
        std=per_channel(habit.std, channels),
        interpolation=habit.interpolation,
        crop_pct=habit.crop_pct,
    )


def _from_processor(
    settings: Mapping[str, Any], default: tuple[int, int], *, channels: int, habit: _Habit
) -> ImageView:
    resized = _size(settings.get("size"), default) if settings.get("do_resize", True) else default
    crop = settings.get("do_center_crop", False)
    (height, width) = _size(settings.get("crop_size"), resized) if crop else resized
    normalised = settings.get("do_normalize", True)
    # Processors that do not rescale normalise images in [0, 255]; a view's are in [0, 1].
    scale = 1.0 if settings.get("do_rescale", True) else 1 / 255
    mean = settings.get("image_mean", habit.mean) if normalised else 0.0
    std = settings.get("image_std", habit.std) if normalised else 1.0
    return ImageView(
        channels=channels,
        height=height,
        width=width,
        mean=tuple(scale * value for value in per_channel(mean, channels)),
        std=tuple(scale * value for value in per_channel(std, channels)),
        interpolation=_interpolation(settings.get("resample"), habit),
        # A crop larger than the resized image would be padded, which a view cannot express.
        crop_pct=min(1.0, min(height, width) / max(1, min(resized))),
    )


def _interpolation(resample: object, habit: _Habit) -> str:
    if resample is None:
        return habit.interpolation
    if not isinstance(resample, int):
        raise ModelFileError(f"resample is a number of Pillow's, not {resample!r}", place=PROCESSOR)
    return _RESAMPLE.get(resample, "bicubic")


def _size(size: object, default: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of the forms processors store: a number, a pair, or one of three mappings."""
    if size is None:
        return default
    if not isinstance(size, Mapping):
        return size_pair(size)
    if "height" in size and "width" in size:
        return size_pair([size["height"], size["width"]])
    if "shortest_edge" in size:
        return size_pair(size["shortest_edge"])
    raise ModelFileError(
        f"The size {dict(size)!r} has neither height and width nor shortest_edge", place=PROCESSOR
    )
