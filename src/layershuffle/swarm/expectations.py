"""Apply a calibration: the accuracy to expect of an answer, and how requests should run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from layershuffle.core.orders import ExecutionOrder
from layershuffle.stats import mean
from layershuffle.swarm.calibration import Calibration
from layershuffle.swarm.rounds import QUEUE, Cell, Rounds, Way

NEVER = (
    "the model was never calibrated (layershuffle swarm calibrate MODEL --data SPEC, then start "
    "again)"
)
UNMEASURED = "no calibration of such orders"
_USEFUL = 0.5  # share of the accuracy with all blocks
_POINTS = 0.5  # of top-1: largest loss side by side, and least gain of another pass
_SURE = 1.96  # half-width of a 95 % interval in standard deviations


@dataclass(frozen=True)
class Expected:
    """The accuracy in percent of answers whose blocks ran like this, from the calibration.

    `top1` is the mean over orders, and `low` and `high` are its 95 % interval. A single answer
    comes from one order of the reachable blocks, which has its own accuracy: nine of ten orders,
    and choices of blocks, lie between `orders_low` and `orders_high`. `kept` blocks ran, each
    `passes` times, `parallel` of them in flight at once. `effective`: number of independent images
    that `images` count as; null if the data have no groups of images.
    """

    top1: float
    low: float
    high: float
    orders_low: float
    orders_high: float
    kept: int
    orders: int
    images: int
    data: str
    split: str
    effective: float | None = None
    passes: int = 1
    parallel: int = 1


def expected_at(calibration: Calibration, cell: Cell) -> Expected | None:
    """The accuracy to expect of an answer in `cell`; `None` if it was not measured.

    For more passes than were measured it is that of the most measured ones: a returning host adds
    blocks to a request that already ran its other blocks again.
    """
    rows = [
        row
        for row in calibration.rows
        if (row.kept, row.parallel) == (cell.kept, cell.parallel) and row.passes <= cell.passes
    ]
    if not rows:
        return None
    row = max(rows, key=lambda row: row.passes)
    return Expected(**row.model_dump(exclude={"sd_orders"}), **asdict(calibration.facts))


def expected_of_named(calibration: Calibration, order: ExecutionOrder) -> Expected | None:
    """The accuracy to expect of steps that a client named; `None` if it was not measured, as for
    all but whole passes through their blocks.

    The age of the oldest state counts. In rounds of n blocks it equals that of n blocks in flight;
    the other states are newer, but the accuracy is the same.
    """
    kept = len(set(order))
    passes = [set(order.blocks[at : at + kept]) for at in range(0, len(order), kept)]
    oldest = max(position - version for position, (_, version) in enumerate(order.steps))
    if oldest >= kept or any(len(blocks) < kept for blocks in passes):
        return None
    expected = expected_at(calibration, Cell(kept, len(passes), oldest + 1))
    # A client may name more passes than were measured, which may be harmful.
    return expected if expected is not None and expected.passes == len(passes) else None


def useful_blocks(calibration: Calibration | None) -> int:
    """Fewest blocks with at least half of the accuracy that all have; 1 without a calibration.

    Each block counts as run once, because a request may lack the time for another pass.
    """
    if calibration is None:
        return 1
    enough = _USEFUL * calibration.queue[-1].top1
    return next(row.kept for row in calibration.queue if row.top1 >= enough)


def rounds_of(calibration: Calibration | None) -> Rounds:
    """How requests in free order run, according to the calibration; without one, as a queue.

    For each number of blocks: the fewest passes within half a point of the best number of passes,
    and with these the most blocks in flight that cost at most half a point. A late answer counts up
    to the age at which it is worse than none, and always up to the age that the number in flight
    causes.
    """
    if calibration is None or calibration.tied is not None:
        return QUEUE
    top1 = {row.cell: row.top1 for row in calibration.rows}
    depth = len(calibration.queue)
    ways = {kept: _way(top1, kept) for kept in range(1, depth + 1)}
    without = top1[Cell(depth - 1)] if depth > 1 else 0.0
    worse = [age for age, late in enumerate(calibration.late) if late < without]
    measured = worse[0] if worse else len(calibration.late)
    widest = max(way.parallel for way in ways.values())
    return Rounds(ways, max_age=max(measured, widest - 1))


def _way(top1: Mapping[Cell, float], kept: int) -> Way:
    """How `kept` blocks run, by the accuracy of every cell."""
    queue = {cell.passes: top1[cell] for cell in top1 if (cell.kept, cell.parallel) == (kept, 1)}
    passes = min(n for n, right in queue.items() if right >= max(queue.values()) - _POINTS)
    widest = max(
        cell.parallel
        for cell, right in top1.items()
        if (cell.kept, cell.passes) == (kept, passes) and right >= queue[passes] - _POINTS
    )
    return Way(widest, passes)


def expected_over(calibration: Calibration, cells: Sequence[Cell]) -> tuple[float, float, float]:
    """(top-1, low, high) in percent to expect of answers in these cells, one image each.

    The interval covers the uncertainty of the calibration and the random choice of the images and
    of their groups, so it is wide for few answers. There is at least one, and all cells were
    measured.
    """
    # Looked up once per cell: a drill has thousands of answers in few cells.
    by_cell = {cell: expected_at(calibration, cell) for cell in set(cells)}
    rows = [row for cell in cells if (row := by_cell[cell]) is not None]
    top1 = mean([row.top1 for row in rows])
    # The calibration's error is the same for all answers, so it does not shrink with their number.
    below = mean([row.top1 - row.low for row in rows])
    above = mean([row.high - row.top1 for row in rows])
    # The share of pairs of images that are wrong together is the same for fewer images, so the
    # design effect beyond 1 is proportional to their number.
    shared = [
        (row.images / row.effective - 1) / (row.images - 1)
        for row in rows
        if row.effective is not None and row.images > 1
    ]
    effect = 1 + sum(shared) / len(cells) * (len(cells) - 1)
    chance = _SURE * math.sqrt(top1 * (100 - top1) / len(cells) * effect)
    return (
        top1,
        max(0.0, top1 - math.hypot(below, chance)),
        min(100.0, top1 + math.hypot(above, chance)),
    )
