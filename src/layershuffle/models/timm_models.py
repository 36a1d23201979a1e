"""timm models: built by name, saved in timm's own directory layout.

`timm.create_model("local-dir:DIR", pretrained=True)` reads the files of `write` without this
package: config.json has architecture, model_args, label_names and pretrained_cfg in timm's form.
Directories and training checkpoints of timm itself can be read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import timm
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from timm.layers import PatchEmbed
from timm.models import get_pretrained_cfg
from torch import nn

from layershuffle.ground.errors import UsageError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import nearest, shortened
from layershuffle.images.view import ImageView, Resize
from layershuffle.models.files import (
    CONFIG,
    LOG,
    WEIGHTS,
    WRAPPERS,
    check_download,
    fetched,
    library_errors,
    read_tensors,
    say_dtype,
    tensor_headers,
    weight_files,
    write_tensors,
)
from layershuffle.models.origin import (
    Backbone,
    Origin,
    check_rebuilt,
    filled,
    listed_names,
    origin_of,
    per_channel,
    remember,
    seeded,
    size_pair,
    sketched,
    unknown_name,
    warn_new_head,
)

NAME = "timm"
_VIEW_SETTINGS = frozenset({"mean", "std", "interpolation", "crop_pct", "crop_mode"})
# Arguments of timm.create_model that read files or change the kind of model.
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


_CROP_MODES = {"center": "crop", "squash": "squash"}  # timm's name: ours
_OWN = ("pretrained", "checkpoint")  # settings that say where the weights are
_NO_LOADER = {"custom_load": False}  # of a pretrained_cfg: timm reads the file that it is told


def owns(model: nn.Module) -> bool:
    """Whether timm made the model."""
    return hasattr(model, "pretrained_cfg") or type(model).__module__.startswith("timm.")


def build(name: str, settings: Mapping[str, Any], *, seed: int) -> nn.Module:
    """The model `name`; `settings`: keywords of timm.create_model (`pretrained` defaults to true).

    `checkpoint`: a file of timm's training script with the weights. `mean`, `std`,
    `interpolation`, `crop_pct` and `crop_mode` change the image view. Raises `UsageError` for
    unknown names and keywords, `ModelFileError` if the weights are unavailable.
    """
    # With a colon (hf-hub:, local-dir:), timm would read files without our checks.
    if ":" in name or not timm.is_model(name.partition(".")[0]):
        raise unknown_name(
            "timm model", name, names=timm.list_models(), listing="see timm.list_models('*vit*')"
        )
    if refused := sorted(_RESERVED & settings.keys() - {"pretrained"}):
        raise UsageError(f"{refused[0]!r} is not an argument of a model", hint="leave it out")
    for key in settings:
        # timm passes what it does not know to the model, after it has fetched the weights.
        meant = nearest(key, _OWN)
        if key not in _OWN and meant is not None:
            raise UsageError(
                f"{key!r} is not an argument of a model", hint=f"did you mean {meant!r}?"
            )
    args = dict(settings)
    checkpoint = args.pop("checkpoint", None)
    pretrained = args.pop("pretrained", checkpoint is None)
    if not isinstance(pretrained, bool):
        raise UsageError(
            f"pretrained must be true or false, got {pretrained!r}",
            hint=f"timm:{name}?pretrained=false has random weights",
        )
    view = {key: args.pop(key) for key in _VIEW_SETTINGS & args.keys()}
    for key in ("mean", "std"):
        if isinstance(view.get(key), int | float):  # of a single channel
            view[key] = (view[key],)
    # timm would silently drop the trained head; here it is loaded, then replaced with a warning.
    classes = args.pop("num_classes", None) if pretrained else None
    base = None
    natural = False
    hint = f"correct or leave out an argument after '?': timm.create_model({name!r}, ...) takes it"
    with library_errors("timm", f"{name} with {dict(settings)}", hint=hint, kind=UsageError):
        if checkpoint is not None:
            path = user_path(str(checkpoint))
            backbone, natural = _from_checkpoint(name, args, path, seed)
        else:
            weights: dict[str, Any] = {}
            if pretrained:
                base, file = _trained(name)
                # With custom_load, timm would use the architecture's own loader, not this file.
                overlay = {"file": file, **_NO_LOADER}
                weights = {"pretrained": True, "pretrained_cfg_overlay": overlay}
            with seeded(seed):
                backbone = timm.create_model(name, **weights, **args)
        backbone.pretrained_cfg = {**backbone.pretrained_cfg, **view}
        image_view(backbone)  # raises for settings that fit no image
        _check_patches(backbone)
    # timm names no classes of its weights, but recognises those of (a part of) ImageNet.
    subset = infer_imagenet_subset(backbone) if pretrained else None
    names = tuple(ImageNetInfo(subset).label_names()) if subset else None
    if classes is not None and classes != num_classes(backbone):
        resize_head(backbone, classes, seed=seed)
        names = None
    return remember(
        backbone,
        Origin(
            model_args=args,
            base_model=base,
            class_names=names,
            natural_classes=natural,
            random=not pretrained and checkpoint is None,
        ),
    )


def _check_patches(backbone: nn.Module) -> None:
    """Raises `UsageError` for images that do not divide into patches: timm says it at a forward."""
    patches = getattr(backbone, "patch_embed", None)
    if not isinstance(patches, PatchEmbed) or patches.img_size is None:
        return
    size = patches.img_size
    for side, part in zip(size, patches.patch_size, strict=True):
        loose = patches.strict_img_size or patches.dynamic_img_pad  # then the rest is cut or filled
        if side < part or (side % part and not loose):
            raise UsageError(
                f"Images of {size[0]} x {size[1]} do not divide into patches of {part}",
                hint=f"choose a multiple, such as img_size={part * max(1, round(side / part))}",
            )


def _trained(name: str) -> tuple[str, str]:
    """(hub name, path of the downloaded safetensors); timm itself would fall back to a pickle."""
    repository = getattr(get_pretrained_cfg(name), "hf_hub_id", None)
    if not repository:
        raise UsageError(
            f"timm has no weights of {name!r} in safetensors",
            hint=f"choose one of timm.list_models('{name.partition('.')[0]}*', pretrained=True), "
            f"or timm:{name}?pretrained=false for random weights",
        )
    path = fetched(repository, [WEIGHTS]) / WEIGHTS
    # Raises for a damaged or missing file.
    kinds = {tensor: dtype for tensor, (dtype, _) in tensor_headers(path).items()}
    say_dtype(kinds, f"timm:{name}")
    return repository, str(path)


def _from_checkpoint(
    name: str, args: Mapping[str, Any], path: Path, seed: int
) -> tuple[Backbone, bool]:
    """A model with the weights in a checkpoint of timm's training script (.pth.tar), and whether it
    is one: another script may have the weights inside of a module, and its own order of classes.

    If the run has an average of the weights, it is used, as in timm. torch's restricted unpickler
    reads the file, which creates tensors and refuses code.
    """
    check_download(path)
    hint = (
        "name a .pth.tar file of timm's train.py, or a .safetensors file, and say what the model "
        "was trained with, as in ?checkpoint=FILE&num_classes=10"
    )
    with library_errors("torch", path, hint=hint):
        stored = timm.models.load_state_dict(str(path), use_ema=True, weights_only=True)
        tensors = {WRAPPERS.sub("", name): tensor for name, tensor in stored.items()}

        def make() -> Backbone:
            return timm.create_model(name, **args)

        # Lightning and others keep the model inside of a module of theirs, beside its loss.
        first = next(iter(sketched(make).state_dict()))
        prefixes = {key.removesuffix(first) for key in tensors if key.endswith(f".{first}")}
        if first not in tensors and len(prefixes) == 1:
            (prefix,) = prefixes
            inside = {key for key in tensors if key.startswith(prefix)}
            if unused := sorted(tensors.keys() - inside):
                LOG.warning("%s: tensors that are not used: %s.", path, shortened(unused))
            tensors = {key.removeprefix(prefix): tensors[key] for key in inside}
            return filled(make, tensors, place=path, seed=seed), False
        return filled(make, tensors, place=path, seed=seed), True


def num_classes(backbone: Backbone) -> int:
    """Number of classes of the head."""
    return int(backbone.num_classes)


def resize_head(backbone: Backbone, classes: int, *, seed: int) -> None:
    """Replace the head (both heads of a distilled model) by a new one, with a warning."""
    old = num_classes(backbone)
    reference = next(backbone.parameters())
    with seeded(seed):
        backbone.reset_classifier(classes)
    backbone.to(reference.device, reference.dtype)
    cfg = {key: value for key, value in backbone.pretrained_cfg.items() if key != "label_names"}
    backbone.pretrained_cfg = {**cfg, "num_classes": classes}
    if classes:  # ?num_classes=0 asks for the features themselves
        warn_new_head(backbone, old=old, new=classes, seed=seed)


def class_names(backbone: Backbone) -> tuple[str, ...] | None:
    """The `label_names` of the configuration (a list, or a mapping from 0..n-1), else `None`."""
    names = (getattr(backbone, "pretrained_cfg", None) or {}).get("label_names")
    if isinstance(names, dict):
        # Keys of JSON are strings. A mapping from WordNet ids does not give the order.
        by_index = {str(key): name for key, name in names.items()}
        names = [by_index.get(str(index)) for index in range(len(by_index))]
        names = None if None in names else names
    return listed_names(names, num_classes(backbone), place="label_names")


def set_depth(backbone: Backbone, depth: int) -> None:
    """Record that `backbone` now has `depth` blocks, for saving.

    Raises `UsageError` if timm cannot build the architecture with this depth.
    """
    args = {**_known_args(backbone), "depth": depth}
    _check_rebuilt(
        backbone, _architecture(backbone), {**args, "num_classes": num_classes(backbone)}
    )
    remember(backbone, replace(origin_of(backbone), model_args=args))


def image_view(backbone: Backbone) -> ImageView:
    """The view in the model's pretrained_cfg, at the model's size and channels.

    Raises `UsageError` for settings that a view does not have (the crop mode border).
    """
    return view_of_config(backbone, resolve_data_config(model=backbone))


def write(
    backbone: Backbone,
    directory: Path,
    *,
    view: ImageView,
    names: Sequence[str] | None,
    model_args: Mapping[str, Any],
) -> str:
    """Write config.json and model.safetensors. Returns the architecture.

    Raises `UsageError` if the arguments are unknown, or give another model.
    """
    named = dict(model_args)
    name = named.pop("architecture", None) or _architecture(backbone)
    hint = "pass replacements by name: save(model, directory, model_args={...})"
    with library_errors("JSON", hint=hint, kind=UsageError):
        built = {**_known_args(backbone), **named, "num_classes": num_classes(backbone)}
        args: dict[str, Any] = json.loads(json.dumps(built))
    _check_rebuilt(backbone, name, args)
    # The configuration has it beside them, and transformers' wrapper refuses it twice.
    del args["num_classes"]
    cfg = getattr(backbone, "pretrained_cfg", None) or {}
    config = {
        "architecture": name,
        "num_classes": num_classes(backbone),
        "num_features": int(backbone.num_features),
        "model_args": args,
        "pretrained_cfg": {
            **{key: cfg[key] for key in _CFG_KEYS if cfg.get(key) is not None},
            **config_of_view(view),
            "num_classes": num_classes(backbone),
            **_NO_LOADER,
        },
    }
    if names:  # timm reads them from here
        config["label_names"] = list(names)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(backbone.state_dict(), directory / WEIGHTS)
    return name


def view_of_config(backbone: Backbone, config: Mapping[str, Any]) -> ImageView:
    """The view in the result of timm's `resolve_data_config`, at the size of the model `backbone`.

    Raises the errors of `image_view`.
    """
    channels = int(getattr(backbone, "in_chans", None) or config["input_size"][0])
    height, width = image_size(backbone) or tuple(config["input_size"][1:])
    if config["crop_mode"] not in _CROP_MODES:
        raise UsageError(
            f"Images cannot be cropped in the mode {config['crop_mode']!r}",
            place=type(backbone).__name__,
            hint="add crop_mode=center or crop_mode=squash to the spec of the model",
        )
    return ImageView(
        channels=channels,
        height=height,
        width=width,
        mean=per_channel(config["mean"], channels),
        std=per_channel(config["std"], channels),
        interpolation=config["interpolation"],
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
        "crop_mode": "squash" if view.resize == "squash" else "center",
    }


def image_size(backbone: Backbone) -> tuple[int, int] | None:
    """(height, width) of the input of `backbone`, `None` if it is unknown."""
    size = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    return size_pair(size) if size is not None else None


def _architecture(backbone: Backbone) -> str:
    name = (getattr(backbone, "pretrained_cfg", None) or {}).get("architecture")
    if not name:
        raise UsageError(
            f"It is unknown how timm built this {type(backbone).__name__}",
            hint="make it with timm.create_model, or name it: save(model, directory, "
            "model_args={'architecture': 'vit_tiny_patch16_224', 'depth': 12, ...})",
        )
    return str(name)


def _known_args(backbone: Backbone) -> dict[str, Any]:
    """Arguments recorded by `timm.create_model` or by `build`, else those of its attributes.

    timm records none where a function or a class of its own is called: `vit_tiny_patch16_224()`.
    """
    # The public `timm.models.get_model_args` leaves out the rates of dropout, which `save` keeps.
    args = {**getattr(backbone, "_model_args", {}), **origin_of(backbone).model_args}
    if not args:
        args = {"in_chans": getattr(backbone, "in_chans", None), "img_size": image_size(backbone)}
        blocks = getattr(backbone, "blocks", None)
        if blocks is not None and hasattr(backbone, "embed_dim"):  # a vision transformer
            args["embed_dim"] = backbone.embed_dim
            args["depth"] = len(blocks)
            args["num_heads"] = getattr(getattr(blocks[0], "attn", None), "num_heads", None)
            patch_size = getattr(getattr(backbone, "patch_embed", None), "patch_size", None)
            args["patch_size"] = patch_size and patch_size[0]
    known = {}
    for name, value in args.items():
        if value is not None and name not in _RESERVED:
            known[name] = value
    return known


def _check_rebuilt(backbone: Backbone, name: str, args: Mapping[str, Any]) -> None:
    check_rebuilt(
        backbone,
        lambda: timm.create_model(name, **args),
        how=f"timm.create_model({name!r}) with {dict(args)}",
        hint="name what it was built with: save(model, directory, model_args={'depth': 12})",
    )


def read(directory: Path, *, seed: int) -> nn.Module:
    """The model that `write`, or timm, wrote into `directory`.

    Raises `ModelFileError` if config.json and weights do not fit together.
    """
    hint = "check config.json against the weights, or take the model from its source again"
    with library_errors("timm", directory, hint=hint):
        # timm reads the configuration alone, because it is not asked for the weights.
        backbone = filled(
            lambda: timm.create_model(f"local-dir:{directory}"),
            read_tensors(*weight_files(directory)), place=directory, seed=seed,
        )  # fmt: skip
        class_names(backbone)  # raises for invalid names
    return backbone
