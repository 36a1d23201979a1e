"""The origin of a loaded model, and functions that the adapters of all libraries share.

`Origin` is a plain attribute of the backbone, so that `save` can write a directory that the library
rebuilds without this package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.stack import BlockStack
from layershuffle.ground.errors import ModelFileError, UsageError
from layershuffle.ground.text import did_you_mean
from layershuffle.images.view import ImageView
from layershuffle.models.files import LOG, library_errors, say_dtype

# An nn.Module of a library, with attributes that nn.Module does not declare.
Backbone = Any
_ATTRIBUTE = "layershuffle_origin"
# Settings of modules that affect no answer: of training, and numbers that travel with a block.
_NOT_OF_ANSWERS = {
    "training", "distilled_training", "grad_checkpointing", "gradient_checkpointing",
    "name_or_path", "p", "inplace", "forward", "layer_idx", "layer_index", "layer_id", "block_idx",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a backbone was made.

    `model_args`: what its constructor got. `base_model`: its name on the hub, if it was trained
    there. `view` and `class_names`: how it wants its images and names its classes, where that is
    known better than its library can tell. `natural_classes`: whether it numbers classes without
    names as timm does, which sorts folders naturally (species2 before species10). `random`: whether
    its weights were random when it was made. `record`: see `layershuffle.save`.
    """

    model_args: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None
    view: ImageView | None = None
    class_names: tuple[str, ...] | None = None
    natural_classes: bool = False
    random: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)


def origin_of(backbone: nn.Module) -> Origin:
    """The origin of `backbone`; empty for a model that was not made by `layershuffle.load`."""
    origin = getattr(backbone, _ATTRIBUTE, None)
    return origin if isinstance(origin, Origin) else Origin()


def training_settings(backbone: nn.Module) -> Mapping[str, Any]:
    """The settings of the run that trained `backbone`, as its holdout; empty if unknown."""
    settings = origin_of(backbone).record.get("settings")
    return settings if isinstance(settings, dict) else {}


def remember(backbone: nn.Module, origin: Origin) -> nn.Module:
    """Set the origin of `backbone`, and return `backbone`."""
    # nn.Module only registers tensors and modules, so the state_dict does not change.
    setattr(backbone, _ATTRIBUTE, origin)
    return backbone


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator within; the caller's random state is restored.

    The libraries draw new weights from torch's global generator on the CPU and take no other, so
    that generator is seeded here and put back afterwards.
    """
    # Another default device of the caller would have its own generator.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def sketched(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` builds, on the meta device: names, shapes and settings without numbers."""
    with seeded(0), torch.device("meta"):
        return make()


def filled(
    make: Callable[[], nn.Module], tensors: Mapping[str, Tensor], *, place: Path, seed: int
) -> nn.Module:
    """The model that `make` builds, with exactly `tensors`, in float32.

    Raises the error of torch, which names what is missing, unexpected or of another shape.
    """
    say_dtype({name: tensor.dtype for name, tensor in tensors.items()}, place)
    # First on the meta device: a hostile configuration takes no memory.
    sketched(make).load_state_dict(tensors, strict=True, assign=True)
    with seeded(seed):  # for buffers that no file holds
        model = make()
    model.load_state_dict(tensors, strict=True)
    return model


def settings_of(model: nn.Module) -> dict[str, Any]:
    """What affects an answer and no shape shows, of every module by its path.

    Its class (an activation), numbers, words and tuples (an epsilon, a number of heads), and the
    names of functions. Dropout and drop-path matter only in training and are left out.
    """
    settings: dict[str, Any] = {}
    for path, module in model.named_modules():
        if "drop" in path.rpartition(".")[2]:
            continue
        # The stack of blocks differs from the library's own container in its class alone.
        if type(module) not in (BlockStack, nn.Sequential, nn.ModuleList):
            settings[f"the class of {path}" if path else "the class"] = type(module).__name__
        for key, value in vars(module).items():
            if key.startswith("_") or key in _NOT_OF_ANSWERS or "drop" in key:
                continue
            if key in ("fixed", "shuffled") and isinstance(module, BlockStack):
                continue  # which layershuffle.json has
            if isinstance(value, bool | int | float | str | tuple):
                settings[f"{path}.{key}"] = value
            elif inspect.isroutine(value):
                settings[f"{path}.{key}"] = value.__qualname__
    return settings


def _tensor_kinds(model: nn.Module) -> dict[str, str]:
    """The class and the shape of every tensor, by its name.

    Libraries such as torchao store packed numbers in subclasses, which no file of plain tensors
    gives back.
    """
    kinds = {}
    for name, tensor in model.state_dict().items():
        kinds[name] = f"{type(tensor).__name__} {tuple(tensor.shape)}"
    return kinds


def check_rebuilt(
    backbone: nn.Module, make: Callable[[], nn.Module], *, how: str, hint: str
) -> None:
    """Raises `UsageError` unless `make`, which `how` describes, gives a model like `backbone`.

    Otherwise the saved files would load as a model with the same weights and other answers.
    """
    with library_errors(how, hint=hint, kind=UsageError):
        sketch = sketched(make)
    for facts in (_tensor_kinds, settings_of):
        ours = facts(backbone)
        theirs = facts(sketch)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise UsageError(
                    f"{how} gives another model than this one: {key} is {theirs.get(key)!r} there "
                    f"and {ours.get(key)!r} here",
                    hint=hint,
                )


def warn_new_head(backbone: nn.Module, *, old: int, new: int, seed: int) -> None:
    """Warn that the classification head was replaced, unless it was random anyway."""
    if origin_of(backbone).random:
        return
    LOG.warning(
        "The model has a new head: %d -> %d classes. It is freshly initialised "
        "(seed %d); its old weights are lost, so train before you score.",
        old,
        new,
        seed,
    )


def listed_names(names: Any, count: int, *, place: str | Path) -> tuple[str, ...] | None:
    """The names of `count` classes in a configuration's list, or `None` if it is empty.

    Raises `ModelFileError` for another number of names.
    """
    if not names:
        return None
    listed = tuple(map(str, names)) if isinstance(names, list | tuple) else ()
    if len(listed) != count:
        raise ModelFileError(
            f"The names of the classes are not a list of {count}",
            place=place,
            hint="correct the list, or take it out of the file",
        )
    return listed


def per_channel(values: Any, channels: int) -> tuple[float, ...]:
    """One number per channel; numbers for another number of channels are averaged, as in timm.

    So weights for colour images have a sensible scale on grey images. Raises `ValueError` or
    `TypeError` for what are no numbers.
    """
    if not isinstance(values, list | tuple):
        values = [values]
    listed = [float(value) for value in values]
    return tuple(listed) if len(listed) == channels else (fmean(listed),) * channels


def size_pair(size: Any) -> tuple[int, int]:
    """(height, width) of an int or a pair; raises `ValueError` or `TypeError` for others."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def unknown_name(kind: str, name: str, *, names: list[str], listing: str) -> UsageError:
    """The error for a name that is not in `names`, with the nearest one."""
    return UsageError(
        f"There is no {kind} {name!r}", hint=did_you_mean(name, names, otherwise=listing)
    )
