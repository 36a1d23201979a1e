"""Blocks side by side and second passes, as a swarm runs them without a barrier. No torch.

A request has up to `parallel` visits in flight. Each carries the newest state at its
start, and its residual is added when it arrives. So every block reads a state that is up to
`parallel - 1` steps old. If blocks are missing, the others run again in another pass, which
begins when the pass before has ended.

The steps that ran form an order with versions (`core.orders`). Its `Cell` selects the
measured accuracy that belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layershuffle.core.orders import ExecutionOrder

UNEXPLAINED = 1 << 16
"""`Cell.parallel` of answers that are too late for any number of visits in flight."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of answer: `kept` blocks, each run `passes` times, with `parallel` in flight."""

    kept: int
    passes: int = 1
    parallel: int = 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """How requests run: as the cell of so many reachable blocks says.

    `cells`: by the number of blocks; all others run one after the other, each once. `max_age`: the
    largest age, in versions, of a state whose answer still counts.
    """

    cells: Mapping[int, Cell] = field(default_factory=dict)
    max_age: int = 0

    def cell(self, reached: int) -> Cell:
        """How a request runs `reached` blocks."""
        return self.cells.get(reached, Cell(reached))


QUEUE = Rounds()
"""One block after the other, each once; every block reads the newest state."""


def overlapped(blocks: Sequence[int], cell: Cell, *, depth: int) -> ExecutionOrder:
    """The first `cell.kept` of `blocks`, run as `cell` describes, if all visits take equally long.

    Each pass begins with the newest state, so that no block runs twice on one version.
    """
    begins = [at // cell.kept * cell.kept for at in range(cell.passes * cell.kept)]
    versions = tuple(max(begin, at + 1 - cell.parallel) for at, begin in enumerate(begins))
    return ExecutionOrder(tuple(blocks[: cell.kept]) * cell.passes, depth, versions)


def late_last(blocks: Sequence[int], age: int, *, depth: int) -> ExecutionOrder:
    """All of `blocks` one after the other, but the last one reads a state `age` versions old."""
    last = len(blocks) - 1
    return ExecutionOrder(tuple(blocks), depth, (*range(last), last - age))


def cell_of(steps: Sequence[tuple[int, int]]) -> Cell:
    """The cell of an answer with these steps (at least one): block, and version that it read.

    `parallel` is the smallest number of blocks in flight at which the ages of the states, summed
    over all steps, are at least those of this answer. A pass counts once all of its blocks ran.
    """
    kept = len({block for block, _ in steps})
    passes, ran = 0, set[int]()
    for block, _ in steps:
        ran.add(block)
        if len(ran) == kept:
            passes, ran = passes + 1, set()
    age = sum(position - version for position, (_, version) in enumerate(steps))
    for parallel in range(1, kept + 1):
        if age <= _age(len(steps), kept=kept, parallel=parallel):
            return Cell(kept, passes, parallel)
    # No number of blocks in flight explains such old states, and no calibration has such a cell.
    return Cell(kept, passes, UNEXPLAINED)


def _age(steps: int, *, kept: int, parallel: int) -> int:
    """Sum of the ages of the states over `steps` steps with `parallel` blocks always in flight."""
    return sum(min(position % kept, parallel - 1) for position in range(steps))
