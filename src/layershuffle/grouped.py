"""A different execution order for every sample of one batch.

Samples with the same order stay together as one group. At each position the groups that need the
same block next are joined, and every block runs once: the same FLOPs as one shared order. A group
that shares its block with no other at a position is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from layershuffle.errors import UsageError
from layershuffle.machine import to_device

BlockCall = Callable[[int, int, Tensor, "tuple[int, ...] | None"], Tensor]


def run_grouped(state: Tensor, orders: Sequence[tuple[int, ...]], *, call: BlockCall) -> Tensor:
    """`state` `[batch, ...]` after sample i ran through the blocks `orders[i]`.

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
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, order in enumerate(orders):
        groups.setdefault(order, []).append(row)
    # Rows of one group lie together from here on, so that joining and splitting groups are slices.
    arranged = [row for rows in groups.values() for row in rows]
    chunks = _chunks(_rearranged(state, arranged), groups)
    # As many block runs as with one order, but in smaller calls: 2.7 times the time at width 64,
    # 1.2 times at width 192 (docs/log.md).
    for position in range(max(map(len, groups))):
        for block, members in _by_next_block(groups, position).items():
            parts = [chunks[order] for order in members]
            # torch.cat copies even a single tensor; a group that is alone runs where it lies.
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            rows = tuple(row for order in members for row in groups[order])
            out = call(block, position, joined, rows)
            chunks |= _chunks(out, {order: groups[order] for order in members})
    # The inverse permutation, computed on the host: a GPU has nothing to send back.
    original = sorted(range(len(arranged)), key=arranged.__getitem__)
    return _rearranged(torch.cat(list(chunks.values())), original)


def _chunks(
    state: Tensor, groups: Mapping[tuple[int, ...], Sequence[int]]
) -> dict[tuple[int, ...], Tensor]:
    """The part of every group, where the groups lie one behind the other in `state`."""
    if len(groups) == 1:
        return dict.fromkeys(groups, state)
    parts = torch.split(state, [len(rows) for rows in groups.values()])
    return dict(zip(groups, parts, strict=True))


def _by_next_block(
    groups: Mapping[tuple[int, ...], Sequence[int]], position: int
) -> dict[int, list[tuple[int, ...]]]:
    """The orders that run a block at `position`, by that block, ascending."""
    members: dict[int, list[tuple[int, ...]]] = {}
    for order in groups:
        if position < len(order):
            members.setdefault(order[position], []).append(order)
    # Sorted, so that kernels run in the same sequence whichever sample comes first.
    return dict(sorted(members.items()))


def _rearranged(state: Tensor, rows: Sequence[int]) -> Tensor:
    """`state[rows]`; the same tensor where nothing moves."""
    if all(row == place for place, row in enumerate(rows)):
        return state
    return state.index_select(0, to_device(torch.tensor(rows), state.device))
