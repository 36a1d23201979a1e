"""Balanced orders: the rows of Latin squares, so that few orders fill every (block, position).

Every block stands at every position in exactly one row. The squares are E. J. Williams' (1949):
with an even number of blocks every block also follows every other one exactly once, so that no
block always sees the output of the same predecessor. A random relabelling of the blocks makes every
single row a uniform permutation.
"""

from __future__ import annotations

from layershuffle.draws import Stream
from layershuffle.orders import ExecutionOrder


def balanced_order(depth: int, index: int, *, seed: int) -> ExecutionOrder:
    """Order number `index` of an endless sequence; each `depth` of them make one Latin square."""
    square, row = divmod(index, depth)
    blocks = Stream(seed, square).shuffled(range(depth))
    # 0, 1, depth - 1, 2, depth - 2, ...: neighbours differ by every distance once.
    zigzag = ((k + 1) // 2 if k % 2 else depth - k // 2 for k in range(depth))
    return ExecutionOrder(tuple(blocks[(step + row) % depth] for step in zigzag), depth)


def balanced_orders(depth: int, *, first: int, count: int, seed: int) -> list[ExecutionOrder]:
    """Orders number `first` to `first + count - 1` of that sequence."""
    return [balanced_order(depth, index, seed=seed) for index in range(first, first + count)]
