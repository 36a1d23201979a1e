"""A different execution order for every sample of one batch.

Samples with the same order stay together as one group. At each position the groups that need the
same block next are joined, and every block runs once: the same FLOPs as one shared order. A group
that shares its block with no other at a position is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layershuffle.errors import UsageError
from layershuffle.machine import to_device
from layershuffle.orders import ExecutionOrder
from layershuffle.residual import States, added

BlockCall = Callable[[int, int, Tensor, "tuple[int, ...] | None"], Tensor]


def run_grouped(state: Tensor, orders: Sequence[ExecutionOrder], *, call: BlockCall) -> Tensor:
    """`state` `[batch, ...]` after sample i ran along `orders[i]`.

    `call(block, position, chunk, rows)` runs one block on the samples `rows`. Orders may differ in
    length. Equal to running the samples one by one up to the rounding of batched kernels. Raises
    `UsageError` unless there is one order per sample.
    """
    if len(orders) != state.shape[0]:
        raise UsageError(
            f"{len(orders)} orders were given for a batch of {state.shape[0]} samples",
            hint="give one order per sample, or a single order for the whole batch (also where the "
            "blocks do not take one row per sample)",
        )
    rows_of: dict[ExecutionOrder, list[int]] = {}
    for row, order in enumerate(orders):
        rows_of.setdefault(order, []).append(row)
    # Rows of one group lie together from here on, so that joining and splitting groups are slices.
    arranged = [row for rows in rows_of.values() for row in rows]
    chunks = torch.split(_rearranged(state, arranged), list(map(len, rows_of.values())))
    groups = [
        _Group(order, rows, state if len(chunks) == 1 else chunk)
        for (order, rows), chunk in zip(rows_of.items(), chunks, strict=True)
    ]
    # As many block runs as with one order, but in smaller calls: 2.7 times the time at width 64,
    # 1.2 times at width 192 (docs/log.md).
    for position in range(max(map(len, rows_of))):
        for block, members in _by_next_block(groups, position).items():
            parts = [group.read(position) for group in members]
            # torch.cat copies even a single tensor; a group that is alone runs where it lies.
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            rows = tuple(row for group in members for row in group.rows)
            out = call(block, position, joined, rows)
            outs = [out] if len(parts) == 1 else torch.split(out, list(map(len, parts)))
            for group, part in zip(members, outs, strict=True):
                group.advance(position, part)
    # The inverse permutation, computed on the host: a GPU has nothing to send back.
    original = sorted(range(len(arranged)), key=arranged.__getitem__)
    return _rearranged(torch.cat([group.state for group in groups]), original)


class _Group:
    """The samples of one order: their rows in the batch, and how far they came."""

    def __init__(self, order: ExecutionOrder, rows: Sequence[int], state: Tensor) -> None:
        self.steps, self.rows, self.state = order.steps, rows, state
        self._older, self._read = States(order), state

    def read(self, position: int) -> Tensor:
        """The state that the step at `position` reads, before it runs."""
        self._older.keep(position, self.state)
        version = self.steps[position][1]
        newest = version == position
        self._read = self.state if newest else self._older.read(version, position=position)
        return self._read

    def advance(self, position: int, out: Tensor) -> None:
        """The step at `position` made `out` of what it read."""
        newest = self.steps[position][1] == position
        self.state = out if newest else added(self.state, read=self._read, out=out)


def _by_next_block(groups: Sequence[_Group], position: int) -> dict[int, list[_Group]]:
    """The groups that run a block at `position`, by that block, ascending."""
    members: dict[int, list[_Group]] = {}
    for group in groups:
        if position < len(group.steps):
            members.setdefault(group.steps[position][0], []).append(group)
    # Sorted, so that kernels run in the same sequence whichever sample comes first.
    return dict(sorted(members.items()))


def _rearranged(state: Tensor, rows: Sequence[int]) -> Tensor:
    """`state[rows]`; the same tensor where nothing moves."""
    if all(row == place for place, row in enumerate(rows)):
        return state
    return state.index_select(0, to_device(torch.tensor(rows), state.device))
