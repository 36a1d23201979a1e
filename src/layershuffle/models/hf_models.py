"""transformers models: read from a directory, saved in transformers' own layout.

Hub models are downloaded as files and then read like any directory, with the same checks. Code from
a repository is never run, and only safetensors are read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedModel
from transformers.utils import logging as hf_logging

from layershuffle.ground.errors import ModelFileError, UsageError
from layershuffle.ground.text import shortened
from layershuffle.images.view import ImageView
from layershuffle.models.files import (
    CONFIG,
    LOG,
    WEIGHTS,
    has_wrapper_names,
    library_errors,
    read_tensors,
    say_dtype,
    tensor_headers,
    weight_files,
    write_tensors,
)
from layershuffle.models.hf_view import default_view, make_processor, stored_view
from layershuffle.models.origin import (
    Backbone,
    Origin,
    check_rebuilt,
    remember,
    seeded,
    sketched,
    warn_new_head,
)
from layershuffle.models.position_files import our_name, with_authors_parts
from layershuffle.models.timm_models import config_of_view

NAME = "transformers"
# Implementations in transformers or torch; any other name is a repository with code to download.
_ATTENTION = frozenset(
    {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}
)
# Keywords of a configuration that could make timm read or download other files.
_INSIDE_TIMM = frozenset(
    {"checkpoint_path", "cache_dir", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}
)
_HINT = "check config.json against the weights, or take the model from its source again"


def owns(model: nn.Module) -> bool:
    """Whether transformers made the model."""
    return isinstance(model, PreTrainedModel)


def random(directory: Path, *, seed: int) -> nn.Module:
    """The image classifier of the configuration in `directory`, with random weights."""
    config = checked_config(directory)
    with library_errors(NAME, directory, hint=_HINT), quiet(), seeded(seed):
        backbone: Backbone = AutoModelForImageClassification.from_config(config)
    return remember(backbone.eval(), Origin(view=stored_view(backbone, directory), random=True))


def foreign(directory: Path, *, seed: int, base: str | None) -> nn.Module:
    """The image classifier that somebody else saved in `directory`; `base`: its name on the hub.

    A missing head is initialised, with a warning. A checkpoint of the paper's authors is loaded
    with its position parts.
    """
    config = checked_config(directory)
    kind = AutoModelForImageClassification
    backbone = _stored(directory, kind, config, seed=seed, lenient=True)
    view = stored_view(backbone, directory)
    remember(backbone, Origin(view=view, base_model=base))
    return with_authors_parts(backbone, directory)


def num_classes(backbone: Backbone) -> int:
    """Number of classes of the head, 0 for a model that is no image classifier."""
    # Every configuration has a num_labels (2 by default), also that of a model without a head.
    is_classifier = "ForImageClassification" in type(backbone).__name__
    return int(backbone.config.num_labels) if is_classifier else 0


def resize_head(backbone: Backbone, classes: int, *, seed: int) -> None:
    """Replace all heads of `backbone` by new ones, with a warning."""
    old = num_classes(backbone)
    config = backbone.config
    heads = _heads(backbone)
    if not heads:
        raise UsageError(
            f"{type(backbone).__name__} has no linear head with an output for each class",
            hint="load a model for image classification; hf:DIR makes one of a saved backbone",
        )
    std = float(getattr(config, "initializer_range", 0.02))  # the library's own law for new heads
    for number, (path, head) in enumerate(heads.items()):
        owner, _, attribute = path.rpartition(".")
        with seeded(seed):
            new = nn.Linear(head.in_features, classes, bias=head.bias is not None)
        # Different seeds, so the two heads of a distilled model do not start equal.
        generator = torch.Generator().manual_seed(seed + number)
        nn.init.trunc_normal_(new.weight, std=std, generator=generator)
        if new.bias is not None:
            nn.init.zeros_(new.bias)
        new = new.to(head.weight.device, head.weight.dtype)
        setattr(backbone.get_submodule(owner), attribute, new)
    _set_names(config, [f"LABEL_{index}" for index in range(classes)])  # its filler
    backbone.num_labels = classes
    timm_model = getattr(backbone, "timm_model", None)
    if timm_model is not None:
        timm_model.num_classes = classes
    warn_new_head(backbone, old=old, new=classes, seed=seed)


def _heads(backbone: Backbone) -> dict[str, nn.Linear]:
    """Linear layers beside the encoder with an output per class, by path."""
    classes = num_classes(backbone)
    children = dict(backbone.named_children())
    if hasattr(backbone, "timm_model"):
        # In transformers' wrapper, the head is inside timm's model.
        inner = backbone.timm_model.get_classifier()
        for name, part in backbone.named_modules():
            if part is inner:
                children[name] = part
    heads = {}
    for name, child in children.items():
        if isinstance(child, nn.Linear) and child.out_features == classes:
            heads[name] = child
    return heads


def class_names(backbone: Backbone) -> tuple[str, ...] | None:
    """The names in id2label; `None` for transformers' placeholders (LABEL_0, ...)."""
    names = backbone.config.id2label
    count = num_classes(backbone)
    listed = []
    has_names = False
    for index in range(count):
        placeholder = f"LABEL_{index}"
        name = str(names.get(index, placeholder))
        listed.append(name)
        has_names = has_names or name != placeholder
    return tuple(listed) if has_names else None


def _set_names(config: Any, names: Sequence[str]) -> None:
    """Set the class names, which also sets the number of classes."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    if hasattr(config, "label_names"):  # the wrapper around timm prefers these
        config.label_names = list(names)


def set_depth(backbone: Backbone, depth: int) -> None:
    """Set the number of blocks in the configuration of `backbone` to `depth`.

    Raises `UsageError` if transformers would build another model from it.
    """
    config = getattr(backbone.config, "vision_config", backbone.config)
    before = dict(vars(config))
    config.num_hidden_layers = depth
    if hasattr(config, "stage_names"):  # of models that can also serve as backbones
        config.stage_names = ["stem", *(f"stage{block}" for block in range(1, depth + 1))]
        config.set_output_features_output_indices(out_features=None, out_indices=[depth])
    try:
        _check_rebuilt(backbone)
    except UsageError:
        vars(config).clear()
        vars(config).update(before)
        raise


def _check_rebuilt(backbone: Backbone) -> None:
    with quiet():
        check_rebuilt(
            backbone,
            lambda: type(backbone)(copy.deepcopy(backbone.config)),
            how=f"{type(backbone).__name__} of its configuration",
            hint="build it from its configuration, without add_pooling_layer=False and the like",
        )


def image_view(backbone: Backbone) -> ImageView:
    """The default view of this kind of model; the view of a loaded model is in its origin."""
    return default_view(backbone)


def write(
    backbone: Backbone,
    directory: Path,
    *,
    view: ImageView,
    names: Sequence[str] | None,
    model_args: Mapping[str, Any],
) -> str:
    """Save with `save_pretrained`, and a processor for the view. Returns the name of the class.

    Raises `UsageError` for models that their class would not build from their configuration.
    """
    if model_args:
        raise UsageError("A transformers model takes no model_args: its config has them all")
    if getattr(transformers, type(backbone).__name__, None) is not type(backbone):
        raise UsageError(
            f"{type(backbone).__name__} is not a class of transformers, which could not load it",
            hint="save a model of transformers itself",
        )
    _check_rebuilt(backbone)
    before = dict(vars(backbone.config))  # save_pretrained adds architecture and dtype to it
    wrapped = hasattr(backbone, "timm_model")
    try:
        if names is not None:
            _set_names(backbone.config, names)
        if wrapped:  # its processor reads timm's settings
            cfg = getattr(backbone.config, "pretrained_cfg", None) or {}
            backbone.config.pretrained_cfg = {**cfg, **config_of_view(view)}
        with quiet():
            # Copies, because the library does not write tensors that tied blocks share.
            tensors = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
            backbone.save_pretrained(directory, state_dict=tensors)
    finally:
        vars(backbone.config).clear()
        vars(backbone.config).update(before)
    processor = None if wrapped else make_processor(view)
    if processor:
        processor.save_pretrained(directory)
    return type(backbone).__name__


def read(directory: Path, *, seed: int) -> nn.Module:
    """The model that `write` wrote into `directory`. Requires all tensors."""
    config = checked_config(directory)
    name = next(iter(config.architectures or ()), "")
    kind = getattr(transformers, name, None)
    if getattr(kind, "config_class", None) is not type(config):
        raise ModelFileError(
            f"The architecture {name!r} is no model of transformers with a {type(config).__name__}",
            place=directory / CONFIG,
            hint="save the model again",
        )
    backbone: nn.Module = _stored(directory, kind, config, seed=seed, lenient=False)
    return backbone


def checked_config(directory: Path) -> Any:
    """transformers' configuration. Raises `ModelFileError` for one that names code elsewhere."""
    place = directory / CONFIG

    def checked(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in entries:
            # In a nested configuration attention may be an object, an entry for each part.
            attends = key.endswith("attn_implementation") and value is not None
            faults = {
                "asks for code from elsewhere": attends and str(value) not in _ATTENTION,
                "is not of plain weights": key in ("quantization_config", "use_kernels") and value,
                "makes timm read other files": key == "model_args"
                and _INSIDE_TIMM & {*(value or ())},
                "does not number its classes from 0 on": key == "id2label"
                and value
                and {*map(str, range(len(value)))} != {*value},
            }
            for fault, applies in faults.items():
                if applies:
                    raise UsageError(
                        f"The configuration {fault} ({key} = {str(value)[:80]!r})",
                        hint=f"correct {key} in the file, or take the model from its source again",
                    )
        return dict(entries)

    with library_errors("json", place, hint=_HINT):
        json.loads(place.read_bytes(), object_pairs_hook=checked)  # of nested objects, too
    with library_errors(NAME, directory, hint=_HINT), quiet():
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def _stored(directory: Path, kind: Any, config: Any, *, seed: int, lenient: bool) -> Backbone:
    """The model of this `kind` (a class) in `directory`, in float32.

    With `lenient`, heads may be missing and other tensors present.
    """
    files = weight_files(directory)
    headers = tensor_headers(*files)
    make = kind.from_config if lenient else kind
    with library_errors(NAME, directory, hint=_HINT), quiet():
        expected = sketched(lambda: make(copy.deepcopy(config))).state_dict()
    for name, (_, shape) in headers.items():
        # transformers says the same in its log alone, after it took the memory.
        if name in expected and tuple(expected[name].shape) != shape:
            raise ModelFileError(
                f"{name} has the shape {shape} in the file, and {tuple(expected[name].shape)} by "
                f"{CONFIG}",
                place=directory,
                hint=f"{CONFIG} is of another model, or lists other classes (id2label)",
            )
    say_dtype({name: dtype for name, (dtype, _) in headers.items()}, directory)
    with ExitStack() as stack:
        place = directory
        if any(has_wrapper_names(file) for file in files):
            # Not by `key_mapping`: transformers 5.0 to 5.4, at least, keep that mapping, and apply
            # it backwards to the names of a model that is saved later.
            place = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
            write_tensors(read_tensors(*files), place / WEIGHTS)
        stack.enter_context(library_errors(NAME, directory, hint=_HINT))
        stack.enter_context(quiet())
        stack.enter_context(seeded(seed))  # for missing heads
        backbone, info = kind.from_pretrained(
            place,
            config=config,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    missing = set(info["missing_keys"])
    unexpected = set(info["unexpected_keys"])
    if lenient:
        # Backbones without a head may be refined, but no other tensor may be missing.
        heads = set()
        for path in _heads(backbone):
            heads |= {f"{path}.weight", f"{path}.bias"}
        if missing & heads:
            LOG.warning(
                "%s has no classification head: one with %d classes is freshly initialised, so "
                "train before you score.",
                directory,
                num_classes(backbone),
            )
        # Heads of other tasks are ignored, with a warning.
        unused = sorted(name for name in unexpected if our_name(name) is None)
        if unused:
            LOG.warning("%s: tensors that are not used: %s.", directory, shortened(unused))
        missing = missing - heads
        unexpected = set()
    if missing or unexpected:
        raise ModelFileError(
            "The tensors in the file are not those of the model: missing "
            f"{shortened(sorted(missing)) or 'none'}; unexpected "
            f"{shortened(sorted(unexpected)) or 'none'}",
            place=directory,
            hint="weights and configuration come from different models: save the model again",
        )
    return backbone


@contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars and load reports, which our errors and logs replace."""
    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
