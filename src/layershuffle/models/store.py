"""Load and save host models by spec string, and common functions on them.

    bundled:digits                                  the base checkpoint in this package
    timm:NAME[?pretrained=false&img_size=12,20&...] timm, keywords of timm.create_model
    timm:NAME?checkpoint=FILE[&num_classes=10&...]  a checkpoint of timm's training script
    timm:local-dir:DIR                              a directory in timm's layout
    hf:NAME_OR_DIR[?pretrained=false&revision=...]  transformers, hub or directory
    torchvision:NAME[?weights=none&image_size=...]  torchvision
    dir:PATH                                        what `save`, `layershuffle fit`, timm or
                                                    transformers wrote

A saved directory has the layout of the host library, with safetensors only. Data that do not fit
into it are in other files (layershuffle.json, layershuffle.safetensors, README.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from layershuffle.core.discovery import find_blocks
from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.core.position import backbone_of
from layershuffle.core.stack import BlockStack, depth_of, stack_of, wrap
from layershuffle.core.tying import places_tied, tie
from layershuffle.data.view import ImageView, resized_as
from layershuffle.errors import ModelFileError, StackError, UsageError
from layershuffle.files import staged_directory
from layershuffle.models.card import render
from layershuffle.models.files import (
    CONFIG,
    PICKLE_SUFFIXES,
    check_depth,
    read_json,
    refuse_pickle,
    weights_digest,
)
from layershuffle.models.metadata import (
    METADATA_FILE,
    RECORD_KEYS,
    SCHEMA,
    ModelMetadata,
    checked_record,
    parse_metadata,
    view_of_record,
)
from layershuffle.models.origin import (
    origin_of,
    remember,
    trained_with,
    unknown_name,
    view_to_json,
)
from layershuffle.models.output import CARD, check_replaceable
from layershuffle.models.position_files import (
    PARTS,
    position_to_json,
    with_stored_parts,
    write_parts,
)
from layershuffle.models.spec import ModelSpec, parse_spec
from layershuffle.settings import recipe_of_model


class HostLibrary(Protocol):
    """The interface of `timm_host`, `hf_host` and `torchvision_host`."""

    NAME: str

    def owns(self, model: nn.Module) -> bool:
        """Whether the library made the model."""

    def build(self, name: str, settings: Mapping[str, Any], *, seed: int) -> nn.Module:
        """A model by name."""

    def num_classes(self, host: nn.Module) -> int:
        """Number of classes."""

    def resize_head(self, host: nn.Module, classes: int, *, seed: int) -> None:
        """Replace the head by a new one."""

    def class_names(self, host: nn.Module) -> tuple[str, ...] | None:
        """The class names, `None` without any."""

    def set_class_names(self, host: nn.Module, names: Sequence[str]) -> None:
        """Set the class names."""

    def set_depth(self, host: nn.Module, depth: int) -> None:
        """Set the number of blocks in the configuration."""

    def image_view(self, host: nn.Module) -> ImageView:
        """The image view."""

    def write(
        self, host: nn.Module, directory: Path, *, view: ImageView,
        model_args: Mapping[str, Any] | None,
    ) -> tuple[str, dict[str, Any]]:  # fmt: skip
        """Write the host in its own layout."""

    def read(self, directory: Path, *, seed: int) -> tuple[nn.Module, str]:
        """Read the files of `write`. Returns the model and its name."""


# Imported when needed: transformers alone takes seconds.
_ADAPTERS = {"timm": "timm_host", "transformers": "hf_host", "torchvision": "torchvision_host"}


def load(spec: str, *, num_classes: int | None = None, seed: int = 0) -> nn.Module:
    """The wrapped host model of `spec`, in eval mode, with its position parts if it has any.

    A path that exists may stand for dir:PATH. With `num_classes` other than the model's, the head
    is replaced by a fresh one, which is logged as a warning. New weights are a function of `seed`
    alone, and torch's global generator stays as it is. Raises `UsageError` for a bad spec,
    `ModelFileError` for missing, damaged or refused files, `StackError` for models whose blocks are
    not interchangeable.
    """
    if num_classes is not None and num_classes < 1:
        raise UsageError(f"num_classes must be at least 1, got {num_classes}")
    model = _opened(parse_spec(spec), seed)
    if num_classes is not None and num_classes != num_classes_of(model):
        replace_head(model, num_classes, seed=seed)
    return model.eval()


def replace_head(model: nn.Module, classes: int, *, seed: int) -> None:
    """Give `model` a fresh head, a function of `seed`, for `classes` classes without names.

    A warning says so.
    """
    host = backbone_of(model)
    library_of(host).resize_head(host, classes, seed=seed)
    # Method and scores do not apply to the new head.
    remember(host, replace(origin_of(host), record={}))
    model.eval()  # the libraries make new layers in training mode


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    record: Mapping[str, Any] | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` to `directory` atomically.

    A model that was saved there before is replaced once the new one is whole on disk.

    `record`: JSON-able metadata (method, policy, selected, settings, scores, provenance) kept in
    layershuffle.json; `scores` by order mode, e.g. {"arbitrary": {"top1": 74.5}}. Without a record
    that of the loaded model is kept, its scores excepted: the weights may have changed.
    `model_args`: what a timm model was built with, where timm does not know it. Raises `UsageError`
    if the host library could not rebuild the model, or if `directory` holds other files;
    `LayerShuffleError` for a full disk and the like.
    """
    final, host = Path(directory), backbone_of(model)
    _refuse_changed_weights(host)
    check_replaceable(final)
    earlier = {k: v for k, v in origin_of(host).record.items() if k != "scores"}
    plain = checked_record(earlier if record is None else record)
    library, view = library_of(host), image_view(host)
    path, depth = _stack_place(host)
    with staged_directory(final) as stage:
        name, args = library.write(host, stage, view=view, model_args=model_args)
        metadata = {
            "schema": SCHEMA,
            "library": library.NAME,
            "name": name,
            "model_args": args,
            "num_classes": library.num_classes(host),
            "depth": depth,
            "blocks": path,
            "tied": places_tied(host.get_submodule(path).children()),
            "position": position_to_json(model),
            "image_view": view_to_json(view),
            "base_model": origin_of(host).base_model,
            **plain,
        }
        write_parts(model, stage)
        (stage / METADATA_FILE).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        names = library.class_names(host)
        card = render(metadata, place=final.absolute().name, classes=names)
        (stage / CARD).write_text(card, encoding="utf-8")


def truncate(model: nn.Module, blocks: ExecutionOrder | str | Sequence[int]) -> nn.Module:
    """`model` itself, shortened to `blocks` (ids, each once), which it now runs in that order.

    Stem and head stay. It can be saved and loaded as an ordinary model of its library. Raises
    `UsageError` for repeats, for models with position parts (their tables belong to another depth),
    and where the library cannot describe the shorter model; the model is then as before.
    """
    stack = stack_of(wrap(model))
    order = order_of(blocks, stack.depth)
    if backbone_of(model) is not model:
        raise UsageError(
            "A model with position parts cannot be shortened", hint="shorten it before adding them"
        )
    if len(set(order)) < len(order):
        raise UsageError(f"The blocks {order} hold a block twice", hint="name each block once")
    before = dict(stack._modules)
    # The names count from 0 again, as the library names the blocks of a shorter model.
    names = list(before)[: len(order)]
    shorter = dict(zip(names, [stack.blocks[block] for block in order], strict=True))
    _fill(stack, shorter)
    noted = False
    try:
        library_of(model).set_depth(model, len(order))
        noted = True
    finally:
        if not noted:
            _fill(stack, before)
    # Method and scores do not apply to the shorter model.
    return remember(model, replace(origin_of(model), record={}))


def _fill(stack: nn.Module, blocks: Mapping[str, nn.Module | None]) -> None:
    stack._modules.clear()
    stack._modules.update(blocks)


def image_view(model: nn.Module) -> ImageView:
    """The image view of the model."""
    host = backbone_of(model)
    # The view of the loaded files has precedence over the library's default.
    return origin_of(host).view or library_of(host).image_view(host)


def file_view(model: nn.Module) -> ImageView:
    """The view for image files. Models trained on generated images squash them, as in training."""
    view = image_view(model)
    if str(trained_with(backbone_of(model)).get("data", "")).startswith(("digit-pairs", "formula")):
        return resized_as(view, "squash")
    return view


def set_image_view(model: nn.Module, view: ImageView) -> None:
    """Set the image view of the model, which is also saved."""
    host = backbone_of(model)
    remember(host, replace(origin_of(host), view=view))


def num_classes_of(model: nn.Module) -> int:
    """Number of classes of the model's head."""
    host = backbone_of(model)
    return library_of(host).num_classes(host)


def class_names_of(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the model's classes in the order of its logits, `None` if it has none."""
    host = backbone_of(model)
    return library_of(host).class_names(host)


def set_class_names(model: nn.Module, names: Sequence[str]) -> None:
    """Set the class names of `model`, one per logit. The host library's format stores them."""
    host = backbone_of(model)
    if len(names) != num_classes_of(model):
        raise UsageError(f"{len(names)} names do not name {num_classes_of(model)} classes")
    library_of(host).set_class_names(host, names)


# Without which the library makes no model: accelerate imports `transformers` without its models,
# and importing these takes most of a second.
_MODEL_MODULES = {
    "transformers": "transformers.modeling_utils",
    "torchvision": "torchvision",
    "timm": "timm",
}
_BUILDERS = {"timm": "timm", "hf": "transformers", "torchvision": "torchvision"}


def _opened(spec: ModelSpec, seed: int) -> nn.Module:
    if spec.scheme == "bundled":
        return _load_bundled(spec.place, seed=seed)
    if spec.scheme == "dir":
        return _load_directory(Path(spec.place), seed=seed)
    library = _library(_BUILDERS[spec.scheme])
    return wrap(library.build(spec.place, spec.settings, seed=seed))


def _library(name: str) -> HostLibrary:
    return cast(HostLibrary, import_module(f"layershuffle.models.{_ADAPTERS[name]}"))


def library_of(host: nn.Module) -> HostLibrary:
    """The adapter of the library that made `host`. Raises `UsageError` for other models."""
    # transformers first, because its wrapper around timm models has attributes of both.
    for name, needed in _MODEL_MODULES.items():
        # A library that was never imported cannot have made the model.
        if needed in sys.modules and _library(name).owns(host):
            return _library(name)
    raise UsageError(
        f"{type(host).__name__} is not a model of timm, transformers or torchvision",
        hint="wrap and run it as you like; loading and saving need one of these libraries",
    )


def _load_bundled(name: str, *, seed: int) -> nn.Module:
    assets = resources.files("layershuffle").joinpath("assets")
    root = assets.joinpath(name)
    if Path(name).name != name or not root.joinpath(METADATA_FILE).is_file():
        # "digits" is a valid name even if its files are missing in a source tree.
        if name != "digits":
            there = [
                path.name for path in assets.iterdir() if path.joinpath(METADATA_FILE).is_file()
            ]
            raise unknown_name("bundled model", name, names=there, listing="write bundled:digits")
        raise ModelFileError(
            "The bundled model 'digits' is missing in this installation",
            place=str(root),
            hint="install layershuffle again, or train it: "
            "layershuffle pretrain digits-base --out DIR",
        )
    # A package may be a zip file; its files then exist only inside of this block.
    with resources.as_file(root) as directory:
        return _load_directory(directory, seed=seed)


def _load_directory(place: Path, *, seed: int) -> nn.Module:
    directory = _model_directory(place.expanduser())
    path = directory / METADATA_FILE
    if not path.is_file():
        return wrap(_built_by_its_library(directory, seed=seed))
    metadata = parse_metadata(read_json(path), path)
    view = view_of_record(metadata, path)
    library = _library(metadata.library)
    host, name = library.read(directory, seed=seed)
    record = metadata.model_dump(include=set(RECORD_KEYS), exclude_none=True)
    origin = replace(origin_of(host), view=view, base_model=metadata.base_model, record=record)
    _wrap_as(remember(host, origin), metadata, path)
    _check_agrees(metadata.name, name, key="name", path=path)
    _check_agrees(metadata.num_classes, library.num_classes(host), key="num_classes", path=path)
    if metadata.tied is not None:
        _tie_again(host, metadata.tied, path=path)
    return with_stored_parts(host, metadata, directory=directory)


def _built_by_its_library(directory: Path, *, seed: int) -> nn.Module:
    """The model in a directory that timm or transformers saved."""
    # Without the file that describes them, the parts would be silently ignored.
    if (directory / PARTS).exists():
        raise ModelFileError(
            f"{PARTS} is present without {METADATA_FILE}",
            place=directory,
            hint="save the model again",
        )
    config = read_json(directory / CONFIG)
    # transformers' wrapper around timm also has an architecture.
    if "architecture" in config and "model_type" not in config:
        return _library("timm").build(f"local-dir:{directory}", {}, seed=seed)
    return _library("transformers").build(str(directory), {}, seed=seed)


def _wrap_as(host: nn.Module, metadata: ModelMetadata, path: Path) -> None:
    try:
        wrap(host, metadata.blocks)
    except StackError as error:
        raise ModelFileError(error.cause, place=path, hint=error.hint) from error
    check_depth(depth_of(host), metadata.depth, place=path)


def _check_agrees(stated: str | int, actual: str | int, *, key: str, path: Path) -> None:
    if stated != actual:
        raise ModelFileError(
            f"The key {key!r} says {stated!r}, the model beside it has {actual!r}",
            place=path,
            hint="the files come from different models: save the model again",
        )


def _model_directory(place: Path) -> Path:
    """`place`, or PLACE/model if `place` is the output of a training run."""
    ours = ((place, METADATA_FILE), (place / "model", METADATA_FILE))
    for directory, file in (*ours, (place, CONFIG)):
        if (directory / file).is_file():
            return directory
    # A pickle is reported first, because it is the cause of missing files.
    if place.suffix.lower() in PICKLE_SUFFIXES or place.is_dir():
        refuse_pickle(place)
    if not place.exists():
        trained = recipe_of_model(place) is not None
        train = f"layershuffle pretrain {place.name} --out {place}"
        hint = train if trained else "check the path"
        raise ModelFileError("There is no such directory", place=place, hint=hint)
    raise ModelFileError(
        f"There is no {METADATA_FILE} and no {CONFIG} here",
        place=place,
        hint="name a directory that layershuffle fit, layershuffle.save, timm or transformers "
        "wrote; a checkpoint of timm's train.py is named by timm:ARCHITECTURE?checkpoint=FILE",
    )


def _stack_place(host: nn.Module) -> tuple[str, int]:
    # A model that is not wrapped is searched, and not changed.
    for path, module in host.named_modules():
        if isinstance(module, BlockStack):
            return path, module.depth
    path, container = find_blocks(host)
    return path, sum(1 for _ in container.children())


def _refuse_changed_weights(host: nn.Module) -> None:
    """Raises `UsageError` for models whose tensors their library could not read back."""
    if hasattr(host, "_orig_mod"):
        raise UsageError(
            "torch.compile wrapped this model in a module with other tensor names",
            hint="save the model inside of it: layershuffle.save(model._orig_mod, directory)",
        )
    for name, tensor in host.state_dict().items():
        # Libraries such as torchao store packed numbers in subclasses of Tensor.
        if type(tensor) not in (Tensor, nn.Parameter):
            raise UsageError(
                f"The tensor {name} is a {type(tensor).__name__}, not a plain tensor: the model is "
                "quantised or sharded, and its library could not read it back",
                hint="save the model before it is quantised, and quantise after loading; gather "
                "a sharded model first",
            )


def _tie_again(model: nn.Module, places: Sequence[int], *, path: Path) -> None:
    """Tie a model as it was saved. Raises `ModelFileError` if that would change weights.

    `path`: the file that contains `places`.
    """
    before = weights_digest(model)
    try:
        tie(model, places)
    except UsageError as error:
        raise ModelFileError(error.cause, place=path, hint="save the model again") from error
    if weights_digest(model) != before:
        raise ModelFileError(
            f"The places {list(places)} are tied, and their weights differ",
            place=path,
            hint="delete the key 'tied' to load the blocks as they are",
        )
