"""The stem and the head of a backbone: what it computes before its blocks, and after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.entries import Entry, block_call
from layershuffle.core.hooks import Step
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import drawn_blocks
from layershuffle.core.runs import RunChange, run_of
from layershuffle.core.stack import running, stack_of, tap
from layershuffle.core.tensors import state_of, tensor_of
from layershuffle.ground.errors import StackError


def run_stem(
    model: nn.Module, images: Tensor, *, forward: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Any]:
    """The state `[batch, tokens, width]` that enters the first block, and its other arguments.

    `model` is wrapped; `forward(images)` calls it. No block runs, and what the head makes of the
    state is thrown away: it is small, and torch.export follows no early exit. Raises `StackError`
    for a backbone that never calls its blocks.
    """
    reached: list[tuple[Tensor, Any]] = []

    def note(state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        reached.append((tensor_of(state), (args, kwargs)))
        return reached[0][0].clone()

    in_place_of_blocks(model, note, forward=lambda: forward(images))
    if not reached:
        raise StackError(f"{type(model).__name__} never called its block stack")
    return reached[0]


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

    The blocks between the ends run in reverse order, by the backbone and one after the other
    outside of it; all states and the output have to be equal.
    """
    stack = stack_of(model)
    few = images[:2]
    refusal = StackError(
        f"{type(model).__name__} does more between its blocks than pass the state on (several "
        "states, a read-out, gates, tuples ...), so it cannot be split into stem, blocks and head",
        hint="whole forwards work: layershuffle.running, fit and eval",
    )

    def one_by_one(state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = run_of(stack)
        for record in tapped.records:
            call = block_call(
                stack.blocks[record.block], Step(record.position, record.block), run=run
            )
            out = call(state, *args, **kwargs)
            state = state_of(out)
            if out is not state or not torch.equal(state, record.tensor):
                raise refusal
        return state

    drawn = drawn_blocks(stack.depth, stack.fixed)
    order = ExecutionOrder(tuple(reversed(drawn)), stack.depth).within_ends(stack.fixed)
    with torch.no_grad():
        with running(model, order), tap(model) as tapped:
            output = forward(few)
        again = in_place_of_blocks(model, one_by_one, forward=lambda: forward(few))
    if not torch.equal(again, output):
        raise refusal


def in_place_of_blocks(
    model: nn.Module, call: Callable[..., Tensor], *, forward: Callable[[], Tensor]
) -> Tensor:
    """The output of `forward()` if a single entry takes the place of all blocks."""
    stack = stack_of(model)
    entry = Entry(stack.blocks[0], call)
    with RunChange(stack, entries=lambda _: [entry], requests=None):
        return forward()
