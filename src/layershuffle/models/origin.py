"""The origin of a loaded model, and functions that all host libraries' adapters share.

`Origin` is a plain attribute of the host model, so that `save` can write a directory that the host
library rebuilds without this package.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from torch import Tensor, nn

from layershuffle.errors import ModelFileError, UsageError
from layershuffle.image_view import ImageView

LOG = logging.getLogger("layershuffle")
# An nn.Module of a host library, with attributes that nn.Module does not declare.
HostModel = Any
_ATTRIBUTE = "layershuffle_origin"
# Settings of modules that affect no answer.
_NOT_OF_ANSWERS = {
    "training", "distilled_training", "grad_checkpointing", "gradient_checkpointing",
    "name_or_path", "p", "inplace",
}  # fmt: skip
_VIEW_KEYS = ("channels", "height", "width", "mean", "std", "interpolation", "crop_pct", "resize")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a host model was made.

    `model_args`: what its constructor got. `base_model`: its name on the hub, if it was trained
    there. `view`: how it wants its images, where that is known better than the model can tell.
    `class_names`: of a model that has no place for them. `record`: see `layershuffle.save`.
    """

    model_args: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None
    view: ImageView | None = None
    class_names: tuple[str, ...] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


def origin_of(host: nn.Module) -> Origin:
    """The origin of `host`; empty for a model that was not made by `layershuffle.load`."""
    origin = getattr(host, _ATTRIBUTE, None)
    return origin if isinstance(origin, Origin) else Origin()


def trained_with(host: nn.Module) -> Mapping[str, Any]:
    """The settings of the run that trained `host`, as its holdout; empty if unknown."""
    settings = origin_of(host).record.get("settings")
    return settings if isinstance(settings, dict) else {}


def remember(host: nn.Module, origin: Origin) -> nn.Module:
    """Set the origin of `host`, and return `host`."""
    # nn.Module only registers tensors and modules, so the state_dict does not change.
    setattr(host, _ATTRIBUTE, origin)
    return host


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator within; the caller's random state is restored.

    The host libraries draw new weights from torch's global generator on the CPU and take no other,
    so that generator is seeded here and put back afterwards.
    """
    # Another default device of the caller would have its own generator.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def warn_new_head(old: int, new: int, *, seed: int) -> None:
    """Warn that the classification head was replaced."""
    LOG.warning(
        "The head of the model was resized: %d -> %d classes. The new head is freshly initialised "
        "(seed %d); its old weights are lost, so train before you score.",
        old,
        new,
        seed,
    )


def new_linear(old: nn.Linear, outputs: int, *, std: float, seed: int) -> nn.Linear:
    """A linear layer like `old` with `outputs` rows: truncated normal weights, bias zero."""
    # On the meta device, because the constructor would draw from the global generator.
    layer = nn.Linear(old.in_features, outputs, bias=old.bias is not None, device="meta")
    layer = layer.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    nn.init.trunc_normal_(layer.weight, std=std, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer.to(old.weight.device, old.weight.dtype)


def match_dtype(host: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Convert `host` to the floating dtype of `tensors`, if all have the same."""
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    # With several dtypes, loading converts tensor by tensor.
    if len(kinds) == 1:
        host.to(kinds.pop())


def view_to_json(view: ImageView) -> dict[str, Any]:
    """The fields of a view as JSON types."""
    fields = {name: getattr(view, name) for name in _VIEW_KEYS}
    return fields | {"mean": list(view.mean), "std": list(view.std)}


def view_from_json(data: Mapping[str, Any], place: Path) -> ImageView:
    """The inverse of `view_to_json`. Raises `ModelFileError` for an invalid view."""
    try:
        mean, std = (tuple(float(value) for value in data[name]) for name in ("mean", "std"))
        return ImageView(**{**data, "mean": mean, "std": std})
    except (TypeError, KeyError, ValueError) as error:
        raise ModelFileError(
            f"The image_view cannot be used ({error})",
            place=place,
            hint=f"its fields are {', '.join(_VIEW_KEYS)}",
        ) from error


def listed_names(names: object, count: int, *, place: str | Path) -> tuple[str, ...] | None:
    """The names of `count` classes in a configuration's list, or `None` if it is empty.

    Raises `ModelFileError` for another number of names, or values that are no strings.
    """
    if not names:
        return None
    if (
        not isinstance(names, list | tuple)
        or len(names) != count
        or not all(isinstance(name, str) for name in names)
    ):
        raise ModelFileError(
            f"The names of the classes are not a list of {count} texts",
            place=place,
            hint="correct the list, or take it out of the file",
        )
    return tuple(names)


def per_channel(values: object, channels: int) -> tuple[float, ...]:
    """One number per channel; numbers for another number of channels are averaged, as in timm.

    So weights for colour images have a sensible scale on grey images.
    """
    numbers = (
        [_number(v) for v in values] if isinstance(values, list | tuple) else [_number(values)]
    )
    if not numbers:
        raise ValueError("a mean or deviation of the images has no numbers")
    if len(numbers) != channels:
        return (sum(numbers) / len(numbers),) * channels
    return tuple(numbers)


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"a mean or deviation of the images is a number, not {value!r}")
    return float(value)


def size_pair(size: object) -> tuple[int, int]:
    """(height, width) of an int or a pair."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) for n in size):
        return size[0], size[1]
    raise ValueError(f"an image size is a number or a pair of them, not {size!r}")


def unknown_name(kind: str, name: str, *, names: list[str], listing: str) -> UsageError:
    """The error for a name that is not in `names`, with the nearest ones."""
    near = get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else listing
    return UsageError(f"There is no {kind} {name!r}", hint=hint)


def hub_silence() -> str:
    """The reason why the hub cannot be reached."""
    if constants.HF_HUB_OFFLINE:
        return "offline mode is set (HF_HUB_OFFLINE)"
    return "the hub cannot be reached over the network"


def weights_missing(
    model: str, why: str, *, download: str, random: str, place: str = constants.HF_HUB_CACHE
) -> ModelFileError:
    """The error for weights that are not in the cache `place` and cannot be downloaded."""
    return ModelFileError(
        f"The weights of {model} are not in the cache of this machine, and {why}",
        place=place,
        hint=f"with a network, type {download} (on another machine: then copy the cache here); "
        f"or use {random} for random weights",
    )


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Numbers, strings and tuples of every module that affect an answer, such as numbers of heads.

    Shapes of tensors hide them.
    """
    return {
        f"{path}.{key}": value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple)
        and not key.startswith("_")
        and key not in _NOT_OF_ANSWERS
        and "drop" not in key  # rates of dropout and drop-path matter only in training
    }
