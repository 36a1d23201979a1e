"""torchvision vision transformers: built by name, saved as stock keys and constructor arguments.

torchvision has no directory layout. The files of `write` can be loaded without this package:

    model = torchvision.models.VisionTransformer(**json.load(open("config.json"))["kwargs"])
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import nn
from torchvision.models import VisionTransformer

from layershuffle.core.discovery import check_architecture
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.image_view import ImageView
from layershuffle.models.files import (
    CONFIG,
    WEIGHTS,
    check_numbers,
    check_tensors,
    read_json,
    read_tensors,
    shapes_of,
    tensor_shapes,
    weight_files,
    write_tensors,
)
from layershuffle.models.origin import (
    HostModel,
    Origin,
    listed_names,
    match_dtype,
    origin_of,
    remember,
    seeded,
    unknown_name,
    warn_new_head,
    weights_missing,
)

NAME = "torchvision"
_CLASS = "VisionTransformer"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of torchvision's ImageNet presets
_RESIZE = 256 / 224  # the presets resize to 256 and crop to 224
_REFUSED = (TypeError, ValueError, RuntimeError, AssertionError, KeyError, AttributeError)


def owns(model: nn.Module) -> bool:
    """Whether torchvision made the model."""
    return isinstance(model, VisionTransformer) or type(model).__module__.startswith("torchvision.")


def build(name: str, settings: Mapping[str, Any], *, seed: int) -> nn.Module:
    """The classification model `name`; `weights`: a tag or none (default: DEFAULT).

    The other `settings` are keywords of torchvision's builder. Raises `UsageError` for unknown
    names and keywords, `ModelFileError` if the weights are unavailable.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise unknown_name(
            "torchvision model", name, names=names, listing="vit_b_16, vit_b_32, vit_l_16, vit_l_32"
        )
    args = dict(settings)
    tag = args.pop("weights", "DEFAULT" if args.pop("pretrained", True) else None)
    if tag is None or str(tag).lower() == "none":
        return remember(_create(name, args, seed=seed), Origin(model_args=args))
    host: nn.Module = _trained(name, args, tag=str(tag), seed=seed)
    return host


def num_classes(host: HostModel) -> int:
    """Number of classes of the head."""
    return _head(host).out_features


def resize_head(host: HostModel, classes: int, *, seed: int) -> None:
    """Replace the head of `host` by a zero one, as in torchvision, with a warning."""
    old = _head(host)
    # On the meta device, which does not draw from torch's global generator.
    new = nn.Linear(old.in_features, classes, device="meta").to_empty(device=old.weight.device)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    host.get_submodule("heads").head = new.to(old.weight.dtype)
    host.num_classes = classes  # an attribute of torchvision
    remember(host, replace(origin_of(host), class_names=None))
    warn_new_head(old.out_features, classes, seed=seed)


def class_names(host: HostModel) -> tuple[str, ...] | None:
    """The categories of the weights, or those of the data that the model was refined on."""
    return origin_of(host).class_names


def set_class_names(host: HostModel, names: Sequence[str]) -> None:
    """Set the class names, which config.json lists as "categories", torchvision's term."""
    remember(host, replace(origin_of(host), class_names=tuple(names)))


def set_depth(host: HostModel, depth: int) -> None:
    """Do nothing: `write` takes the number of blocks from the model."""


def image_view(host: HostModel) -> ImageView:
    """The view of the weights' preset, else torchvision's ImageNet preset at the model's size."""
    size = int(getattr(host, "image_size", 224))
    return ImageView(
        channels=3,
        height=size,
        width=size,
        mean=_MEAN,
        std=_STD,
        interpolation="bilinear",
        crop_pct=1 / _RESIZE,
    )


def write(
    host: HostModel, directory: Path, *, view: ImageView, model_args: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Write config.json and model.safetensors. Returns ("VisionTransformer", its arguments).

    Raises `UsageError` for models that these arguments do not describe.
    """
    # The view is in layershuffle.json.
    del view
    if not isinstance(host, VisionTransformer):
        raise UsageError(
            f"{type(host).__name__} of torchvision cannot be saved here",
            hint=f"of torchvision, {_CLASS} can",
        )
    kwargs = {**_constructor_args(host), **(model_args or {})}
    _check_rebuilt(host, kwargs)
    names = class_names(host)
    config = {"name": _CLASS, "kwargs": kwargs} | ({"categories": list(names)} if names else {})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(host.state_dict(), directory / WEIGHTS)
    return _CLASS, kwargs


def read(directory: Path, *, seed: int) -> tuple[nn.Module, str]:
    """The model that `write` wrote into `directory`, and the name of its class."""
    place = directory / CONFIG
    config = read_json(place)
    check_numbers(config, place)
    kwargs = config.get("kwargs")
    if config.get("name") != _CLASS or not isinstance(kwargs, dict):
        raise ModelFileError(
            f'torchvision\'s configuration needs "name": "{_CLASS}" and an object "kwargs"',
            place=place,
            hint="save the model again",
        )
    weights = weight_files(directory)[0]
    try:
        check_tensors(
            tensor_shapes(weights), shapes_of(_sketch(kwargs).state_dict()), place=weights
        )
        with seeded(seed):
            host = VisionTransformer(**kwargs)
    except _REFUSED as error:
        raise ModelFileError(
            f"torchvision cannot build {_CLASS} from these arguments ({error})",
            place=place,
            hint="save the model again",
        ) from error
    # In the dtype of the file, such as half precision.
    tensors = read_tensors(weights, shapes_of(host.state_dict()))
    match_dtype(host, tensors)
    host.load_state_dict(tensors, strict=True)
    names = listed_names(config.get("categories"), num_classes(host), place=place)
    return remember(host, Origin(model_args=kwargs, class_names=names)), _CLASS


def _create(name: str, args: Mapping[str, Any], *, seed: int) -> HostModel:
    try:
        with seeded(seed):
            host: HostModel = torchvision.models.get_model(name, weights=None, **args)
    except _REFUSED as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in args.items()) or "no arguments"
        raise UsageError(
            f"torchvision cannot build {name!r} with {arguments[:300]} ({error})",
            hint="correct or leave out the argument; image_size, num_classes, dropout are usual",
        ) from error
    return host


def _trained(name: str, args: dict[str, Any], *, tag: str, seed: int) -> HostModel:
    kinds = torchvision.models.get_model_weights(name)
    tags = [kind.name for kind in kinds]
    if tag not in ("DEFAULT", *tags):
        raise unknown_name(
            f"set of weights for {name} called",
            tag,
            names=tags,
            listing=f"DEFAULT, {', '.join(tags)} or none",
        )
    weights = kinds[tag]
    size = weights.meta.get("min_size", (None,))[0]
    of_weights = {"num_classes": len(weights.meta["categories"]), "image_size": size}
    classes = args.pop("num_classes", None)
    # Only vision transformers have the keyword image_size.
    args = {**({k: v for k, v in of_weights.items() if v} if "vit" in name else {}), **args}
    host = _create(name, args, seed=seed)
    check_architecture(host)  # before its weights are downloaded
    _load_trained(host, weights, name)
    names = tuple(weights.meta["categories"])
    remember(
        host, Origin(model_args=args, view=_preset_view(weights, host), class_names=names or None)
    )
    if classes is not None and classes != num_classes(host):
        resize_head(host, classes, seed=seed)
    return host


def _load_trained(host: HostModel, weights: Any, name: str) -> None:
    # torchvision only publishes .pth files. Their hash is checked, and with weights_only torch
    # reads tensors and refuses other pickled objects, unlike torch.hub's default.
    try:
        tensors = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except URLError as error:
        raise weights_missing(
            f"torchvision:{name}",
            f"the network did not give them ({error.reason})",
            place=torch.hub.get_dir(),
            download=f'python -c "import torch; torch.hub.load_state_dict_from_url('
            f"'{weights.url}', weights_only=True)\"",
            random=f"torchvision:{name}?weights=none",
        ) from error
    try:
        host.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise UsageError(
            f"The weights {weights.name} of {name} do not fit the model asked for ({error})",
            hint="leave out the arguments after '?', or use weights=none",
        ) from error


def _preset_view(weights: Any, host: HostModel) -> ImageView:
    preset = weights.transforms()
    size = int(getattr(host, "image_size", preset.crop_size[0]))
    return ImageView(
        channels=3,
        height=size,
        width=size,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=str(preset.interpolation.value),
        crop_pct=min(1.0, preset.crop_size[0] / preset.resize_size[0]),
    )


def _head(host: HostModel) -> nn.Linear:
    head = getattr(getattr(host, "heads", None), "head", None)
    if not isinstance(head, nn.Linear):
        raise UsageError(
            f"The head of {type(host).__name__} is not known",
            hint=f"use {_CLASS} of torchvision with its linear layer heads.head",
        )
    return head


def _constructor_args(host: VisionTransformer) -> dict[str, Any]:
    names = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout")
    blocks = list(host.encoder.layers._modules.values())
    return {name: getattr(host, name) for name in names} | {
        "num_layers": len(blocks),
        "num_heads": int(blocks[0].num_heads),
        "num_classes": num_classes(host),
        "representation_size": host.representation_size,
    }


def _sketch(kwargs: Mapping[str, Any]) -> VisionTransformer:
    with seeded(0), torch.device("meta"):
        return VisionTransformer(**kwargs)


def _check_rebuilt(host: VisionTransformer, kwargs: Mapping[str, Any]) -> None:
    # A convolutional stem or another norm is passed to the constructor as an object.
    sketch = _sketch(kwargs)
    same_norm = isinstance(host.norm_layer, functools.partial) and (
        host.norm_layer.func is nn.LayerNorm and host.norm_layer.keywords == {"eps": 1e-6}
    )
    if shapes_of(sketch.state_dict()) != shapes_of(host.state_dict()) or not same_norm:
        raise UsageError(
            "This VisionTransformer has a stem or a norm that no file can describe",
            hint="build it from sizes alone (image_size, patch_size, num_layers, ...)",
        )
