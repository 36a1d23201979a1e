"""What every model can be asked, whichever library made it: its classes, and how it sees images.

timm, transformers and ONNX Runtime have an adapter each, with one interface (`Library`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from layershuffle.core.position import backbone_of
from layershuffle.ground.errors import UsageError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import counted, one_line, shortened
from layershuffle.images.view import ImageView, view_of_files
from layershuffle.models.metadata import LibraryName
from layershuffle.models.origin import origin_of, remember, training_settings


class Library(Protocol):
    """What `timm_models` and `hf_models` are: a library by one interface.

    `build` makes a model by name. `write` writes one in the library's own layout, with the names
    of its classes, and returns its name there; `read` reads it back. `set_depth` notes another
    number of blocks for `write`. `class_names` and `image_view` are what the library itself knows.
    """

    NAME: LibraryName

    def owns(self, model: nn.Module) -> bool: ...
    def build(self, name: str, settings: Mapping[str, Any], *, seed: int) -> nn.Module: ...
    def num_classes(self, backbone: nn.Module) -> int: ...
    def resize_head(self, backbone: nn.Module, classes: int, *, seed: int) -> None: ...
    def class_names(self, backbone: nn.Module) -> tuple[str, ...] | None: ...
    def set_depth(self, backbone: nn.Module, depth: int) -> None: ...
    def image_view(self, backbone: nn.Module) -> ImageView: ...
    def write(
        self,
        backbone: nn.Module,
        directory: Path,
        *,
        view: ImageView,
        names: Sequence[str] | None,
        model_args: Mapping[str, Any],
    ) -> str: ...
    def read(self, directory: Path, *, seed: int) -> nn.Module: ...


# Library -> our adapter, and the module without which the library made no model (accelerate imports
# `transformers` without its models, which take most of a second). transformers comes first, because
# its wrapper around timm models has attributes of both.
_ADAPTERS = {
    "onnxruntime": ("onnx_models", "onnxruntime"),
    "transformers": ("hf_models", "transformers.modeling_utils"),
    "timm": ("timm_models", "timm"),
}


def image_view(model: nn.Module) -> ImageView:
    """The image view of the model."""
    backbone = backbone_of(model)
    # The view of the loaded files has precedence over the library's default.
    return origin_of(backbone).view or library_of(backbone).image_view(backbone)


def blank_images(model: nn.Module, count: int) -> Tensor:
    """Grey images, float32 `[count, channels, height, width]`, as the model takes them."""
    view = image_view(model)
    return torch.zeros(count, view.channels, view.height, view.width)


def file_view(model: nn.Module) -> ImageView:
    """The view for image files (`view_of_files`)."""
    data = training_settings(backbone_of(model)).get("data")
    return view_of_files(image_view(model), str(data or ""))


def set_image_view(model: nn.Module, view: ImageView) -> None:
    """Set the image view of the model, which is also saved."""
    backbone = backbone_of(model)
    remember(backbone, replace(origin_of(backbone), view=view))


def num_classes_of(model: nn.Module) -> int:
    """Number of classes of the model's head."""
    backbone = backbone_of(model)
    return library_of(backbone).num_classes(backbone)


def class_names_of(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the model's classes in the order of its logits, `None` if it has none."""
    backbone = backbone_of(model)
    return origin_of(backbone).class_names or library_of(backbone).class_names(backbone)


def set_class_names(model: nn.Module, names: Sequence[str]) -> None:
    """Set the class names of `model`, one per logit. `save` writes them as its library does."""
    if len(names) != num_classes_of(model):
        raise UsageError(f"{len(names)} names do not name {num_classes_of(model)} classes")
    backbone = backbone_of(model)
    remember(backbone, replace(origin_of(backbone), class_names=tuple(names)))


def name_classes(model: nn.Module, file: Path | None, *, place: str) -> None:
    """Name the outputs of a model, which is called `place`, as `file` says, a line for each.

    `None` changes nothing. Raises `UsageError` for a file that cannot be read, for another number
    of names than outputs, and for a model with other names.
    """
    if file is None:
        return
    file = user_path(file)
    own = class_names_of(model)
    outputs = num_classes_of(model)
    hint = "name a file of UTF-8 text with one name per line, in the order of the model's outputs"
    try:
        # A byte order mark is what some editors of Windows begin a file with.
        text = file.read_text(encoding="utf-8-sig").rstrip()
    except (OSError, UnicodeDecodeError) as error:
        cause = f"The names of the classes cannot be read ({one_line(error)})"
        raise UsageError(cause, place=file, hint=hint) from error
    names = tuple(name.strip() for name in text.split("\n"))
    fault = ""
    if "" in names:
        fault = "A line is empty"
    elif len(names) != outputs:
        fault = f"There are {counted(len(names), 'name')} for the {outputs} outputs of {place}"
    elif own not in (None, names, tuple(map(str, range(outputs)))):
        fault = f"{place} names its classes itself, and otherwise ({shortened(own or ())})"
        hint = "leave out --classes, or correct the names in the model's files"
    if fault:
        raise UsageError(fault, place=file, hint=hint)
    set_class_names(model, names)


def library_of(backbone: nn.Module) -> Library:
    """The adapter of the library that made `backbone`. Raises `UsageError` for other models."""
    # PEFT's wrapper has the attributes of the model inside, and adapters that no library reads.
    if hasattr(backbone, "merge_and_unload"):
        raise UsageError(
            f"{type(backbone).__name__} holds adapters beside the weights of its model",
            hint="merge them first: layershuffle.save(model.merge_and_unload(), directory)",
        )
    for name, (_, needed) in _ADAPTERS.items():
        # A library that was never imported cannot have made the model.
        if needed in sys.modules and adapter(name).owns(backbone):
            return adapter(name)
    raise UsageError(
        f"{type(backbone).__name__} is not a model of timm or transformers",
        hint="wrap, train and evaluate it; torch.save(model.state_dict(), FILE) keeps it",
    )


def adapter(name: str) -> Library:
    """The adapter of the library of this name, which is imported here."""
    return cast(Library, import_module(f"layershuffle.models.{_ADAPTERS[name][0]}"))
