"""Whether the blocks of a model share anything but the state: found out by running them.

Two orders with a common beginning may share its outputs, and samples with different orders may run
in one batch, if no block depends on what another one left behind (a dictionary with the values of
the first block, a counter, statistics of routing) and none mixes the samples of a batch. Nothing is
guessed from the code: the real blocks run on two images, together and alone, and the states after
every block are compared (`trials`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.checks.blocks import unused_stack
from layershuffle.core.checks.trials import (
    Trace,
    are_close,
    are_equal,
    attempt,
    cause_of,
    kind_of_call,
    run_plain,
    samples_of,
    trace_forward,
    trial_conditions,
    verdict_on,
)
from layershuffle.core.entries import Axes, Call, Shared, order_entries, sample_entries
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.runs import PLAIN
from layershuffle.ground.errors import StackError

_WHY = (
    "samples get another result together than alone: the backbone does more between its blocks "
    "than pass the state on, or its blocks share something beside the state, or mix the samples of "
    "a batch"
)


@dataclass(frozen=True)
class Beginnings:
    """Whether orders may share what a common beginning computed, and bytes of a state per image.

    `reads_batch`: the answer of an image depends on the images beside it, so that no batch may be
    cut into parts.
    """

    shared: bool
    bytes_per_image: int
    reads_batch: bool = False


# --- orders with a common beginning ---------------------------------------------------------------


def beginnings(
    model: nn.Module,
    stack: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    images: Tensor,
    forward: Callable[[Any], Any],
) -> Beginnings:
    """Whether the orders of `forward(images)`, which calls `model`, may share their beginnings.

    Raises `StackError` if the forward uses no block of the stack, and what the call itself raises.
    """
    few = images[:2]
    depth = len(blocks)
    ids = _steps(depth)
    first = ExecutionOrder(ids, depth)

    def trace(order: ExecutionOrder, shared: Shared | None = None, *, batch: Tensor = few) -> Trace:
        entries = order_entries(blocks, order, run=PLAIN, shared=shared)
        return trace_forward(stack, entries, forward=lambda: forward(batch))

    def run_one() -> Trace:
        return trace(first, batch=few[:1])

    def compare() -> Beginnings | None:
        same = True
        # Two lengths, as blocks may do something at every second position; the end repeats the
        # first block, which may have kept something.
        for shares in (len(ids) // 2, len(ids) // 2 + 1):
            end = (*ids[shares:][:0:-1], ids[0])
            second = ExecutionOrder((*ids[:shares], *end), depth)
            shared = Shared(kept=shares)
            alone = trace(second)
            if not alone.inputs:
                return None
            whole = trace(first, shared)
            shared.reused = shares
            shared.kept = 0
            together = trace(second, shared)
            wanted = (*alone.outputs, alone.answer)
            got = (*together.outputs, together.answer)
            for a, b in zip(wanted, got, strict=True):
                same &= len(a) == len(b) and all(map(are_equal, a, b))
        return Beginnings(
            shared=same,
            bytes_per_image=alone.inputs[0][0].nbytes // len(few),
            reads_batch=_reads_batch(whole, partial(attempt, model, stack, run=run_one)),
        )

    def judge() -> Beginnings:
        verdict = attempt(model, stack, run=compare)
        if verdict is None:
            raise unused_stack(model)
        if isinstance(verdict, Beginnings):
            return verdict
        # The backbone runs its blocks in parts, so that there is no whole output to share, or it
        # cannot run such orders or so few images. An error of the call itself is the caller's.
        with trial_conditions(model, stack):
            cause_of(verdict, partial(run_plain, stack, blocks, forward=lambda: forward(images)))
        return Beginnings(shared=False, bytes_per_image=0)

    kind = ("beginnings", *kind_of_call(model, stack, arguments=images, samples=len(images)))
    # Found once: what has many orders forgets before it begins.
    verdict: Beginnings = verdict_on(model, stack, kind=kind, find_out=judge, tries_again=False)
    return verdict


def _reads_batch(both: Trace, run_first: Callable[[], Trace | Exception]) -> bool:
    """Whether the first of two images gets another answer alone than beside the second one."""
    alone = run_first()
    if isinstance(alone, Exception):  # statistics of a single image, for example
        return True
    for answer, single in zip(both.answer, alone.answer, strict=True):
        if answer.dim() and len(answer) == 2 and not are_close(answer[:1], single):
            return True
    return False


def _steps(depth: int) -> tuple[int, ...]:
    """The blocks in sequence, at least three: of fewer steps, no two orders begin alike and end in
    another way, and the mean of two states is the last one if a sample waits for one.
    """
    return tuple(place % depth for place in range(max(depth, 3)))


# --- an order per sample --------------------------------------------------------------------------


def sample_axes(
    module: nn.Module,
    stack: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    arguments: Any,
    samples: int,
    forward: Callable[[Any], Any],
    uneven: bool,
    exits: bool,
    last: int,
) -> Axes:
    """Where the samples lie in the arguments and outputs of blocks, if each may have its own order.

    `forward(arguments)` calls `module` for `samples` samples. `uneven`: orders have several
    lengths; `exits`: states leave early, and pass through the `last` blocks. Raises `StackError`
    with the reason if samples do not get what they get alone.
    """

    def trace(entries: Sequence[Call], count: int) -> Trace:
        return trace_forward(
            stack,
            entries,
            forward=lambda: forward(samples_of(arguments, samples=samples, count=count)),
        )

    def compare(uneven: bool) -> Axes | str | None:
        depth = len(blocks)
        ids = _steps(depth)
        first = ExecutionOrder(ids, depth)
        second = ExecutionOrder((*ids[1:], ids[0])[: len(ids) - uneven], depth)
        small = trace(order_entries(blocks, first, run=PLAIN), 2)
        large = trace(order_entries(blocks, first, run=PLAIN), 3)
        if not small.inputs:
            return None
        inputs = _axes(small.inputs, large.inputs)
        outputs = _axes(small.outputs, large.outputs)
        states = {axis[0] for axis in (*inputs, *outputs)}
        state = states.pop()
        if states or state is None:
            return "the states at its blocks do not have their samples on one axis"
        axes = Axes(state, inputs, outputs)
        other = trace(order_entries(blocks, second, run=PLAIN), 2)
        both = _together(trace, blocks, [first, second], axes=axes)
        if both is None:
            return _WHY
        if exits and not _leave_early(trace, blocks, [first, second], axes=axes, last=last):
            return _WHY
        for row, alone in enumerate((small, other)):
            if not _same_row(alone, both, row=row, axes=axes):
                return _WHY
        return axes

    def judge(uneven: bool) -> Axes | str:
        # A backbone may count its blocks, need a state of each, or pack its samples.
        verdict = attempt(module, stack, run=partial(compare, uneven))
        if verdict is None:
            raise unused_stack(module)
        if not isinstance(verdict, Exception):
            return verdict
        with trial_conditions(module, stack):
            return cause_of(
                verdict, partial(run_plain, stack, blocks, forward=lambda: forward(arguments))
            )

    kind = (
        "samples",
        exits and (last,),
        *kind_of_call(module, stack, arguments=arguments, samples=samples),
    )
    # Orders of several lengths ask for more, so that one trial answers for both where it succeeds.
    for asks_most in (True, False) if not (uneven or exits) else (True,):
        verdict = verdict_on(
            module,
            stack,
            kind=(asks_most, *kind),
            find_out=partial(judge, asks_most),
            tries_again=True,
        )
        if isinstance(verdict, Axes):
            return verdict
    lengths = " with orders of several lengths, or an exit," if uneven or exits else ""
    raise StackError(
        f"{type(module).__name__} cannot run an order per sample{lengths} in one batch: {verdict}",
        hint="use one order for the whole batch"
        + (", or orders of one length without an exit" if lengths else "")
        + "; layershuffle.Method.loss runs such orders one after the other",
    )


_Trial = Callable[[Sequence[Call], int], Trace]  # runs entries on that many samples


def _together(
    trace: _Trial,
    blocks: Sequence[nn.Module],
    orders: list[ExecutionOrder],
    *,
    axes: Axes,
    exit_after: int | None = None,
    last: int = 0,
) -> Trace | None:
    """Two samples along `orders` in one batch; `None` if their states do not fit together."""
    entries = sample_entries(blocks, orders, run=PLAIN, axes=axes, exit_after=exit_after, last=last)
    try:
        return trace(entries, 2)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # of the backbone or of a block, about shapes
        return None


def _leave_early(
    trace: _Trial,
    blocks: Sequence[nn.Module],
    orders: list[ExecutionOrder],
    *,
    axes: Axes,
    last: int,
) -> bool:
    """Whether the answers at an exit after one step are those of the orders cut there, which go on
    with the `last` blocks."""
    depth = len(blocks)
    if last:
        ends = range(depth - last, depth)
        going_on: list[ExecutionOrder] = []
        for order in orders:
            drawn = [block for block in order if block not in ends]
            going_on.append(ExecutionOrder((*drawn, *ends), depth))
        orders = going_on
    cut = [order.beginning(1, last=last) for order in orders]
    both = _together(trace, blocks, orders, axes=axes, exit_after=1, last=last)
    early = _together(trace, blocks, cut, axes=axes)
    if both is None or early is None:
        return False
    rows = [answer for answer in both.answer if answer.dim() and len(answer) == 4]
    return all(are_close(answer, row[2:]) for answer, row in zip(early.answer, rows, strict=False))


def _axes(
    small: list[list[Tensor]], large: list[list[Tensor]]
) -> tuple[tuple[int | None, ...], ...]:
    """The axis of the samples of every tensor, from forwards with two and with three samples."""
    positions: list[tuple[int | None, ...]] = []
    for few, more in zip(small, large, strict=True):
        positions.append(tuple(_axis(a.shape, b.shape) for a, b in zip(few, more, strict=True)))
    return tuple(positions)


def _axis(few: torch.Size, more: torch.Size) -> int | None:
    changing = [axis for axis in range(len(few)) if few[axis] != more[axis]]
    if not changing:
        return None
    axis = changing[0]
    if len(changing) > 1 or (few[axis], more[axis]) != (2, 3):
        raise StackError(
            f"The backbone folds its samples into an axis of other things (a tensor of shape "
            f"{tuple(few)} for two samples), so they cannot run along orders of their own",
            hint="use one order for the whole batch",
        )
    return axis


def _same_row(alone: Trace, both: Trace, *, row: int, axes: Axes) -> bool:
    """Whether sample `row` has the same states in both traces, up to the rounding of kernels."""
    for a, b in zip(alone.outputs, both.outputs, strict=False):
        if not are_close(a[0].select(axes.state, row), b[0].select(axes.state, row)):
            return False
    for single, batch in zip(alone.answer, both.answer, strict=True):
        is_per_sample = single.dim() and len(single) == 2 and single.is_floating_point()
        if is_per_sample and not are_close(single[row], batch[row]):
            return False
    return True
