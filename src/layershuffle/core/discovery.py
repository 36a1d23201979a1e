"""Find the block stack inside a backbone, and refuse stacks that cannot run in any order.

A stack qualifies if its children are of one class, with parameters of the same names and shapes and
the same settings (window sizes, shifts, head counts ...): then any block can take any place
(`checks.blocks_alike`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

from torch import nn

from layershuffle.core.checks.blocks_alike import (
    check_interchangeable,
    refuse_inputs_by_position,
    refuse_stages,
)
from layershuffle.ground.errors import StackError

# Exactly these: a subclass may have a forward of its own, which a class swap would lose.
_CONTAINERS = (nn.Sequential, nn.ModuleList)
_log = logging.getLogger("layershuffle")


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
        refuse_stages(model, path, candidates=_candidates(model))
        _say_others(model, path)
    else:
        container = _at(model, path)
    check_interchangeable(container, path, may_differ=may_differ)
    refuse_inputs_by_position(model, path)
    return path, container


def _largest_stack(model: nn.Module) -> tuple[str, nn.Module]:
    candidates = list(_candidates(model))
    if not candidates:
        raise StackError(
            f"{type(model).__name__} has no stack of two or more blocks of one class",
            hint=_hint_without_stack(model),
        )
    # The first of the longest: outer stacks come before those inside their blocks.
    return max(candidates, key=lambda candidate: len(list(candidate[1].children())))


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
