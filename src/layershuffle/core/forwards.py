"""Many orders over one batch.

Orders run in sorted order, each by the backbone's own forward, and return from memory what the
order before computed at a common beginning. The answers are bit-equal to running the orders one by
one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from weakref import WeakSet

from torch import Tensor, nn

from layershuffle.core.checks.calls import watched_calls
from layershuffle.core.checks.orders import checked_fixed
from layershuffle.core.checks.sharing import Beginnings, beginnings
from layershuffle.core.checks.trials import forget
from layershuffle.core.entries import Shared
from layershuffle.core.orders import ExecutionOrder, check_ends, order_of
from layershuffle.core.runs import StackRequests
from layershuffle.core.stack import in_order, running, stack_of
from layershuffle.core.tensors import logits_of
from layershuffle.ground.errors import UsageError

_log = logging.getLogger("layershuffle")
# Bytes of a state on a CPU, and the fewest images; with fewer the weights are read too often.
_CACHED_BYTES = 1 << 20
_LEAST_IMAGES = 4
Forward = Callable[[Tensor], Tensor]
_SAID: WeakSet[nn.Module] = WeakSet()


def forward_many(
    model: nn.Module,
    images: Tensor,
    orders: Sequence[ExecutionOrder | str],
    *,
    forward: Forward | None = None,
    fixed: tuple[int, int] | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """(index in `orders`, its logits `[batch, classes]`) for every order, in sorted order.

    `model` is wrapped; `images` `[batch, channels, height, width]`. `forward(images)` calls it and
    returns what is yielded; by default its logits. Blocks at a common beginning run once, so that
    at most `depth` states are kept. Where blocks depend on what others left behind, the orders run
    one by one, which is logged once. `fixed` as in `running`. Raises `UsageError` for orders of
    another depth and for orders that do not keep the ends.

        logits = dict(layershuffle.forward_many(model, images, ["0,1,2,3", "0,1,3,2"]))
    """
    if isinstance(orders, str):
        raise UsageError(f"{orders!r} is one order, not several", hint=f"give [{orders!r}]")
    stack = stack_of(model)
    forget(stack)
    several = [order_of(order, stack.depth) for order in orders]
    check_ends(several, stack.fixed if fixed is None else checked_fixed(fixed))
    return run_many(model, images, orders=several, forward=forward)


def run_many(
    model: nn.Module,
    images: Tensor,
    *,
    orders: Sequence[ExecutionOrder],
    forward: Forward | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Run the orders as `forward_many` does, by an earlier verdict on what blocks share, if any.

    The orders may move the ends of the model: who draws them has checked that.
    """

    def logits(batch: Tensor) -> Tensor:
        return logits_of(model(batch), model)

    stack = stack_of(model)
    call = forward or logits
    indices: dict[ExecutionOrder, list[int]] = {}
    for index, order in enumerate(orders):
        indices.setdefault(order, []).append(index)
    ranked = sorted(indices, key=lambda order: order.steps)
    # Without an image there is nothing to try, and nothing to share.
    alike = len(ranked) > 1 and len(images) > 0 and sharing_of(model, images, forward=call).shared
    shared = Shared()
    for order, following in zip(ranked, [*ranked[1:], None], strict=True):
        if not alike:
            with running(model, order, fixed=(0, 0)):
                output = call(images)
        else:
            common = order.common_beginning(following) if following else 0
            shared.reused = shared.kept
            shared.kept = common
            requests = StackRequests(stack.depth)
            watching = watched_calls(
                model, stack, blocks=stack.blocks, order=order, requests=requests
            )
            with in_order(stack, order, requests=requests, shared=shared), watching:
                output = call(images)
            requests.refuse_cut(model)
            del shared.outputs[shared.kept :]
        for index in indices[order]:
            yield index, output


def block_runs(orders: Sequence[ExecutionOrder]) -> int:
    """The number of block runs of `forward_many` over `orders`."""
    ranked = sorted(set(orders), key=lambda order: order.steps)
    runs = sum(map(len, ranked))
    for order, following in pairwise(ranked):
        runs -= order.common_beginning(following)
    return runs


def sharing_of(model: nn.Module, images: Tensor, *, forward: Forward) -> Beginnings:
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


def images_at_once(model: nn.Module, images: Tensor, *, forward: Forward) -> int:
    """The number of `images` for many orders at a time; `forward` as in `forward_many`.

    On a CPU the images are split into even parts whose state stays in the cache from block to
    block: measured best at widths 64, 192 and 768. A GPU takes all images, and so does a model
    whose answer to an image depends on the others in its batch. The answers are those of another
    batch size, equal up to the rounding of batched kernels.
    """
    if images.device.type != "cpu" or len(images) < 2:
        return max(1, len(images))
    verdict = sharing_of(model, images, forward=forward)
    size = verdict.bytes_per_image
    if not size or verdict.reads_batch:
        return len(images)
    # The limit is in bytes, not images: with parts of 8 to 32 images the digits model takes up to
    # 2.2 times as long.
    most = max(_LEAST_IMAGES, _CACHED_BYTES // size)
    # Even parts, because a rest of one or two images would read all weights for little work.
    parts = -(-len(images) // most)
    return -(-len(images) // parts)
