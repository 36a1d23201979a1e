"""The two ends of a backbone: what it does before its blocks, and after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.entries import Entry, placed
from layershuffle.core.hooks import Step
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.runs import Run, changed, run_of
from layershuffle.core.stack import blocks_of, depth_of, running, stack_of, tap
from layershuffle.core.tensors import state_of, tensor_of
from layershuffle.errors import StackError


def run_stem(
    model: nn.Module, images: Tensor, *, forward: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Any]:
    """The state `[batch, tokens, width]` that enters the first block, and its other arguments.

    `model` is wrapped; `forward(images)` calls it. No block runs. Raises `StackError` for a
    backbone that never calls its blocks.
    """

    reached = _stem(model, lambda: forward(images))
    return reached.state, reached.others


def run_head(
    model: nn.Module, images: Tensor, *, state: Tensor, forward: Callable[[Tensor], Tensor]
) -> Tensor:
    """The output of `forward(images)` if its blocks return `state` and nothing else.

    The stem runs too, because the head is only reachable through the backbone's own forward. It is
    small beside the blocks (0.7 % of the operations of a ViT-B).
    """
    # A copy, because some backbones change the state in place, and the caller may need it again.
    return in_place_of_blocks(
        model, lambda *_, **__: state.clone(), forward=lambda: forward(images)
    )


def refuse_more_than_blocks(
    model: nn.Module, images: Tensor, *, forward: Callable[[Tensor], Tensor]
) -> None:
    """Raises `StackError` if more happens between stem and head than the blocks do.

    The blocks run in reverse order, by the backbone and one after the other outside of it; all
    states and the output have to be equal.
    """
    few, depth = images[:2], depth_of(model)
    order = ExecutionOrder(tuple(reversed(range(depth))), depth)
    with torch.no_grad():
        with running(model, order), tap(model) as tapped:
            output = forward(few)
        stem = _stem(model, lambda: forward(few))
        state, (args, kwargs), same = stem.state, stem.others, True
        for record in tapped.records:
            step = Step(record.position, record.block)
            call = placed(blocks_of(model)[record.block], step, run=stem.run)
            out = call(state, *args, **kwargs)
            state = state_of(out)
            same &= out is state and torch.equal(state, record.tensor)
        same = same and torch.equal(run_head(model, few, state=state, forward=forward), output)
    if not same:
        raise StackError(
            f"{type(model).__name__} does more between its blocks than pass the state on (several "
            "states, a read-out, gates, tuples ...), so it cannot be split into stem, blocks and "
            "head",
            hint="whole forwards work: layershuffle.running, fit and eval",
        )


class _Reached(BaseException):
    """Leaves the forward at its blocks. It is not an `Exception`, so no backbone catches it."""

    def __init__(self, state: Tensor, others: Any, *, run: Run) -> None:
        super().__init__()
        self.state, self.others, self.run = state, others, run


def _stem(model: nn.Module, forward: Callable[[], Tensor]) -> _Reached:
    stack = stack_of(model)

    def stop(state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise _Reached(tensor_of(state), (args, kwargs), run=run_of(stack))

    try:
        in_place_of_blocks(model, stop, forward=forward)
    except _Reached as reached:
        return reached
    raise StackError(f"{type(model).__name__} never called its block stack")


def in_place_of_blocks(
    model: nn.Module, call: Callable[..., Tensor], *, forward: Callable[[], Tensor]
) -> Tensor:
    """The output of `forward()` if a single entry takes the place of all blocks."""
    stack = stack_of(model)
    entry = Entry(stack.blocks[0], call)
    with changed(stack, entries=lambda _: [entry], asked=None):
        return forward()
