"""timm models: built by name, saved in timm's own directory layout.

`timm.create_model("local-dir:DIR", pretrained=True)` reads the files of `write` without this
package: config.json has architecture, model_args, label_names and pretrained_cfg in timm's form.
Directories and training checkpoints of timm itself can be read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from timm.models import get_pretrained_cfg
from torch import nn

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
    hub_silence,
    listed_names,
    match_dtype,
    origin_of,
    remember,
    seeded,
    settings_of,
    unknown_name,
    warn_new_head,
    weights_missing,
)
from layershuffle.models.timm_checkpoint import load_checkpoint
from layershuffle.models.timm_view import config_of_view, image_size, set_view, view_of_config
from layershuffle.text import one_line

NAME = "timm"
_LOCAL = "local-dir:"
_VIEW_SETTINGS = frozenset({"mean", "std", "interpolation", "crop_pct", "crop_mode"})
# Arguments of timm.create_model that read files or change the kind of model; refused in specs and
# files.
_RESERVED = frozenset(
    {
        "cache_dir", "checkpoint_path", "device", "dtype", "exportable", "features_only",
        "model_name", "no_jit", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay",
        "pretrained_model_args", "pruned", "scriptable",
    }
)  # fmt: skip
# Keys of pretrained_cfg that timm uses to load a directory or to resolve transforms.
_CFG_KEYS = (
    "interpolation", "crop_pct", "crop_mode", "first_conv", "classifier", "fixed_input_size",
    "pool_size",
)  # fmt: skip


def owns(model: nn.Module) -> bool:
    """Whether timm made the model."""
    return hasattr(model, "pretrained_cfg") or type(model).__module__.startswith("timm.")


def build(name: str, settings: Mapping[str, Any], *, seed: int) -> nn.Module:
    """The model `name`; `settings`: keywords of timm.create_model (`pretrained` defaults to true).

    `checkpoint`: a file of timm's training script with the weights. `mean`, `std`,
    `interpolation`, `crop_pct` and `crop_mode` change the image view. The name local-dir:DIR,
    without settings, means a directory in timm's layout. Raises `UsageError` for unknown names and
    keywords, `ModelFileError` if the weights are unavailable.
    """
    args = dict(settings)
    if name.startswith(_LOCAL):
        if args:
            raise UsageError("A directory has its own settings", hint=f"write timm:{name}")
        return read(Path(name.removeprefix(_LOCAL)).expanduser(), seed=seed)[0]
    checkpoint = args.pop("checkpoint", None)
    pretrained = args.pop("pretrained", checkpoint is None)
    if not isinstance(pretrained, bool):
        raise UsageError(f"pretrained must be true or false, got {pretrained!r}")
    _check_name(name)
    _check_reserved(args)
    view = {key: args.pop(key) for key in _VIEW_SETTINGS & args.keys()}
    # timm would silently drop the trained head; here it is loaded, then replaced with a warning.
    classes = args.pop("num_classes", None) if pretrained else None
    if pretrained:
        _check_architecture(name, args)
    base, overlay = _trained(name) if pretrained else (None, {})
    host = _create(name, args, seed=seed, pretrained=pretrained, overlay=overlay)
    if checkpoint is not None:
        load_checkpoint(host, Path(str(checkpoint)).expanduser())
    set_view(host, view)
    if pretrained:
        _name_imagenet(host)
    if classes is not None and classes != num_classes(host):
        resize_head(host, classes, seed=seed)
    return remember(host, Origin(model_args=args, base_model=base))


def num_classes(host: HostModel) -> int:
    """Number of classes of the head."""
    return int(host.num_classes)


def resize_head(host: HostModel, classes: int, *, seed: int) -> None:
    """Replace the head of `host` (both heads of a distilled model) by a new one, with a warning."""
    old, reference = num_classes(host), next(host.parameters())
    with seeded(seed):
        host.reset_classifier(classes)
    host.to(reference.device, reference.dtype)
    cfg = {key: value for key, value in host.pretrained_cfg.items() if key != "label_names"}
    host.pretrained_cfg = {**cfg, "num_classes": classes}
    if classes:  # ?num_classes=0 asks for the features themselves
        warn_new_head(old, classes, seed=seed)


def class_names(host: HostModel) -> tuple[str, ...] | None:
    """The `label_names` of the configuration (a list, or a mapping from 0..n-1), else `None`."""
    names = (getattr(host, "pretrained_cfg", None) or {}).get("label_names")
    if isinstance(names, dict):
        # Keys of JSON are strings. A mapping from WordNet ids does not give the order.
        by_index = {str(key): name for key, name in names.items()}
        names = [by_index.get(str(index)) for index in range(len(by_index))]
        names = None if None in names else names
    return listed_names(names, num_classes(host), place="label_names")


def _name_imagenet(host: HostModel) -> None:
    """Set the class names of weights that timm recognises as trained on (a part of) ImageNet."""
    subset = infer_imagenet_subset(host)
    if subset is not None and class_names(host) is None:
        set_class_names(host, ImageNetInfo(subset).label_names())


def set_class_names(host: HostModel, names: Sequence[str]) -> None:
    """Set the class names."""
    host.pretrained_cfg = {**host.pretrained_cfg, "label_names": list(names)}


def set_depth(host: HostModel, depth: int) -> None:
    """Record that `host` now has `depth` blocks, for saving.

    Raises `UsageError` if timm cannot build the architecture with this depth.
    """
    args = {**_known_args(host), "depth": depth}
    _check_rebuilt(host, _architecture(host), {**args, "num_classes": num_classes(host)})
    remember(host, replace(origin_of(host), model_args=args))


def image_view(host: HostModel) -> ImageView:
    """The view in the model's pretrained_cfg, at the model's size and channels.

    Raises `UsageError` for settings that a view does not have (the crop mode border).
    """
    return view_of_config(host, resolve_data_config(model=host))


def write(
    host: HostModel, directory: Path, *, view: ImageView, model_args: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Write config.json and model.safetensors. Returns (architecture, arguments to rebuild it).

    Raises `UsageError` if the arguments are unknown, or give another model.
    """
    named = dict(model_args or {})
    name = named.pop("architecture", None) or _architecture(host)
    _check_name(name)
    args = _plain_json({**_known_args(host), **named, "num_classes": num_classes(host)})
    _check_rebuilt(host, name, args)
    config = {
        "architecture": name,
        "num_classes": num_classes(host),
        "num_features": int(host.num_features),
        "model_args": args,
        "pretrained_cfg": _pretrained_cfg(host, view),
    }
    names = class_names(host)
    if names:  # timm reads them from here
        config["label_names"] = list(names)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(host.state_dict(), directory / WEIGHTS)
    return name, args


def _architecture(host: HostModel) -> str:
    name = (getattr(host, "pretrained_cfg", None) or {}).get("architecture")
    if not name:
        raise UsageError(
            f"It is unknown how timm built this {type(host).__name__}",
            hint="make it with timm.create_model, or name it: save(model, directory, "
            "model_args={'architecture': 'vit_tiny_patch16_224', 'depth': 12, ...})",
        )
    return str(name)


def read(directory: Path, *, seed: int) -> tuple[nn.Module, str]:
    """The model that `write` wrote into `directory`, and its architecture.

    Raises `ModelFileError` if config.json and weights do not fit together.
    """
    place = directory / CONFIG
    config = read_json(place)
    check_numbers(config, place)
    name, args, cfg = _config_parts(config, place)
    weights = weight_files(directory)[0]
    try:
        _check_name(name)
        _check_reserved(args)
        # First on the meta device, to check the weights before memory is allocated.
        check_tensors(
            tensor_shapes(weights), shapes_of(_sketch(name, args).state_dict()), place=weights
        )
        host = _create(name, args, seed=seed)
    except UsageError as error:
        raise ModelFileError(error.cause, place=place, hint=error.hint) from error
    tensors = read_tensors(weights, shapes_of(host.state_dict()))
    match_dtype(host, tensors)
    host.load_state_dict(tensors, strict=True)
    # Only these keys, because others could name files for timm to load.
    keys = (*_CFG_KEYS, "mean", "std", "label_names")
    usable = {key: cfg[key] for key in keys if key in cfg}
    host.pretrained_cfg = {**host.pretrained_cfg, **usable}
    class_names(host)  # raises for invalid names
    return remember(host, Origin(model_args=args)), name


def _config_parts(
    config: Mapping[str, Any], place: Path
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    name, args = config.get("architecture"), config.get("model_args", {})
    cfg = config.get("pretrained_cfg", {})
    if not isinstance(name, str) or not isinstance(args, dict) or not isinstance(cfg, dict):
        raise ModelFileError(
            "timm's configuration needs architecture (text), model_args and pretrained_cfg "
            "(objects)",
            place=place,
            hint="save the model again",
        )
    names = {"label_names": config["label_names"]} if "label_names" in config else {}
    return name, _defaults(config, cfg) | args, cfg | names


def _defaults(config: Mapping[str, Any], cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that timm takes from pretrained_cfg if they are not in model_args."""
    args = {"num_classes": config.get("num_classes", cfg.get("num_classes"))}
    size = cfg.get("input_size")
    if isinstance(size, list) and len(size) == 3:
        args["in_chans"] = size[0]
        if cfg.get("fixed_input_size"):
            args["img_size"] = size[1:]
    return {key: value for key, value in args.items() if value is not None}


def _check_name(name: str) -> None:
    architecture, _, tag = name.partition(".")
    # With a colon (hf-hub:, local-dir:), timm would read files without our checks.
    if not timm.is_model(architecture) or ":" in name:
        raise unknown_name(
            "timm model",
            name,
            names=timm.list_models(),
            listing="see timm.list_models('*vit*')",
        )
    tagged = timm.list_models(f"{architecture}.*", pretrained=True) if tag else [name]
    if name not in tagged:
        raise unknown_name(
            "timm model", name, names=tagged, listing=f"weights are {', '.join(tagged) or 'none'}"
        )


def _check_reserved(args: Mapping[str, Any]) -> None:
    refused = sorted(_RESERVED & args.keys())
    if refused:
        raise UsageError(f"{refused[0]!r} is not an argument of a model", hint="leave it out")


def _trained(name: str) -> tuple[str, dict[str, Any]]:
    """(hub name, pretrained_cfg overlay with the path of the downloaded safetensors).

    timm itself would fall back to a pickle without safetensors.
    """
    repository = getattr(get_pretrained_cfg(name), "hf_hub_id", None)
    if not repository:
        raise UsageError(
            f"timm has no weights of {name!r} in safetensors",
            hint=f"choose one of timm.list_models('{name.partition('.')[0]}*', pretrained=True), "
            f"or timm:{name}?pretrained=false for random weights",
        )
    download = f"hf download {repository} {WEIGHTS}"
    try:
        path = hf_hub_download(repository, WEIGHTS)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        random = f"timm:{name}?pretrained=false"
        raise weights_missing(
            f"timm:{name}", hub_silence(), download=download, random=random
        ) from error
    except (EntryNotFoundError, HfHubHTTPError) as error:
        raise ModelFileError(
            f"The hub has no {WEIGHTS} of {repository} that can be read ({type(error).__name__})",
            hint=f"use timm:{name}?pretrained=false for random weights, or another model",
        ) from error
    tensor_shapes(Path(path))  # raises for a damaged download
    # With custom_load, timm would use the architecture's own loader instead of this file.
    return repository, {"file": path, "custom_load": False}


def _check_architecture(name: str, args: Mapping[str, Any]) -> None:
    """Raises `StackError` for a model that `wrap` would refuse, before its weights are loaded."""
    try:
        sketch = _sketch(name, args)
    except (UsageError, TypeError):
        return  # building it with memory may succeed, or will raise
    check_architecture(sketch)


def _create(
    name: str,
    args: Mapping[str, Any],
    *,
    seed: int,
    pretrained: bool = False,
    overlay: Mapping[str, Any] | None = None,
) -> HostModel:
    try:
        with seeded(seed):
            host: HostModel = timm.create_model(
                name, pretrained=pretrained, pretrained_cfg_overlay=dict(overlay or {}), **args
            )
    # Errors of architectures for unknown or inconsistent arguments.
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError, AttributeError) as error:
        raise _not_built(name, args, error) from error
    return host


def _sketch(name: str, args: Mapping[str, Any]) -> HostModel:
    """The model on the meta device, cached, so it must not be changed. `args` are plain JSON."""
    return _sketched(name, json.dumps(args))


# A training saves the same model repeatedly, and building a sketch takes half the time of a save.
@lru_cache(maxsize=4)
def _sketched(name: str, args_json: str) -> HostModel:
    args = json.loads(args_json)
    try:
        with seeded(0), torch.device("meta"):
            host: HostModel = timm.create_model(name, pretrained=False, **args)
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError, AttributeError) as error:
        raise _not_built(name, args, error) from error
    return host


def _not_built(name: str, args: Mapping[str, Any], error: Exception) -> UsageError:
    arguments = ", ".join(f"{key}={value!r}" for key, value in args.items()) or "no arguments"
    return UsageError(
        f"timm cannot build {name!r} with {arguments[:300]} "
        f"({type(error).__name__}: {one_line(error)})",
        hint=f"correct or leave out the argument; timm.create_model('{name}', ...) takes them",
    )


def _known_args(host: HostModel) -> dict[str, Any]:
    """Arguments recorded by timm (1.0.31 or later) or by `build`, else those of its attributes."""
    args = {**getattr(host, "_model_args", {}), **origin_of(host).model_args}
    if not args:
        args = {"in_chans": getattr(host, "in_chans", None), "img_size": image_size(host)}
    return {k: v for k, v in args.items() if v is not None and k not in _RESERVED}


def _plain_json(args: dict[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(args))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The model was built with arguments that no file can hold ({error})",
            hint="pass replacements by name: save(model, directory, model_args={...})",
        ) from error
    return plain


def _check_rebuilt(host: HostModel, name: str, args: Mapping[str, Any]) -> None:
    """Raises `UsageError` unless `name` and `args` give an equivalent model."""
    hint = "name what the model was built with: save(model, directory, model_args={'depth': 12})"
    try:
        sketch = _sketch(name, args)
    except UsageError as error:
        raise UsageError(error.cause, hint=hint) from error
    # Shapes alone do not show another activation, epsilon or pooling.
    for facts_of in (lambda m: shapes_of(m.state_dict()), settings_of):
        ours, theirs = facts_of(host), facts_of(sketch)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise UsageError(
                    f"timm.create_model({name!r}) with {dict(args)} gives another model than this "
                    f"one: {key} is {theirs.get(key)!r} there and {ours.get(key)!r} here",
                    hint=hint,
                )


def _pretrained_cfg(host: HostModel, view: ImageView) -> dict[str, Any]:
    cfg = getattr(host, "pretrained_cfg", None) or {}
    settings = {key: cfg[key] for key in _CFG_KEYS if cfg.get(key) is not None}
    return _plain_json(settings) | {
        **config_of_view(view),
        "num_classes": num_classes(host),
        "custom_load": False,
    }
