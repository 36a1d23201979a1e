"""Whether blocks can take each other's place: one class, equal shapes and equal settings.

Two things may differ and travel with their block: drop-path rates and bookkeeping indices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

from torch import nn

from layershuffle.ground.errors import StackError

# What may differ between blocks that can still stand in for each other: how often they are dropped
# in training, whether they are in training mode, and the number they carry for logging or caching.
_MAY_DIFFER = frozenset(
    {"training", "drop_prob", "drop_path_rate", "layer_idx", "layer_index", "layer_id", "block_idx"}
)
ISOTROPIC = "use an isotropic model (ViT, DeiT, BEiT, DINOv2, EVA, XCiT, MLP-Mixer)"
_DROP_PATH = frozenset({"drop_path", "drop_path1", "drop_path2", "drop_path3"})


def check_interchangeable(
    container: nn.Module, path: str, *, may_differ: Collection[str] = ()
) -> None:
    """Raises `StackError` naming the first difference between two blocks of the container.

    `may_differ`: names of attributes that travel with their block.
    """
    blocks = list(container.children())
    if not blocks:
        raise StackError(
            f"{path!r} holds no blocks",
            place=path,
            hint="call wrap(model) when the blocks are in their container",
        )
    for index, (first, second) in enumerate(_pairs(container)):
        difference = _difference(first, second, may_differ)
        if difference:
            raise StackError(
                f"The blocks {index} and {index + 1} of {type(container).__name__} {path!r} differ:"
                f" {difference}. LayerShuffle needs blocks that can take each other's place",
                place=path,
                hint=f"{ISOTROPIC}; allow an attribute on which nothing that a block computes "
                "depends by wrap(model, may_differ=['index'])",
            )


def refuse_stages(
    model: nn.Module, path: str, *, candidates: Iterable[tuple[str, nn.Module]]
) -> None:
    """Raises `StackError` if blocks of the container at `path` stand in other places, too.

    `candidates`: paths of all containers of blocks, and the containers.
    """
    kind = type(next(model.get_submodule(path).children()))
    listed = list(candidates)
    places: list[str] = []
    others: list[str] = []
    for place, container in listed:
        if type(next(container.children())) is kind:
            places.append(place)
            if place != path and not place.startswith(path + "."):
                others.append(place)
    if others:
        alike: list[str] = []
        for candidate, container in listed:
            if not any(_difference(first, second, ()) for first, second in _pairs(container)):
                alike.append(candidate)
        # Rather blocks of another class: the stages may be a convolutional stem before them.
        alike.sort(key=lambda candidate: candidate in places)
        tower = next(iter(alike), None)
        raise StackError(
            f"The {kind.__name__} blocks of {type(model).__name__} stand in {len(places)} places "
            f"({', '.join(places)}), not in one stack",
            place=path,
            hint=ISOTROPIC
            if tower is None
            else f"{ISOTROPIC}; or let the others stay as they are: wrap(model, blocks={tower!r})",
        )


def refuse_inputs_by_position(model: nn.Module, path: str) -> None:
    """Raises `StackError` for a backbone that hands parameters to blocks by their position."""
    # timm's rope_mixed models keep learned rotary frequencies outside the blocks and hand number i
    # to whatever runs at position i, so a moved block would get another block's frequencies.
    owner = model.get_submodule(path.rpartition(".")[0])
    if getattr(owner, "rope_mixed", False):
        raise StackError(
            f"{type(owner).__name__} with rope_mixed hands learned rotary frequencies to blocks by "
            "position, so a block that moves would run with another block's parameters",
            place=path,
            hint="use the variant with axial or fixed rotary embeddings",
        )


def _difference(first: nn.Module, second: nn.Module, may_differ: Collection[str]) -> str | None:
    if type(first) is not type(second):
        return f"{type(first).__name__} and {type(second).__name__}"
    shapes = _shapes_by_name(first)
    others = _shapes_by_name(second)
    for name in sorted(shapes.keys() | others.keys()):
        here = shapes.get(name)
        there = others.get(name)
        if here != there:
            return f"parameter {name} is {_shape(here)} in one and {_shape(there)} in the other"
    return _setting_difference(first, second, may_differ)


def _setting_difference(
    first: nn.Module, second: nn.Module, may_differ: Collection[str]
) -> str | None:
    settings = dict(_settings(first, may_differ))
    others = dict(_settings(second, may_differ))
    for name in sorted(settings.keys() | others.keys()):
        here = settings.get(name)
        there = others.get(name)
        if here != there:
            return f"{name} is {here!r} in one and {there!r} in the other"
    return None


def _settings(block: nn.Module, may_differ: Collection[str]) -> Iterator[tuple[str, object]]:
    """Plain settings of a block and its parts: numbers, words, and collections of them."""
    for path, module in block.named_modules():
        # timm's drop-path rates rise with depth; a rate belongs to its block and travels with it.
        if path.rpartition(".")[2] in _DROP_PATH:
            continue
        for name, value in vars(module).items():
            if name.startswith("_") or name in _MAY_DIFFER or name in may_differ:
                continue
            if _is_plain(value):
                yield f"{path}.{name}".lstrip("."), value


def _is_plain(value: object) -> bool:
    """Whether `value` is a number, a word, or made of such in lists, tuples, sets and mappings."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | bool)


def _pairs(container: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    return pairwise(container.children())


def _shapes_by_name(block: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape)) or "a scalar" if shape is not None else "absent"
