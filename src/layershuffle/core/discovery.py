"""Find the block stack inside a backbone, and refuse stacks that cannot run in any order.

A stack qualifies if its children are of one class, with parameters of the same names and shapes and
the same settings (window sizes, shifts, head counts ...): then any block can take any place. Two
things may differ and travel with their block: drop-path rates and bookkeeping indices.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from itertools import pairwise

from torch import nn

from layershuffle.ground.errors import StackError

# What may differ between blocks that can still stand in for each other: how often they are dropped
# in training, whether they are in training mode, and the number they carry for logging or caching.
_MAY_DIFFER = frozenset(
    {"training", "drop_prob", "drop_path_rate", "layer_idx", "layer_index", "layer_id", "block_idx"}
)
# Exactly these: a subclass may have a forward of its own, which a class swap would lose.
_CONTAINERS = (nn.Sequential, nn.ModuleList)
ISOTROPIC = "use an isotropic model (ViT, DeiT, BEiT, DINOv2, EVA, XCiT, MLP-Mixer)"
_log = logging.getLogger("layershuffle")
_DROP_PATH = frozenset({"drop_path", "drop_path1", "drop_path2", "drop_path3"})


def find_blocks(
    model: nn.Module, path: str | None = None, *, may_differ: Collection[str] = ()
) -> tuple[str, nn.Module]:
    """Path and container of the model's transformer blocks, e.g. `("blocks", Sequential(...))`.

    Without `path`: the longest `nn.Sequential` or `nn.ModuleList` of blocks of one class.
    `may_differ`: names of plain attributes that do not change what a block computes. Raises
    `StackError` with the reason when there is none, when the blocks are spread over several stages
    (Swin), or when they differ, so that they are not interchangeable.
    """
    if path is None:
        path, container = _largest_stack(model)
        _refuse_stages(model, path, container)
        _say_others(model, path)
    else:
        container = _at(model, path)
    check_interchangeable(container, path, may_differ=may_differ)
    _refuse_inputs_by_position(model, path)
    return path, container


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


def _largest_stack(model: nn.Module) -> tuple[str, nn.Module]:
    candidates = list(_candidates(model))
    if not candidates:
        raise StackError(
            f"{type(model).__name__} has no stack of two or more blocks of one class",
            hint=_hint_without_stack(model),
        )
    # The first of the longest: outer stacks come before those inside their blocks.
    return max(candidates, key=lambda candidate: sum(1 for _ in candidate[1].children()))


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if type(module) in _CONTAINERS:
            children = list(module.children())
            kinds = {type(child) for child in children}
            # A block has parts of its own; a list of Linear or Identity layers is not a stack.
            if len(children) >= 2 and len(kinds) == 1 and any(children[0].children()):
                yield path, module


def _hint_without_stack(model: nn.Module) -> str:
    """What to type for this very model: its stacks, or what could become one."""
    stacks = [path for path, _ in _candidates(model)]
    if stacks:
        return f"stacks found: {', '.join(stacks)}; name one with wrap(model, blocks=PATH)"
    for path, module in model.named_modules():
        name = type(module).__name__
        # What the user meant: blocks in a container that is no candidate.
        if isinstance(module, _CONTAINERS) and any(any(c.children()) for c in module.children()):
            if type(module) not in _CONTAINERS:
                return (
                    f"{path!r} is a {name} with code of its own: move what its forward does into "
                    "the backbone's, and make it an nn.ModuleList"
                )
            if len(list(module.children())) == 1:
                return f"{path!r} holds one block: wrap(model, blocks={path!r}) takes it as it is"
            return f"{path!r} holds blocks of several classes: give all of them one class"
    return "put the blocks, each a module of its own with parts in it, into one nn.ModuleList"


def _say_others(model: nn.Module, path: str) -> None:
    """Log which stack was taken where there are others that could have been meant."""
    others = [
        f"{other} ({len(list(module.children()))} {type(next(module.children())).__name__})"
        for other, module in _candidates(model)
        # Parts of blocks, and what surrounds the stack, are no alternatives.
        if not f"{other}.".startswith(f"{path}." if path else "")
        and not f"{path}.".startswith(f"{other}.")
    ]
    if others:
        _log.warning(
            "%s has several stacks: orders are those of %r; %s stay as they are "
            "(wrap(model, blocks=PATH) takes another)",
            type(model).__name__,
            path,
            ", ".join(others),
        )


def _refuse_stages(model: nn.Module, path: str, container: nn.Module) -> None:
    kind = type(next(container.children()))
    by_path = {p: m for p, m in _candidates(model) if type(next(m.children())) is kind}
    others = [p for p in by_path if p != path and not p.startswith(path + ".")]
    if others:
        alike = [
            p
            for p, m in _candidates(model)
            if not any(_difference(first, second, ()) for first, second in _pairs(m))
        ]
        # Rather blocks of another class: the stages may be a convolutional stem before them.
        alike.sort(key=lambda candidate: candidate in by_path)
        tower = next(iter(alike), None)
        raise StackError(
            f"The {kind.__name__} blocks of {type(model).__name__} stand in {len(by_path)} places "
            f"({', '.join(by_path)}), not in one stack",
            place=path,
            hint=ISOTROPIC
            if tower is None
            else f"{ISOTROPIC}; or let the others stay as they are: wrap(model, blocks={tower!r})",
        )


def _at(model: nn.Module, path: str) -> nn.Module:
    try:
        container = model.get_submodule(path)
    except AttributeError:
        raise StackError(
            f"{type(model).__name__} has no module {path!r}", hint=_hint_without_stack(model)
        ) from None
    if type(container) not in _CONTAINERS:
        raise StackError(
            f"{path!r} is a {type(container).__name__}, not a Sequential or ModuleList of blocks",
            hint=_hint_without_stack(model),
        )
    return container


def _refuse_inputs_by_position(model: nn.Module, path: str) -> None:
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
    shapes = [{name: tuple(p.shape) for name, p in b.named_parameters()} for b in (first, second)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        here, there = (shape.get(name) for shape in shapes)
        if here != there:
            return f"parameter {name} is {_shape(here)} in one and {_shape(there)} in the other"
    return _setting_difference(first, second, may_differ)


def _setting_difference(
    first: nn.Module, second: nn.Module, may_differ: Collection[str]
) -> str | None:
    settings = [dict(_settings(block, may_differ)) for block in (first, second)]
    for name in sorted(settings[0].keys() | settings[1].keys()):
        here, there = (values.get(name) for values in settings)
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
        return all(_is_plain(part) for item in value.items() for part in item)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | bool)


def _pairs(container: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    return pairwise(container.children())


def _shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape)) or "a scalar" if shape is not None else "absent"
