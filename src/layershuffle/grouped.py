"""A different execution order for every sample of one batch.

At each position the samples are sorted by the block they need next, and every block runs once on
its group: the same FLOPs as one shared order, one gather per position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from layershuffle.errors import UsageError

BlockCall = Callable[[int, int, Tensor, "tuple[int, ...] | None"], Tensor]
_DONE = -1


def run_grouped(state: Tensor, orders: Sequence[tuple[int, ...]], *, call: BlockCall) -> Tensor:
    """`state` `[batch, ...]` after sample i ran through the blocks `orders[i]`.

    `call(block, position, chunk, rows)` runs one block on the samples `rows`. Orders may differ in
    length. Equal to running the samples one by one up to the rounding of batched kernels. Raises
    `UsageError` unless there is one order per sample.
    """
    if len(orders) != state.shape[0]:
        raise UsageError(
            f"{len(orders)} orders were given for a batch of {state.shape[0]} samples",
            hint="give one order per sample, or a single order for the whole batch",
        )
    rows = list(range(len(orders)))  # rows[k] = the sample that stands in row k now
    for position in range(max(map(len, orders))):
        arranged = sorted(rows, key=lambda row: (_next_block(orders[row], position), row))
        state, rows = _arrange(state, rows, arranged), arranged
        groups = [
            (block, tuple(group))
            for block, group in groupby(rows, key=lambda row: _next_block(orders[row], position))
        ]
        chunks = torch.split(state, [len(group) for _, group in groups])
        state = torch.cat(
            [
                chunk if block == _DONE else call(block, position, chunk, group)
                for (block, group), chunk in zip(groups, chunks, strict=True)
            ]
        )
    return _arrange(state, rows, sorted(rows))


def _next_block(order: tuple[int, ...], position: int) -> int:
    return order[position] if position < len(order) else _DONE


def _arrange(state: Tensor, rows: list[int], wanted: list[int]) -> Tensor:
    if rows == wanted:
        return state
    place = {row: k for k, row in enumerate(rows)}
    return state.index_select(0, torch.tensor([place[row] for row in wanted], device=state.device))
