"""Blocks side by side and second passes, as a swarm runs them without a barrier. No torch.

A request in free order has up to `parallel` visits in flight. Each carries the newest state at its
start, and its residual is added when it arrives. So every block reads a state that is up to
`parallel - 1` steps old. If blocks are missing, the others run again in another pass, which
begins when the pass before has ended. Places that share their weights never run side by side,
because both would add the same to the same state.

The steps that ran form an order with versions (`core.orders`). Its `Cell` selects the
measured accuracy that belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layershuffle.core.orders import ExecutionOrder

VersionedStep = tuple[int, int]
"""A block, and the version of the state that it reads."""


UNEXPLAINED = 1 << 16
"""`Cell.parallel` of answers that are too late for any number of visits in flight."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of answer: `kept` blocks, each run `passes` times, with `parallel` in flight."""

    kept: int
    passes: int = 1
    parallel: int = 1


@dataclass(frozen=True, slots=True)
class Way:
    """How a request runs its blocks: the number of visits in flight and of passes."""

    parallel: int = 1
    passes: int = 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """How requests in free order run.

    `ways`: by the number of reachable blocks; `otherwise`: the default. `max_age`: the largest age,
    in versions, of a state whose answer still counts. `tied`: for every place the first one with
    the same weights, if places share weights and the calibration measured them apart.
    """

    ways: Mapping[int, Way] = field(default_factory=dict)
    otherwise: Way = Way()
    max_age: int = 0
    tied: tuple[int, ...] | None = None

    def way(self, reached: int) -> Way:
        """How a request runs `reached` blocks."""
        return self.ways.get(reached, self.otherwise)

    def with_twins(self, blocks: set[int]) -> set[int]:
        """`blocks`, and all places that share weights with one of them."""
        if self.tied is None:
            return blocks
        weights = {self.tied[block] for block in blocks}
        return {place for place, first in enumerate(self.tied) if first in weights}

    def different(self, blocks: Sequence[int]) -> int:
        """The number of different weights among `blocks`: no more can be in flight at once."""
        return len(blocks if self.tied is None else {self.tied[block] for block in blocks})


QUEUE = Rounds()
"""One block after the other, each once; every block reads the newest state."""


def overlapped(
    blocks: Sequence[int], cell: Cell, *, depth: int, tied: Sequence[int] | None = None
) -> ExecutionOrder:
    """The first `cell.kept` of `blocks`, run as `cell` describes, if all visits take equally long.

    `tied` as in `Rounds`: a place whose weights are in flight lets others go first, and waits if
    there are none.
    """
    weights = range(depth) if tied is None else tied
    ran: list[int] = []
    versions: list[int] = []
    for _ in range(cell.passes):
        begin, left = len(ran), list(blocks[: cell.kept])
        while left:
            version = max(begin, len(ran) + 1 - cell.parallel)
            under_way = [weights[block] for block in ran[version:]]
            block = next((block for block in left if weights[block] not in under_way), left[0])
            if weights[block] in under_way:
                version = len(ran) - under_way[::-1].index(weights[block])
            left.remove(block)
            ran.append(block)
            versions.append(version)
    return ExecutionOrder(tuple(ran), depth, tuple(versions))


def beside_twins(order: ExecutionOrder, tied: Sequence[int]) -> bool:
    """Whether a step of `order` reads a state from before a step with the same weights."""
    ran = [tied[block] for block in order]
    return any(ran[at] in ran[version:at] for at, (_, version) in enumerate(order.steps))


def late_last(blocks: Sequence[int], age: int, *, depth: int) -> ExecutionOrder:
    """All of `blocks` one after the other, but the last one reads a state `age` versions old."""
    last = len(blocks) - 1
    return ExecutionOrder(tuple(blocks), depth, (*range(last), last - age))


def cell_of(steps: Sequence[VersionedStep]) -> Cell:
    """The cell of an answer with these steps (at least one).

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


def cell_of_named(order: ExecutionOrder) -> Cell | None:
    """The cell of steps that a client named; `None` unless they are whole passes through their
    blocks, because nothing else is measured.

    The age of the oldest state counts, not the sum over all steps. In rounds of n blocks it equals
    that of n blocks in flight; the other states are newer, but the accuracy is the same.
    """
    kept, steps = len(set(order)), order.steps
    passes = [order.blocks[at : at + kept] for at in range(0, len(order), kept)]
    if any(len(set(blocks)) < kept for blocks in passes):
        return None
    oldest = max(position - version for position, (_, version) in enumerate(steps))
    # States older than a whole pass are not measured.
    return Cell(kept, len(passes), oldest + 1 if oldest < kept else UNEXPLAINED)
