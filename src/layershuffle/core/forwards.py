"""Whole forwards: of many orders over one batch, and the two ends of one, before and after blocks.

Orders run in sorted order, each by the backbone's own forward, and return from memory what the
order before computed at a common beginning. Logits are bit-equal to running the orders one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from layershuffle.core.entries import Entry, Shared, placed
from layershuffle.core.hooks import Step
from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.core.runs import Asked, Run, changed, run_of
from layershuffle.core.sharing import Beginnings, beginnings
from layershuffle.core.stack import blocks_of, depth_of, in_order, running, stack_of, tap
from layershuffle.core.tensors import logits_of, state_of, tensor_of
from layershuffle.errors import StackError

_log = logging.getLogger("layershuffle")
# Bytes of a state on a CPU, and the fewest images; with fewer the weights are read too often.
_CACHED_BYTES, _LEAST_IMAGES = 1 << 20, 4
Logits = Callable[[Tensor], Tensor]
_SAID: WeakSet[nn.Module] = WeakSet()


def forward_many(
    model: nn.Module,
    images: Tensor,
    orders: Sequence[ExecutionOrder | str],
    *,
    forward: Logits | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """(index in `orders`, its logits `[batch, classes]`) for every order, in sorted order.

    `model` is wrapped; `images` `[batch, channels, height, width]`. `forward(images)` calls it and
    returns what is yielded; by default its logits. Blocks at a common beginning run once, so that
    at most `depth` states are kept. Where blocks depend on what others left behind, the orders run
    one by one, which is logged once. Raises `UsageError` for orders of another depth.

        logits = dict(layershuffle.forward_many(model, images, ["0,1,2,3", "0,1,3,2"]))
    """

    def logits(batch: Tensor) -> Tensor:
        return logits_of(model(batch))

    stack, call = stack_of(model), forward or logits
    indices: dict[ExecutionOrder, list[int]] = {}
    for index, order in enumerate(orders):
        indices.setdefault(order_of(order, stack.depth), []).append(index)
    ranked = sorted(indices, key=lambda order: order.steps)
    alike = len(ranked) > 1 and sharing_of(model, images, forward=call).shared
    shared = Shared()
    for order, following in zip(ranked, [*ranked[1:], None], strict=True):
        if not alike:
            with running(model, order):
                output = call(images)
        else:
            common = order.common_beginning(following) if following else 0
            shared.reused, shared.kept = shared.kept, common
            asked = Asked(stack.depth)
            with in_order(stack, order, asked=asked, shared=shared):
                output = call(images)
            asked.refuse_cut(model)
            del shared.outputs[shared.kept :]
        for index in indices[order]:
            yield index, output


def block_runs(orders: Sequence[ExecutionOrder]) -> int:
    """The number of block runs of `forward_many` over `orders`."""
    ranked = sorted({order.steps: order for order in orders}.items())
    runs = sum(len(steps) for steps, _ in ranked)
    shared = (order.common_beginning(other) for (_, order), (_, other) in pairwise(ranked))
    return runs - sum(shared)


def sharing_of(model: nn.Module, images: Tensor, *, forward: Logits) -> Beginnings:
    """Whether the orders of `forward(images)` share their beginnings; logged once if not."""
    stack = stack_of(model)
    verdict = beginnings(model, stack, blocks=stack.blocks, images=images, forward=forward)
    if not verdict.shared and stack not in _SAID:
        _SAID.add(stack)
        _log.warning(
            "The blocks of %s depend on more than the state, or write into it, so its orders run "
            "one by one: this takes longer, the scores are the same",
            type(model).__name__,
        )
    return verdict


def images_at_once(model: nn.Module, images: Tensor, *, forward: Logits) -> int:
    """The number of `images` for many orders at a time; `forward` as in `forward_many`.

    On a CPU the images are split into even parts whose state stays in the cache from block to
    block: measured best at widths 64, 192 and 768 (research/log.md). A GPU takes all images. Logits
    are those of another batch size, equal up to the rounding of batched kernels.
    """
    if images.device.type != "cpu" or len(images) < 2:
        return max(1, len(images))
    size = sharing_of(model, images, forward=forward).bytes_per_image
    if not size:
        return len(images)
    # The limit is in bytes, not images: with parts of 8 to 32 images the digits model takes up to
    # 2.2 times as long (research/log.md).
    most = max(_LEAST_IMAGES, _CACHED_BYTES // size)
    # Even parts, because a rest of one or two images would read all weights for little work.
    parts = -(-len(images) // most)
    return -(-len(images) // parts)


# --- the two ends ---------------------------------------------------------------------------------


def run_stem(model: nn.Module, images: Tensor, *, forward: Logits) -> tuple[Tensor, Any]:
    """The state `[batch, tokens, width]` that enters the first block, and its other arguments.

    `model` is wrapped; `forward(images)` calls it. No block runs. Raises `StackError` for a
    backbone that never calls its blocks.
    """

    reached = _stem(model, lambda: forward(images))
    return reached.state, reached.others


def run_head(model: nn.Module, images: Tensor, *, state: Tensor, forward: Logits) -> Tensor:
    """The output of `forward(images)` if its blocks return `state` and nothing else.

    The stem runs too, because the head is only reachable through the backbone's own forward. It is
    small beside the blocks (0.7 % of the operations of a ViT-B).
    """
    # A copy, because some backbones change the state in place, and the caller may need it again.
    return _in_place_of_blocks(model, lambda *_, **__: state.clone(), lambda: forward(images))


def refuse_more_than_blocks(model: nn.Module, images: Tensor, *, forward: Logits) -> None:
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
        _in_place_of_blocks(model, stop, forward)
    except _Reached as reached:
        return reached
    raise StackError(f"{type(model).__name__} never called its block stack")


def _in_place_of_blocks(
    model: nn.Module, call: Callable[..., Tensor], forward: Callable[[], Tensor]
) -> Tensor:
    """The output of `forward()` if a single entry takes the place of all blocks."""
    stack = stack_of(model)
    entry = Entry(stack.blocks[0], call)
    with changed(stack, entries=lambda _: [entry], asked=None):
        return forward()
