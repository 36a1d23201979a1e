"""A model made of some blocks of another: the paper's reduced-depth models (section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from layershuffle.errors import UsageError
from layershuffle.models.origin import origin_of, remember
from layershuffle.models.store import host_of, library_of
from layershuffle.orders import ExecutionOrder, order_of
from layershuffle.stack import stack_of, wrap


def truncate(model: nn.Module, blocks: ExecutionOrder | str | Sequence[int]) -> nn.Module:
    """`model` itself, shortened to `blocks` (ids, each once), which it now runs in that order.

    Stem and head stay. It can be saved and loaded as an ordinary model of its library. Raises
    `UsageError` for repeats, for models with position parts (their tables belong to another depth),
    and where the library cannot describe the shorter model; the model is then as before.
    """
    stack = stack_of(wrap(model))
    order = order_of(blocks, stack.depth)
    if host_of(model) is not model:
        raise UsageError(
            "A model with position parts cannot be shortened", hint="shorten it before adding them"
        )
    if len(set(order)) < len(order):
        raise UsageError(f"The blocks {order} hold one twice", hint="name each block once")
    before = dict(stack._modules)
    names = list(before)[: len(order)]
    kept = dict(zip(names, [stack.block(block) for block in order], strict=True))
    _fill(stack, kept)
    noted = False
    try:
        library_of(model).set_depth(model, len(order))
        noted = True
    finally:
        if not noted:
            _fill(stack, before)
    # Method and scores were those of the longer model.
    return remember(model, replace(origin_of(model), record={}))


def _fill(stack: nn.Module, blocks: Mapping[str, nn.Module | None]) -> None:
    stack._modules.clear()
    stack._modules.update(blocks)
