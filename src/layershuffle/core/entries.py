"""What the stack hands to the backbone in place of its blocks: one entry per position.

The backbone's own forward is the only loop over blocks, so whatever it does between them
(read-outs, gates, a condition, its own autocast) is done by its own code. An entry runs its block
with the hooks around it. It may also return what an earlier order with the same beginning computed,
add its block's residual to a newer state (rounds), or run every sample of the batch by the block
that its own order has at this position. `order_entries` builds the entries of one order,
`sample_entries` those of an order per sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
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


def state_first(module: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any], dict[str, Any]]:
    """The arguments of a call such as block(x=x) with the state first; `module` is the block.

    Raises `StackError` if there is no state among them.
    """
    name = next(iter(inspect.signature(module.forward).parameters), "")
    if name not in kwargs:
        raise missing_state(module, name)
    others = {key: value for key, value in kwargs.items() if key != name}
    return (kwargs[name],), others


class Entry:
    """Stands for the block `module`: a backbone may read its attributes and call it as a whole.

    `call(state, *args, **kwargs)` is what a call does. `one_block`: the block that runs is
    `module`, so its weights may be read.
    """

    def __init__(self, module: Any, call: Call, *, one_block: bool = True) -> None:
        # In place of another entry, as much may be read of the block as before.
        inner = vars(module) if type(module) is Entry else {}
        self._module = inner.get("_module", module)
        self._call = call
        self._one_block: bool = inner.get("_one_block", one_block)

    @property  # type: ignore[misc]  # that of objects can be set too
    def __class__(self) -> type:
        """The block's class, for `isinstance(block, Block)` and `nn.Sequential(*blocks)`."""
        # torch.compile reads it from objects that have no attributes yet.
        module = vars(self).get("_module")
        return Entry if module is None else module.__class__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the entry on the state among the arguments; returns what the block returns."""
        if not args:
            args, kwargs = state_first(self._module, kwargs)
        return self._call(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Does what a call does, for backbones that call `block.forward` directly."""
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
        entries: list[Call] = []
        for position, block in enumerate(order):
            call = block_call(blocks[block], Step(position, block), run=run)
            entries.append(Entry(blocks[block], call))
        return entries
    read_later = order.read_later
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
    forward = _GroupedForward(blocks, orders, run=run, axes=axes, exit_after=exit_after, last=last)
    return [forward.entry(position) for position in range(forward.longest)]


class _GroupedForward:
    """One forward of a batch in which samples have orders of their own.

    The samples of one order are a group. At a position a group is at one block, and all groups that
    are at the same block there run through it together.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        orders: Sequence[ExecutionOrder],
        *,
        run: Run,
        axes: Axes,
        exit_after: int | None,
        last: int,
    ) -> None:
        self._blocks = blocks
        self._orders = orders
        self._run = run
        self._axes = axes
        self._last = last
        # The order of each group, and the rows of its samples in the batch.
        groups: dict[ExecutionOrder, list[int]] = {}
        for row, order in enumerate(orders):
            groups.setdefault(order, []).append(row)
        self._groups = list(groups)
        self._rows = list(groups.values())
        self.longest = max(map(len, groups))
        self._read_later: set[int] = set()
        for order in groups:
            self._read_later.update(order.read_later)
        # The older states. A replay by gradient checkpointing leaves them as the forward set them.
        self._states: dict[int, Tensor] = {}
        self._exit = None if exit_after is None else _Exit(orders, steps=exit_after, last=last)

    def entry(self, position: int) -> Entry:
        """The entry at `position`: it runs every group by the block that its order has there.

        Raises `StackError`, when called, for a batch of another size than there are orders.
        """
        # Block -> the groups that run it here, each with the version of the state that it reads.
        moves: dict[int, list[tuple[int, int]]] = {}
        older: set[int] = set()
        for group, order in enumerate(self._groups):
            if position < len(order):
                block, version = order.steps[position]
                moves.setdefault(block, []).append((group, version))
                if version != position:
                    older.add(version)
        reads_others = bool(older) or self._exit is not None
        replays = Replays()
        axis = self._axes.state

        def call(state: Any, *args: Any, **kwargs: Any) -> Any:
            replays.refuse_reentrant(
                "the state of an exit, or an older one, off from its blocks", cut=reads_others
            )
            samples = tensor_of(state).shape[axis]
            if samples != len(self._orders):
                raise other_count(self._orders, samples)
            if position in self._read_later:
                self._states.setdefault(position, state.clone())
            parts = {position: _split(state, self._rows, axis)}
            for version in older:
                parts[version] = _split(self._states[version], self._rows, axis)
            states = [*parts[position]]
            outs: dict[tuple[int, ...], Any] = {}
            # Sorted, so that the sequence of kernels does not depend on which sample comes first.
            for block, members in sorted(moves.items()):
                self._run_block(
                    Step(position, block),
                    members,
                    parts=parts,
                    states=states,
                    outs=outs,
                    arguments=(args, kwargs),
                )
            result = _joined(states, self._rows, axis)
            if self._exit is not None:
                result = self._leave(self._exit, position, result, arguments=(args, kwargs))
            outputs = self._axes.at(position)[1]
            return _combined_output(outs, result, axes=outputs, samples=samples)

        return Entry(self._blocks[0], call, one_block=False)

    def _run_block(
        self,
        step: Step,
        members: Sequence[tuple[int, int]],
        *,
        parts: dict[int, Sequence[Tensor]],
        states: list[Tensor],
        outs: dict[tuple[int, ...], Any],
        arguments: Any,
    ) -> None:
        """Run the block of `step` on the groups `members`, each with the version that it reads.

        `parts` are the states by version and group. The new state of each group goes to `states`,
        and what the block returned for the rows of the batch to `outs`.
        """
        axis = self._axes.state
        read: list[Tensor] = []
        sizes: list[int] = []
        rows: list[int] = []
        for group, version in members:
            read.append(parts[version][group])
            sizes.append(len(self._rows[group]))
            rows += self._rows[group]
        here = tuple(rows)
        joined = read[0] if len(read) == 1 else torch.cat(read, axis)
        if len(read) == 1 and members[0][1] != step.position:
            # Other steps still have to read it, and a block may write into its input.
            joined = joined.clone()
        out = self._call(replace(step, rows=here), joined, arguments)
        outs[here] = out
        news = _parts(state_of(out), sizes, axis)
        for (group, version), old, new in zip(members, read, news, strict=True):
            newest = version == step.position
            states[group] = new if newest else states[group] + (new - old)

    def _call(self, step: Step, state: Tensor, arguments: Any) -> Any:
        """What the block of `step` returns for `state` and its part of the other arguments."""
        inputs = self._axes.at(step.position)[0]
        rows = step.rows or ()
        args, kwargs = _cut(arguments, rows, axes=inputs[1:], samples=len(self._orders))
        return block_call(self._blocks[step.block], step, run=self._run)(state, *args, **kwargs)

    def _leave(self, exit_: _Exit, position: int, result: Tensor, *, arguments: Any) -> Tensor:
        """Note what is at the exit, given all states `result` after `position`.

        Returns `result`, at the end of all orders with the states of the exit behind it.
        """
        axis = self._axes.state
        passed = position - exit_.steps  # of the last blocks, by the states of the exit
        if passed == -1:
            exit_.begin(result, axis)
        elif 0 <= passed < self._last and exit_.rows:
            block = len(self._blocks) - self._last + passed
            step = Step(position, block, exit_.rows, early=True)
            exit_.go_on(passed, self._call(step, exit_.state(passed), arguments))
        if position + 1 == self.longest:
            return torch.cat([result, exit_.answer(result, axis)], axis)
        return result


class _Exit:
    """The states that go to the head early: those after a number of `steps`.

    With `last` blocks that keep their place, the states pass through these first. `rows` are the
    samples that have steps left between; for the others, the exit is the end of their order.
    A replay by gradient checkpointing computes the states again, and leaves what the forward noted.
    """

    def __init__(self, orders: Sequence[ExecutionOrder], *, steps: int, last: int) -> None:
        self.steps = steps
        here: list[int] = []
        others: list[int] = []
        for row, order in enumerate(orders):
            # Without last blocks, a sample whose order has ended waits, and is at the exit as well.
            goes_on = not last or len(order) > steps + last
            (here if goes_on else others).append(row)
        self.rows = tuple(here)
        self.others = tuple(others)
        self._last = last
        # Those at the exit, then those after each of the last blocks.
        self._states: list[Tensor] = []

    def begin(self, state: Tensor, axis: int) -> None:
        """Note the state after the steps, given that of all samples."""
        early = _rows(state, self.rows, axis)
        if not self._states:
            self._states.append(early)

    def go_on(self, count: int, out: Any) -> None:
        """Note what the last block number `count` returned."""
        if len(self._states) == count + 1:
            self._states.append(state_of(out))

    def state(self, count: int) -> Tensor:
        """The state of `rows` after `count` of the last blocks.

        Raises `StackError` if the backbone has not come so far.
        """
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
    if [*chain.from_iterable(rows)] == list(range(state.shape[axis])):
        return _parts(state, list(map(len, rows)), axis)
    return [_rows(state, group, axis) for group in rows]


def _parts(state: Tensor, sizes: list[int], axis: int) -> Sequence[Tensor]:
    # A part that is the whole must not become a view, for which a block is compiled once more.
    return [state] if len(sizes) == 1 else torch.split(state, sizes, axis)


def _joined(parts: Sequence[Tensor], rows: Sequence[Sequence[int]], axis: int) -> Tensor:
    """One tensor of the samples in their own order; part i holds the samples `rows[i]`."""
    ordered: list[Tensor] = []
    arranged: list[int] = []
    for several, part in sorted(zip(rows, parts, strict=True), key=lambda item: item[0][0]):
        ordered.append(part)
        arranged += several
    joined = parts[0] if len(parts) == 1 else torch.cat(ordered, axis)
    return _rows(joined, sorted(range(len(arranged)), key=arranged.__getitem__), axis)


def _rows(value: Tensor, rows: Sequence[int], axis: int) -> Tensor:
    """The samples `rows` of a tensor; the same tensor if these are all, in their order."""
    if list(rows) == list(range(value.shape[axis])):
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
    values: list[Any] = []
    later_axes = iter(axes[1:])
    for several in zip(*(out[1:] for out in outs.values()), strict=True):
        axis = next(later_axes, None) if isinstance(several[0], Tensor) else None
        if axis is not None and sum(map(len, outs)) == samples:
            values.append(_joined(several, list(outs), axis))
        elif len(several) == 1 or all(value is None for value in several):
            values.append(several[0])
        else:
            raise refused_value(several[0])
    return type(form)((state, *values))
