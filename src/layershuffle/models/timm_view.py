"""Convert the image view of a timm model between timm's form (pretrained_cfg) and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from layershuffle.errors import UsageError
from layershuffle.image_view import ImageView, Resize
from layershuffle.models.origin import Backbone, per_channel, size_pair

_CROP_MODES = {"center": "crop", "squash": "squash"}  # timm's name: ours


def view_of_config(backbone: Backbone, config: Mapping[str, Any]) -> ImageView:
    """The view in the result of timm's `resolve_data_config`, at the size of the model `backbone`.

    Raises the errors of `timm_models.image_view`.
    """
    channels = int(getattr(backbone, "in_chans", None) or config["input_size"][0])
    height, width = image_size(backbone) or tuple(config["input_size"][1:])
    if config["crop_mode"] not in _CROP_MODES:
        raise UsageError(
            f"Images cannot be cropped in the mode {config['crop_mode']!r}",
            place=type(backbone).__name__,
            hint="add crop_mode=center or crop_mode=squash to the spec of the model",
        )
    # timm also has "random" and "lanczos", which a view does not support.
    nearest = {"random": "bicubic", "lanczos": "bicubic"}
    return ImageView(
        channels=channels,
        height=height,
        width=width,
        mean=per_channel(config["mean"], channels),
        std=per_channel(config["std"], channels),
        interpolation=nearest.get(config["interpolation"], config["interpolation"]),
        crop_pct=float(config["crop_pct"]),
        resize=cast(Resize, _CROP_MODES[config["crop_mode"]]),
    )


def config_of_view(view: ImageView) -> dict[str, Any]:
    """The settings of a pretrained_cfg for `view`."""
    return {
        "input_size": [view.channels, view.height, view.width],
        "mean": list(view.mean),
        "std": list(view.std),
        "interpolation": view.interpolation,
        "crop_pct": view.crop_pct,
        "crop_mode": next(name for name, ours in _CROP_MODES.items() if ours == view.resize),
    }


def image_size(backbone: Backbone) -> tuple[int, int] | None:
    """(height, width) of the input of `backbone`, `None` if it is unknown."""
    size = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    return size_pair(size) if size is not None else None
