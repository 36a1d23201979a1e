"""torchvision vision transformers: built by name, saved as stock keys and constructor arguments.

torchvision has no directory layout. The files of `write` can be loaded without this package:

    model = torchvision.models.VisionTransformer(**json.load(open("config.json"))["kwargs"])
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import VisionTransformer

from layershuffle.errors import ModelFileError, UsageError
from layershuffle.image_view import ImageView
from layershuffle.models.files import (
    CONFIG,
    WEIGHTS,
    read_json,
    read_tensors,
    refused_by,
    weight_files,
    write_tensors,
)
from layershuffle.models.origin import (
    Backbone,
    Origin,
    check_rebuilt,
    filled,
    listed_names,
    remember,
    seeded,
    unknown_name,
    warn_new_head,
)

NAME = "torchvision"
_CLASS = "VisionTransformer"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of torchvision's ImageNet presets
_CROP = 224 / 256  # the presets resize to 256 and crop to 224


def owns(model: nn.Module) -> bool:
    """Whether it is a vision transformer of torchvision."""
    return isinstance(model, VisionTransformer)


def build(name: str, settings: Mapping[str, Any], *, seed: int) -> nn.Module:
    """The classification model `name`; `weights`: a tag or none (default: DEFAULT).

    The other `settings` are keywords of torchvision's builder. Raises `UsageError` for unknown
    names and keywords, `ModelFileError` if the weights are unavailable.
    """
    names = torchvision.models.list_models(module=torchvision.models, include="vit_*")
    if name not in names:
        listing = f"its vision transformers are {', '.join(names)}"
        raise unknown_name("torchvision model", name, names=names, listing=listing)
    args = dict(settings)
    tag = args.pop("weights", "DEFAULT" if args.pop("pretrained", True) else None)
    hint = "correct or leave out an argument after '?'; image_size and num_classes are usual"
    weights = classes = None
    with refused_by("torchvision", f"{name} with {dict(settings)}", hint=hint, kind=UsageError):
        if tag is not None and str(tag).lower() != "none":
            kinds = torchvision.models.get_model_weights(name).__members__
            if tag not in kinds:
                raise unknown_name(
                    f"set of weights for {name} called", str(tag), names=list(kinds),
                    listing=f"{', '.join(kinds)} or none",
                )  # fmt: skip
            weights, classes = kinds[str(tag)], args.pop("num_classes", None)
            args["num_classes"] = len(weights.meta["categories"])
            args.setdefault("image_size", weights.meta["min_size"][0])
        with seeded(seed):
            backbone: Backbone = torchvision.models.get_model(name, weights=None, **args)
    if weights is None:
        return remember(backbone, Origin())
    # torchvision only publishes .pth files. Their hash is checked, and with weights_only torch
    # reads tensors and refuses other pickled objects, unlike torch.hub's default.
    hint = f"copy the file into this cache, or use torchvision:{name}?weights=none"
    with refused_by(weights.url, torch.hub.get_dir(), hint=hint):
        tensors = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
        backbone.load_state_dict(tensors, strict=True)
    preset = weights.transforms()
    view = replace(
        image_view(backbone),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=str(preset.interpolation.value),
        crop_pct=min(1.0, preset.crop_size[0] / preset.resize_size[0]),
    )
    if classes is None or classes == num_classes(backbone):
        return remember(backbone, Origin(view=view, class_names=tuple(weights.meta["categories"])))
    resize_head(backbone, classes, seed=seed)
    return remember(backbone, Origin(view=view))


def num_classes(backbone: Backbone) -> int:
    """Number of classes of the head, 0 without one."""
    head = getattr(backbone.heads, "head", None)
    return head.out_features if isinstance(head, nn.Linear) else 0


def resize_head(backbone: Backbone, classes: int, *, seed: int) -> None:
    """Replace the head of `backbone` by a zero one, as in torchvision, with a warning."""
    old: nn.Linear = backbone.heads.head
    with seeded(seed):
        new = nn.Linear(old.in_features, classes)
    for parameter in new.parameters():
        nn.init.zeros_(parameter)
    backbone.heads.head = new.to(old.weight.device, old.weight.dtype)
    backbone.num_classes = classes  # an attribute of torchvision
    warn_new_head(old.out_features, classes, seed=seed)


def class_names(_: nn.Module) -> None:
    """`None`: the model has no place for them; those of weights and files are in its origin."""


def set_depth(backbone: Backbone, depth: int) -> None:
    """Do nothing: `write` takes the number of blocks from the model."""


def image_view(backbone: Backbone) -> ImageView:
    """torchvision's ImageNet preset at the model's size; that of weights is in the origin."""
    return ImageView(
        channels=3,
        height=backbone.image_size,
        width=backbone.image_size,
        mean=_MEAN,
        std=_STD,
        interpolation="bilinear",
        crop_pct=_CROP,
    )


def write(
    backbone: Backbone,
    directory: Path,
    *,
    view: ImageView,
    names: Sequence[str] | None,
    model_args: Mapping[str, Any],
) -> str:
    """Write config.json, with torchvision's term "categories", and model.safetensors. Returns
    "VisionTransformer".

    Raises `UsageError` for models that these arguments do not describe.
    """
    # The view is in layershuffle.json.
    del view
    sizes = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout")
    blocks = list(backbone.encoder.layers.children())
    kwargs = {
        **{name: getattr(backbone, name) for name in sizes},
        "num_layers": len(blocks),
        "num_heads": int(blocks[0].num_heads),
        "num_classes": num_classes(backbone),
        "representation_size": backbone.representation_size,
        **model_args,
    }
    # A convolutional stem, another norm or activation has no place in a file.
    check_rebuilt(
        backbone,
        lambda: VisionTransformer(**kwargs),
        how=f"{_CLASS} of torchvision with {kwargs}",
        hint="build it from sizes alone (image_size, patch_size, num_layers, ...)",
    )
    config = {"name": _CLASS, "kwargs": kwargs} | ({"categories": list(names)} if names else {})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(backbone.state_dict(), directory / WEIGHTS)
    return _CLASS


def read(directory: Path, *, seed: int) -> nn.Module:
    """The model that `write` wrote into `directory`."""
    place = directory / CONFIG
    config = read_json(place)
    if config.get("name") != _CLASS:
        raise ModelFileError(
            f'torchvision\'s configuration has "name": "{_CLASS}" and an object "kwargs"',
            place=place,
            hint="save the model again",
        )

    hint = "check config.json against the weights, or save the model again"
    with refused_by("torchvision", directory, hint=hint):
        tensors = read_tensors(*weight_files(directory))
        backbone: Backbone = filled(
            lambda: VisionTransformer(**config["kwargs"]), tensors, place=directory, seed=seed
        )
        names = listed_names(config.get("categories"), num_classes(backbone), place=place)
    return remember(backbone, Origin(class_names=names))
