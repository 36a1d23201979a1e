"""Find the block stack inside a host model, and refuse stacks that cannot run in any order.

A stack qualifies if its children are of one class, with parameters of the same names and shapes and
the same settings (window sizes, shifts, head counts ...): then any block can take any place. Two
things may differ and travel with their block: drop-path rates and bookkeeping indices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

from torch import nn

from layershuffle.errors import StackError

# What may differ between blocks that can still stand in for each other: how often they are dropped
# in training, whether they are in training mode, and the number they carry for logging or caching.
_MAY_DIFFER = frozenset(
    {"training", "drop_prob", "drop_path_rate", "layer_idx", "layer_index", "layer_id", "block_idx"}
)
# Exactly these: a subclass may have a forward of its own, which a class swap would lose.
_CONTAINERS = (nn.Sequential, nn.ModuleList)
_DROP_PATH = frozenset({"drop_path", "drop_path1", "drop_path2", "drop_path3"})


def find_blocks(
    model: nn.Module, path: str | None = None, *, may_differ: Collection[str] = ()
) -> tuple[str, nn.Module]:
    """Path and container of the model's transformer blocks, e.g. `("blocks", Sequential(...))`.

    Without `path`: the longest `nn.Sequential` or `nn.ModuleList` of blocks of one class.
    `may_differ`: names of plain attributes that do not change what a block computes. Raises
    `StackError` with the reason when there is none, when the blocks are spread over several stages
    (Swin), or when they differ, so that one cannot take the place of another.
    """
    if path is None:
        path, container = _largest_stack(model)
        _refuse_stages(model, path, container)
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
    if len(blocks) < 2:
        raise StackError(f"{path!r} holds {len(blocks)} block(s), an order needs at least two")
    for index, (first, second) in enumerate(pairwise(blocks)):
        difference = _difference(first, second, may_differ)
        if difference:
            raise StackError(
                f"The blocks {index} and {index + 1} of {type(container).__name__} {path!r} differ:"
                f" {difference}. LayerShuffle needs blocks that can take each other's place",
                place=path,
                hint="use an isotropic model (ViT, DeiT, BEiT, DINOv2, EVA, XCiT, MLP-Mixer), or "
                "name another stack with wrap(model, blocks=PATH); allow an attribute on which "
                "nothing that a block computes depends by wrap(model, may_differ=['index'])",
            )


def _largest_stack(model: nn.Module) -> tuple[str, nn.Module]:
    candidates = list(_candidates(model))
    if not candidates:
        raise StackError(
            f"{type(model).__name__} has no stack of two or more blocks of one class",
            hint="name it: wrap(model, blocks='path.to.blocks')",
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


def _refuse_stages(model: nn.Module, path: str, container: nn.Module) -> None:
    kind = type(next(container.children()))
    by_path = {p: m for p, m in _candidates(model) if type(next(m.children())) is kind}
    others = [p for p in by_path if p != path and not p.startswith(path + ".")]
    if others:
        raise StackError(
            f"The {kind.__name__} blocks of {type(model).__name__} stand in {len(by_path)} places "
            f"({', '.join(by_path)}), not in one stack",
            place=path,
            hint="use an isotropic model (ViT, DeiT, BEiT, DINOv2, EVA, XCiT, MLP-Mixer); for a "
            "model with several towers name one with wrap(model, blocks=PATH)",
        )


def _at(model: nn.Module, path: str) -> nn.Module:
    try:
        container = model.get_submodule(path)
    except AttributeError:
        paths = ", ".join(p for p, _ in _candidates(model)) or "none"
        raise StackError(
            f"{type(model).__name__} has no module {path!r}", hint=f"stacks found: {paths}"
        ) from None
    if type(container) not in _CONTAINERS:
        raise StackError(
            f"{path!r} is a {type(container).__name__}, not a Sequential or ModuleList of blocks",
            hint="name the container itself; subclasses with a forward of their own cannot be used",
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
    """Plain settings of a block and its parts: numbers, words and tuples of them."""
    for path, module in block.named_modules():
        # timm's drop-path rates rise with depth; a rate belongs to its block and travels with it.
        if path.rpartition(".")[2] in _DROP_PATH:
            continue
        for name, value in vars(module).items():
            if name.startswith("_") or name in _MAY_DIFFER or name in may_differ:
                continue
            if isinstance(value, int | float | str | bool | tuple):
                yield f"{path}.{name}".lstrip("."), value


def _shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape)) or "a scalar" if shape is not None else "absent"
