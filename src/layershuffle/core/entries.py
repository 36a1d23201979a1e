"""What the stack hands to the backbone in place of its blocks: one entry per position.

The backbone's own forward is the only loop over blocks, so whatever it does between them
(read-outs, gates, a condition, its own autocast) is done by its own code. An entry runs its block
with the hooks around it. It may also return what an earlier order with the same beginning computed,
add its block's residual to a newer state (rounds), or run every sample of the batch by the block
that its own order has at this position. `order_entries` builds the
entries of one order, `sample_entries` those of an order per sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layershuffle.core.checks.blocks import (
    changed_shape,
    missing_exit,
    missing_state,
    missing_version,
    other_count,
    refused_part,
    refused_value,
)
from layershuffle.core.hooks import Step
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.runs import Replays, Run, in_backward
from layershuffle.core.tensors import map_tensors, state_of, tensor_of, to_device

Call = Callable[..., Any]
"""Called as a block is: the state, then whatever else the backbone passes to its blocks."""


class Entry:
    """Stands for the block `module`: a backbone may read its attributes and call it as a whole.

    `call(state, *args, **kwargs)` is what a call does. `one_block`: the block that runs is
    `module`, so its weights may be read.
    """

    def __init__(self, module: Any, call: Call, *, one_block: bool = True) -> None:
        # In place of another entry, as much may be read of the block as before.
        inner = vars(module) if type(module) is Entry else {}
        self._module, self._call = inner.get("_module", module), call
        self._one_block: bool = inner.get("_one_block", one_block)

    @property  # type: ignore[misc]  # that of objects can be set too
    def __class__(self) -> type:
        """The block's class, for `isinstance(block, Block)` and `nn.Sequential(*blocks)`."""
        # torch.compile reads it from objects that have no attributes yet.
        module = vars(self).get("_module")
        return Entry if module is None else module.__class__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the entry on the state among the arguments; returns what the block returns."""
        if not args:  # as in block(x=x)
            name = next(iter(inspect.signature(self._module.forward).parameters), "")
            if name not in kwargs:
                raise missing_state(self._module, name)
            args = (kwargs.pop(name),)
        return self._call(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as a call, for backbones that call `block.forward` directly."""
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        # A call of a part would bypass the hooks around the block, or run the part of a single
        # block on samples that are at different blocks.
        if isinstance(value, nn.Module):
            return Entry(value, self._refuse, one_block=self._one_block)
        if isinstance(value, Tensor) and not self._one_block:
            self._refuse()
        own = getattr(value, "__self__", None) is self._module and not hasattr(nn.Module, name)
        return self._refuse if own else value

    def __setattr__(self, name: str, value: Any) -> None:
        # A backbone may set what its blocks share in a forward.
        if name in ("_module", "_call", "_one_block"):
            object.__setattr__(self, name, value)
        elif self._one_block:
            setattr(self._module, name, value)
        else:
            self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()
        return iter(())

    def __getitem__(self, index: object) -> Any:
        self._refuse()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise refused_part(self._module)


def block_call(block: nn.Module, step: Step, *, run: Run) -> Call:
    """`block` at a position: with the hooks of `run` around it, and recomputed if `run` says so."""
    if not run.hooks and not run.recompute:
        return block

    def compute(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = replace(step, replay=in_backward())
        for hook in run.hooks:
            state = hook.before(state, now)
        out = block(state, *args, **kwargs)
        for hook in run.hooks:
            hook.after(state_of(out), now)
        return out

    def recompute(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(state, *args, **kwargs)
        return checkpoint(compute, state, *args, use_reentrant=False, **kwargs)

    return recompute if run.recompute else compute


# --- one order for the whole batch ----------------------------------------------------------------


@dataclass
class Shared:
    """What the blocks along the last order returned, as far as the next order begins alike.

    The entries of an order return the first `reused` outputs instead of running their blocks, and
    leave the first `kept` outputs for the order after it. Orders that are run in sorted order share
    all that they can, and no more than one path of outputs is alive.
    """

    outputs: list[Any] = field(default_factory=list)
    reused: int = 0
    kept: int = 0


def order_entries(
    blocks: Sequence[nn.Module], order: ExecutionOrder, *, run: Run, shared: Shared | None = None
) -> Sequence[Call]:
    """The entries of one forward along `order`; `shared`: outputs in common with other orders.

    A step that reads an older version v of the state returns `state + (block(state_v) - state_v)`
    (core.orders).
    """
    if order.versions is None and shared is None:
        # Bare blocks, so that torch.compile and torch's hooks see no wrapper.
        if not run.hooks and not run.recompute:
            return [blocks[block] for block in order]
        steps = [Step(position, block) for position, block in enumerate(order)]
        return [
            Entry(blocks[step.block], block_call(blocks[step.block], step, run=run))
            for step in steps
        ]
    read_later = order.last_readers()
    states: dict[int, Tensor] = {}

    def entry(position: int, block: int, version: int) -> Entry:
        call = block_call(blocks[block], Step(position, block), run=run)
        replays = Replays()

        def enter(state: Any, *args: Any, **kwargs: Any) -> Any:
            # If the backbone checkpoints, the same entry runs again in the backward pass, when
            # `states` must still be those of the forward.
            if not replays.begun and position in read_later:
                # A copy, because a backbone may write into the state between its blocks.
                states[position] = tensor_of(state).clone()
            replays.refuse_reentrant("a block off from an older state", cut=version != position)
            if shared is not None and position < shared.reused:
                return shared.outputs[position]
            if version == position:
                out = call(state, *args, **kwargs)
            else:
                out = _older(call, state, states=states, version=version, others=(args, kwargs))
            if shared is not None and position < shared.kept:
                shared.outputs.append(out)
            return out

        return Entry(blocks[block], enter)

    return [entry(position, *step) for position, step in enumerate(order.steps)]


def _older(
    call: Call, state: Any, *, states: dict[int, Tensor], version: int, others: tuple[Any, Any]
) -> Any:
    """`state` plus what a block adds to version `version` of it, in the form of its output."""
    if version not in states:
        raise missing_version(version)
    read = states[version]
    # Other steps still have to read it, and a block may write into its input.
    out = call(read.clone(), *others[0], **others[1])
    added = state_of(out)
    if added.shape != read.shape:
        raise changed_shape(added, read)
    after = tensor_of(state) + (added - read)
    return after if isinstance(out, Tensor) else type(out)((after, *out[1:]))


# --- an order per sample --------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """On which axis the samples lie, for every tensor that passes in and out at a position.

    `state` is that of the state. `inputs[k]` are for the state and the other arguments at position
    k, `outputs[k]` for what a block returns; `None` for a tensor without samples. Later positions
    are as the last one.
    """

    state: int
    inputs: tuple[tuple[int | None, ...], ...]
    outputs: tuple[tuple[int | None, ...], ...]

    def at(self, position: int) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """The axes of the inputs and of the outputs at `position`."""
        place = min(position, len(self.inputs) - 1)
        return self.inputs[place], self.outputs[place]


def sample_entries(
    blocks: Sequence[nn.Module],
    orders: Sequence[ExecutionOrder],
    *,
    run: Run,
    axes: Axes,
    exit_after: int | None = None,
    last: int = 0,
) -> list[Entry]:
    """The entries of one forward in which sample i runs along `orders[i]`.

    At a position every block runs once, on the samples that need it there: the FLOPs of one shared
    order. A sample whose order has ended waits. With `exit_after` the last entry returns twice as
    many rows: the final states, then those of `order.beginning(exit_after, last=last)`, where
    `last` is the number of last blocks that keep their place in all orders.
    """
    groups: dict[ExecutionOrder, list[int]] = {}
    for row, order in enumerate(orders):
        groups.setdefault(order, []).append(row)
    longest, axis = max(map(len, groups)), axes.state
    read_later = {version for order in groups for version in order.last_readers()}
    # A replay by gradient checkpointing leaves these as the forward set them.
    states: dict[int, Tensor] = {}
    leaving = None if exit_after is None else _Exit(orders, steps=exit_after, last=last)

    def entry(position: int) -> Entry:
        # Block -> the groups that run it here, each with the version of the state that it reads.
        moves: dict[int, list[tuple[int, int]]] = {}
        for group, order in enumerate(groups):
            if position < len(order):
                block, version = order.steps[position]
                moves.setdefault(block, []).append((group, version))
        older = {version for several in moves.values() for _, version in several} - {position}
        inputs, outputs = axes.at(position)
        rows = [*groups.values()]
        reads_others = bool(older) or leaving is not None
        replays = Replays()

        def call(state: Any, *args: Any, **kwargs: Any) -> Any:
            replays.refuse_reentrant(
                "the state of an exit, or an older one, off from its blocks", cut=reads_others
            )
            samples = tensor_of(state).shape[axis]
            if samples != len(orders):
                raise other_count(orders, samples)
            if position in read_later:
                states.setdefault(position, state.clone())
            parts = {version: _split(states[version], rows, axis) for version in older}
            parts[position] = _split(state, rows, axis)
            after, outs = [*parts[position]], {}
            # Sorted, so that the sequence of kernels does not depend on which sample comes first.
            for block, members in sorted(moves.items()):
                read = [parts[version][group] for group, version in members]
                here = tuple(row for group, _ in members for row in rows[group])
                others, named = _cut((args, kwargs), here, axes=inputs[1:], samples=samples)
                run_block = block_call(blocks[block], Step(position, block, here), run=run)
                joined = read[0] if len(read) == 1 else torch.cat(read, axis)
                outs[here] = run_block(joined, *others, **named)
                sizes = [len(rows[group]) for group, _ in members]
                news = _parts(state_of(outs[here]), sizes, axis)
                for (group, version), old, new in zip(members, read, news, strict=True):
                    newest = version == position
                    after[group] = new if newest else after[group] + (new - old)
            result = _joined(after, rows, axis)
            if leaving is not None:
                beyond = position - leaving.steps
                if beyond == -1:
                    leaving.begin(result, axis)
                elif 0 <= beyond < last and leaving.rows:
                    block = len(blocks) - last + beyond
                    run_block = block_call(
                        blocks[block], Step(position, block, leaving.rows, early=True), run=run
                    )
                    cut = _cut((args, kwargs), leaving.rows, axes=inputs[1:], samples=samples)
                    leaving.go_on(beyond, run_block, cut)
                if position + 1 == longest:
                    result = torch.cat([result, leaving.answer(result, axis)], axis)
            return _combined_output(outs, result, axes=outputs, samples=samples)

        return Entry(blocks[0], call, one_block=False)

    return [entry(position) for position in range(longest)]


class _Exit:
    """The states that go to the head early: those after a number of `steps`.

    With `last` blocks that keep their place, the states pass through these first. `rows` are the
    samples that have steps left between; for the others, the exit is the end of their order.
    A replay by gradient checkpointing computes the states again, and leaves what the forward noted.
    """

    def __init__(self, orders: Sequence[ExecutionOrder], *, steps: int, last: int) -> None:
        every = range(len(orders))
        self.steps = steps
        # Without last blocks, a sample whose order has ended waits, and is at the exit as well.
        self.rows = tuple(row for row in every if not last or len(orders[row]) > steps + last)
        self.others = tuple(row for row in every if row not in self.rows)
        self._last = last
        # Those at the exit, then those after each of the last blocks.
        self._states: list[Tensor] = []

    def begin(self, state: Tensor, axis: int) -> None:
        """Note the state after the steps, given that of all samples."""
        early = _rows(state, self.rows, axis)
        if not self._states:
            self._states.append(early)

    def go_on(self, count: int, run_block: Call, arguments: Any) -> None:
        """Run the last block number `count` with its other arguments, and note the state."""
        args, kwargs = arguments
        out = state_of(run_block(self.state(count), *args, **kwargs))
        if len(self._states) == count + 1:
            self._states.append(out)

    def state(self, count: int) -> Tensor:
        """The state of `rows` after `count` of the last blocks."""
        if count >= len(self._states):
            raise missing_exit()
        return self._states[count]

    def answer(self, final: Tensor, axis: int) -> Tensor:
        """The state of every sample at the exit; `final` is that of the whole orders."""
        if not self.rows:
            return final
        early = self.state(self._last)
        if not self.others:
            return early
        return _joined([early, _rows(final, self.others, axis)], [self.rows, self.others], axis)


def _split(state: Tensor, rows: Sequence[Sequence[int]], axis: int) -> Sequence[Tensor]:
    """The samples of every group; without a copy where groups lie side by side."""
    if [row for group in rows for row in group] == list(range(state.shape[axis])):
        return _parts(state, [len(group) for group in rows], axis)
    return [_rows(state, group, axis) for group in rows]


def _parts(state: Tensor, sizes: list[int], axis: int) -> Sequence[Tensor]:
    # A part that is the whole must not become a view, for which a block is compiled once more.
    return [state] if len(sizes) == 1 else torch.split(state, sizes, axis)


def _joined(parts: Sequence[Tensor], rows: Sequence[Sequence[int]], axis: int) -> Tensor:
    """One tensor of the samples in their own order; part i holds the samples `rows[i]`."""
    ordered = sorted(zip(rows, parts, strict=True), key=lambda item: item[0][0])
    joined = parts[0] if len(parts) == 1 else torch.cat([part for _, part in ordered], axis)
    arranged = [row for several, _ in ordered for row in several]
    return _rows(joined, sorted(range(len(arranged)), key=arranged.__getitem__), axis)


def _rows(value: Tensor, rows: Sequence[int], axis: int) -> Tensor:
    """The samples `rows` of a tensor; the same tensor if these are all, in their order."""
    if len(rows) == value.shape[axis] and all(row == place for place, row in enumerate(rows)):
        return value
    return value.index_select(axis, to_device(torch.tensor(rows, dtype=torch.long), value.device))


def _cut(arguments: Any, rows: tuple[int, ...], *, axes: Sequence[int | None], samples: int) -> Any:
    """`arguments` with the part of `rows` of every tensor that has a part per sample."""
    known_axes = iter(axes)

    def cut(leaf: Tensor) -> Tensor:
        axis = next(known_axes)
        if axis is None or len(rows) == samples:
            return leaf
        return _rows(leaf, rows, axis)

    return map_tensors(arguments, cut)


def _combined_output(
    outs: dict[tuple[int, ...], Any], state: Tensor, *, axes: Sequence[int | None], samples: int
) -> Any:
    """`state` in the form of the blocks' outputs, whose other values are put together by sample."""
    form = next(iter(outs.values()))
    if not isinstance(form, tuple | list):
        return state
    values, later_axes = [], iter(axes[1:])
    for several in zip(*(out[1:] for out in outs.values()), strict=True):
        axis = next(later_axes, None) if isinstance(several[0], Tensor) else None
        if axis is not None and sum(map(len, outs)) == samples:
            values.append(_joined(several, list(outs), axis))
        elif len(several) == 1 or all(value is None for value in several):
            values.append(several[0])
        else:
            raise refused_value(several[0])
    return type(form)((state, *values))
