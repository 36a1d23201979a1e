"""transformers models: read from the hub or a directory, saved in transformers' own layout.

Hub models are downloaded as files and then read like any directory, with the same checks. Code from
a repository is never run, and only safetensors are read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    StrictDataclassError,
)
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedModel
from transformers.utils import logging as hf_logging

from layershuffle.core.discovery import check_architecture
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.image_view import ImageView
from layershuffle.models.authors_files import our_name, with_authors_parts
from layershuffle.models.files import (
    CONFIG,
    PROCESSOR,
    PROCESSORS,
    WEIGHTS,
    WEIGHTS_INDEX,
    check_depth,
    check_numbers,
    difference,
    read_json,
    shapes_of,
    stack_depth,
    tensor_shapes,
    weight_files,
)
from layershuffle.models.hf_view import processor_of, stored_view, view_of
from layershuffle.models.origin import (
    LOG,
    HostModel,
    Origin,
    hub_silence,
    new_linear,
    remember,
    seeded,
    warn_new_head,
    weights_missing,
)
from layershuffle.models.timm_view import config_of_view
from layershuffle.text import one_line, shortened

NAME = "transformers"
# Without pickles and code, which would be refused after the download.
_FILES = (
    CONFIG, *PROCESSORS, WEIGHTS, WEIGHTS_INDEX, "model-*-of-*.safetensors",
)  # fmt: skip
# Implementations in transformers or torch; any other name is a repository with code to download.
_ATTENTION = frozenset(
    {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}
)
# Keywords of a configuration that could make timm read or download other files.
_INSIDE_TIMM = frozenset(
    {"checkpoint_path", "cache_dir", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}
)
# The errors that transformers raises for a malformed configuration.
_REFUSED = (
    OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, IndexError,
    ZeroDivisionError, AssertionError, StrictDataclassError, SafetensorError,
)  # fmt: skip


def owns(model: nn.Module) -> bool:
    """Whether transformers made the model."""
    return isinstance(model, PreTrainedModel)


def build(name: str, settings: Mapping[str, Any], *, seed: int) -> nn.Module:
    """The image classifier `name`: a directory, or a model of the hub (at `revision`).

    `pretrained=False` uses only the configuration, with random weights. Raises `UsageError` for
    other settings, `ModelFileError` if the files cannot be downloaded or read. A missing head is
    initialised, with a warning. A checkpoint of the paper's authors is loaded with its position
    parts.
    """
    unknown = sorted(settings.keys() - {"pretrained", "revision"})
    if unknown:
        raise UsageError(
            f"hf: has no setting {unknown[0]!r}", hint="pretrained=true|false and revision=NAME"
        )
    local = Path(name).expanduser().is_dir()
    revision = settings.get("revision")
    pretrained = settings.get("pretrained", True) is not False
    if pretrained and not local:
        _check_architecture(_fetched(name, revision, files=[CONFIG]))
    directory = Path(name).expanduser() if local else _fetched(name, revision)
    if not pretrained:
        host = _random(directory, seed=seed)
        return remember(host, Origin(view=stored_view(host, directory)))
    host = _stored(directory, seed=seed, lenient=True)
    view, base = stored_view(host, directory), None if local else name
    remember(host, Origin(view=view, base_model=base))
    return with_authors_parts(host, directory)


def num_classes(host: HostModel) -> int:
    """Number of classes of the head, 0 for a model that is no image classifier."""
    # Every configuration has a num_labels (2 by default), also that of a model without a head.
    is_classifier = "ForImageClassification" in type(host).__name__
    return int(host.config.num_labels) if is_classifier else 0


def resize_head(host: HostModel, classes: int, *, seed: int) -> None:
    """Replace all heads of `host` by new ones, with a warning."""
    old, config = num_classes(host), host.config
    heads = _heads(host)
    if not heads:
        raise UsageError(
            f"{type(host).__name__} has no linear head with an output for each class",
            hint="load a model for image classification; hf:DIR makes one of a saved backbone",
        )
    std = float(getattr(config, "initializer_range", 0.02))  # the library's own law for new heads
    for number, (path, head) in enumerate(heads.items()):
        owner, _, attribute = path.rpartition(".")
        # Different seeds, so the two heads of a distilled model do not start equal.
        new = new_linear(head, classes, std=std, seed=seed + number)
        setattr(host.get_submodule(owner), attribute, new)
    set_class_names(host, [f"LABEL_{index}" for index in range(classes)])  # transformers' filler
    host.num_labels = classes
    timm_model = getattr(host, "timm_model", None)
    if timm_model is not None:
        timm_model.num_classes = classes
    warn_new_head(old, classes, seed=seed)


def class_names(host: HostModel) -> tuple[str, ...] | None:
    """The names in id2label; `None` for transformers' placeholders (LABEL_0, ...)."""
    names = host.config.id2label
    listed = tuple(str(names.get(index, f"LABEL_{index}")) for index in range(num_classes(host)))
    filler = all(name == f"LABEL_{index}" for index, name in enumerate(listed))
    return None if filler else listed


def set_class_names(host: HostModel, names: Sequence[str]) -> None:
    """Set the class names, which also sets the number of classes in the configuration."""
    host.config.id2label = dict(enumerate(names))
    host.config.label2id = {name: index for index, name in enumerate(names)}
    if hasattr(host.config, "label_names"):  # the wrapper around timm prefers these
        host.config.label_names = list(names)


def set_depth(host: HostModel, depth: int) -> None:
    """Set the number of blocks in the configuration of `host` to `depth`.

    Raises `UsageError` if transformers would build another model from it.
    """
    config = getattr(host.config, "vision_config", host.config)
    refusal = UsageError(
        f"{type(host).__name__} with {depth} blocks cannot be written as a configuration",
        hint="use a plain vision transformer",
    )
    if not hasattr(config, "num_hidden_layers"):
        raise refusal
    before, same = dict(vars(config)), False
    _note_depth(config, depth)
    try:
        same = _described_by_config(host)
    finally:
        if not same:
            vars(config).clear()
            vars(config).update(before)
    if not same:
        raise refusal


def _described_by_config(host: HostModel) -> bool:
    # On the meta device, because only names and shapes are compared. The library notes the dtype.
    with quiet(), seeded(0), torch.device("meta"):
        sketch = type(host)._from_config(copy.deepcopy(host.config))
    return shapes_of(sketch.state_dict()) == shapes_of(host.state_dict())


def _note_depth(config: Any, depth: int) -> None:
    config.num_hidden_layers = depth
    if hasattr(config, "stage_names"):  # of models that can also serve as backbones
        config.stage_names = ["stem", *(f"stage{block}" for block in range(1, depth + 1))]
        config._out_features, config._out_indices = [config.stage_names[-1]], [depth]


def image_view(host: HostModel) -> ImageView:
    """The default view of this kind of model; the view of a loaded model is in its origin."""
    return view_of(host)


def write(
    host: HostModel, directory: Path, *, view: ImageView, model_args: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Save with `save_pretrained`, and a processor for the view. Returns (class name, {}).

    Raises `UsageError` for models that their class would not build from their configuration.
    """
    if not isinstance(host, PreTrainedModel) or model_args:
        raise UsageError("A transformers model takes no model_args: its config has them all")
    if getattr(transformers, type(host).__name__, None) is not type(host):
        raise UsageError(
            f"{type(host).__name__} is not a class of transformers, which could not load it",
            hint="save a model of transformers itself",
        )
    if not _described_by_config(host):
        raise UsageError(
            f"{type(host).__name__} would build other tensors from this model's configuration",
            hint="build it from its configuration alone, without add_pooling_layer=False and the "
            "like",
        )
    before = dict(vars(host.config))  # save_pretrained adds architecture and dtype to it
    wrapped = hasattr(host, "timm_model")
    try:
        if wrapped:  # its processor reads timm's settings
            cfg = getattr(host.config, "pretrained_cfg", None) or {}
            host.config.pretrained_cfg = {**cfg, **config_of_view(view)}
        with quiet():
            # Copies, because the library does not write tensors that tied blocks share.
            tensors = {name: tensor.clone() for name, tensor in host.state_dict().items()}
            host.save_pretrained(directory, state_dict=tensors)
    finally:
        vars(host.config).clear()
        vars(host.config).update(before)
    processor = None if wrapped else processor_of(view)
    if processor:
        text = json.dumps(processor, indent=2)
        (directory / PROCESSOR).write_text(text + "\n", encoding="utf-8")
    return type(host).__name__, {}


def read(directory: Path, *, seed: int) -> tuple[nn.Module, str]:
    """The model that `write` wrote into `directory`, and its class name. Requires all tensors."""
    host = _stored(directory, seed=seed, lenient=False)
    return host, type(host).__name__


def _check_architecture(directory: Path) -> None:
    """Raises `StackError` for a model that `wrap` would refuse, before its weights are loaded."""
    config = checked_config(directory)
    with _explained(directory / CONFIG), quiet(), seeded(0), torch.device("meta"):
        sketch = AutoModelForImageClassification.from_config(config)
    check_architecture(sketch)


def _fetched(name: str, revision: str | None, *, files: Sequence[str] = _FILES) -> Path:
    """The directory of the hub model's files in the cache; missing files are downloaded."""
    spec = f"hf:{name}"
    try:
        path = snapshot_download(name, revision=revision, allow_patterns=list(files))
    except HFValidationError as error:
        raise ModelFileError(
            f"{name!r} is neither a directory here nor a model name of the hub",
            hint="write hf:DIR for a directory with config.json, or hf:OWNER/NAME",
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise weights_missing(
            spec,
            hub_silence(),
            download=f"hf download {name}",
            random="hf:DIR?pretrained=false with its config.json in DIR",
        ) from error
    except HfHubHTTPError as error:
        raise ModelFileError(
            f"{name} could not be downloaded ({type(error).__name__})",
            hint=f"check the name at huggingface.co/{name}; private models need `hf auth login`",
        ) from error
    return Path(path)


def checked_config(directory: Path) -> Any:
    """transformers' configuration. Raises `ModelFileError` for harmful or invalid content."""
    place = directory / CONFIG
    data = read_json(place)
    check_numbers(data, place)
    _refuse_code(data, place)
    if (directory / "adapter_config.json").exists():
        raise ModelFileError(
            "This is an adapter, not a model", place=directory, hint="merge it into its base first"
        )
    with _explained(place), quiet():
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def _refuse_code(data: Mapping[str, Any], place: Path) -> None:
    for key, value in data.items():
        where = f"{key} = {str(value)[:80]!r}"
        if (
            key.endswith("attn_implementation")
            and value is not None
            and str(value) not in _ATTENTION
        ):
            raise ModelFileError(
                f"The configuration asks for code from elsewhere ({where})",
                place=place,
                hint=f"remove {key} from the file",
            )
        if key in ("quantization_config", "use_kernels") and value:
            raise ModelFileError(
                f"Models with {key} are not read", place=place, hint="use the unquantised weights"
            )
        if key == "model_args" and isinstance(value, dict) and _INSIDE_TIMM & value.keys():
            raise ModelFileError(
                f"The configuration makes timm read other files ({where})",
                place=place,
                hint=f"remove {', '.join(sorted(_INSIDE_TIMM & value.keys()))} from model_args",
            )
        if isinstance(value, dict):
            _refuse_code(value, place)


def _random(directory: Path, *, seed: int) -> HostModel:
    config = checked_config(directory)
    with _explained(directory / CONFIG), quiet(), seeded(seed):
        host: HostModel = AutoModelForImageClassification.from_config(config)
    return host.eval()


def _stored(directory: Path, *, seed: int, lenient: bool) -> HostModel:
    """The model in `directory`. With `lenient`, heads may be missing and other tensors present."""
    files = weight_files(directory)
    config = checked_config(directory)
    kind = AutoModelForImageClassification if lenient else _class_that_saved(config, directory)
    names = {name for file in files for name in tensor_shapes(file)}
    # The seed is for missing heads.
    with _explained(directory), quiet(), seeded(seed):
        host, info = kind.from_pretrained(
            directory,
            config=config,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    _check_loaded(host, info, names, directory, lenient=lenient)
    loaded: nn.Module = host
    return loaded


def _class_that_saved(config: Any, directory: Path) -> Any:
    """The class that the configuration names; raises `ModelFileError` for one of another kind."""
    name = next(iter(config.architectures or ()), None)
    kind: Any = getattr(transformers, str(name), None)
    is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    if not is_model or kind.config_class is not type(config):
        raise ModelFileError(
            f"The architecture {name!r} is no model of transformers with a {type(config).__name__}",
            place=directory / CONFIG,
            hint="save the model again",
        )
    return kind


def _check_stored_depth(config: Any, names: set[str], place: Path) -> None:
    depth = getattr(getattr(config, "vision_config", config), "num_hidden_layers", None)
    # CLIP models have a text tower too, whose blocks do not count.
    prefixed = {name for name in names if not name.startswith("text_model.")}
    if isinstance(depth, int):
        check_depth(stack_depth(prefixed), depth, place=place)


def _check_loaded(
    host: HostModel,
    info: Mapping[str, Any],
    names: set[str],
    directory: Path,
    *,
    lenient: bool,
) -> None:
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    if missing or unexpected:
        _check_stored_depth(host.config, names, directory)
    if lenient:
        # Backbones without a head may be refined, but no other tensor may be missing.
        heads = {f"{path}.{name}" for path in _heads(host) for name in ("weight", "bias")}
        if missing & heads:
            LOG.warning(
                "%s has no classification head: one with %d classes is freshly initialised, so "
                "train before you score.",
                directory,
                num_classes(host),
            )
        # Heads of other tasks are ignored, with a warning.
        unexpected = {name for name in unexpected if our_name(name) is None}
        if unexpected:
            LOG.warning(
                "%s: tensors that are not used: %s.", directory, shortened(sorted(unexpected))
            )
        missing, unexpected = missing - heads, set()
    if missing or unexpected:
        raise ModelFileError(
            "The tensors in the file are not those of the model: "
            + difference(missing, unexpected),
            place=directory,
            hint="weights and configuration come from different models: save the model again",
        )


def _heads(host: HostModel) -> dict[str, nn.Linear]:
    """Linear layers beside the backbone with an output per class, by path."""
    classes = num_classes(host)
    heads = {name: child for name, child in host.named_children() if isinstance(child, nn.Linear)}
    if not heads and hasattr(host, "timm_model"):
        # In transformers' wrapper, the head is inside timm's model.
        inner = host.timm_model.get_classifier()
        heads = {n: m for n, m in host.named_modules() if m is inner and isinstance(m, nn.Linear)}
    return {name: head for name, head in heads.items() if head.out_features == classes}


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    try:
        yield
    except _REFUSED as error:
        shown = one_line(error)
        if "ignore_mismatched_sizes" in shown:  # its advice does not apply here
            shown = "tensors in the file have other shapes than the configuration gives the model"
        raise ModelFileError(
            f"transformers cannot build a model from this ({type(error).__name__}: {shown})",
            place=place,
            hint="check config.json against the weights, or take the model from its source again",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars and load reports, which our errors and logs replace."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
