"""The accuracy to expect of an answer, by how its blocks ran (`policy.Cell`).

It is measured once on test images (`client.calibrate`), stored as calibration.json beside the
model, and looked up for every answer. It also says how requests should run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from layershuffle.gateway.brain.policy import QUEUE, Cell, Rounds
from layershuffle.gateway.brain.sureness import (
    Accuracy,
    CalibrationPart,
    CellAccuracy,
    Sureness,
)
from layershuffle.ground.errors import ModelFileError, UsageError
from layershuffle.ground.files import user_path, write_text
from layershuffle.ground.rows import Count, Percent
from layershuffle.ground.stats import mean
from layershuffle.models.manifest import CALIBRATION

NEVER = (
    "the model was never calibrated (layershuffle swarm calibrate MODEL --data SPEC, then start "
    "again)"
)
_AGAIN = "run layershuffle swarm calibrate again"
_USEFUL = 0.5  # share of the accuracy with all blocks
_POINTS = 0.5  # of top-1: largest loss side by side, and least gain of another pass
_SURE = 1.96  # half-width of a 95 % interval in standard deviations


class CalibrationFacts(CalibrationPart):
    """The data that the expected accuracies were measured on."""

    data: str
    split: str
    orders: Count
    images: Count


class Expected(CellAccuracy, CalibrationFacts):
    """The accuracy in percent of answers for which `kept` blocks ran, and the data behind it.

    Each block ran `passes` times, `parallel` of them at once; fewer at once than in the answer, if
    those like it were measured with fewer alone. `low` and `high` are the 95 %
    interval of `top1`, a mean over orders. A single answer comes from one order, and nine of ten
    orders lie from `orders_low` to `orders_high`.

    `sure`: whether these answers ended because they were right with the chance `confidence`, or
    were never as sure as that; `None` for those that were to run all blocks.
    """

    model_config = ConfigDict(extra="ignore")  # a newer gateway may say more

    confidence: float | None = None
    sure: bool | None = None


class Calibration(CalibrationFacts):
    """The content of calibration.json. `weights` is the digest of the measured model.

    `late` has the top-1 in percent with all blocks one after the other, if the last one read a
    state that was 1, 2, ... versions old. `sureness` is `None` if the data have no held-out images.
    """

    schema_: Literal[4] = Field(4, alias="schema")
    weights: str
    seed: int
    classes: tuple[str, ...]
    rows: tuple[CellAccuracy, ...]
    late: tuple[Percent, ...] = ()
    sureness: Sureness | None = None

    @model_validator(mode="after")
    def _whole(self) -> Calibration:
        kept = [row.kept for row in self.queue]
        whole = kept and kept == [*range(1, len(kept) + 1)]
        if not whole or len(self.temperatures) not in (0, len(kept)):
            raise ValueError("the rows need 1, 2, 3, ... blocks, with temperatures for all or none")
        return self

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures by the number of blocks; empty if they were not measured."""
        return () if self.sureness is None else self.sureness.temperatures

    @property
    def queue(self) -> tuple[CellAccuracy, ...]:
        """The rows in which blocks run one after the other, each once, by the number of blocks."""
        rows: list[CellAccuracy] = []
        for row in self.rows:
            if row.passes == 1 and row.parallel == 1:
                rows.append(row)
        return tuple(rows)


def calibration_path(model: str) -> Path:
    """The path of the calibration of the model with this spec, beside its weights.

    Raises `UsageError` for models without a directory of their own, as those of this package.
    """
    from layershuffle.models.spec import model_directory, parse_spec

    parsed = parse_spec(model)
    if parsed.scheme != "dir":
        raise UsageError(
            f"{model} has no directory of its own to keep a calibration in",
            hint="save it first: layershuffle.save(model, DIR), or layershuffle fit",
        )
    return model_directory(user_path(parsed.place)) / CALIBRATION


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` to `path`, atomically."""
    write_text(path, calibration.model_dump_json(by_alias=True, indent=1) + "\n")


def read_calibration(path: Path, *, weights: str) -> Calibration | None:
    """The calibration stored at `path`, or `None` if there is none.

    Raises `ModelFileError` if it is damaged, of another version, or was measured on weights of
    another digest.
    """
    if not path.is_file():
        return None
    try:
        calibration = Calibration.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            why = " ".join([*map(str, first["loc"]), first["msg"]])
        raise ModelFileError(
            f"The calibration cannot be read, or is of another version ({why})",
            place=path,
            hint=_AGAIN,
        ) from error
    # A model that was refined further has other accuracies than its old file says.
    if calibration.weights != weights:
        raise ModelFileError(
            "The calibration was measured on other weights than the model has",
            place=path,
            hint=_AGAIN,
        )
    return calibration


# --- what a calibration says of answers -----------------------------------------------------------


def expected_accuracy(calibration: Calibration, cell: Cell) -> Expected | None:
    """The accuracy to expect of an answer in `cell` that was to run all blocks; `None` if it was
    not measured.

    For more passes than were measured it is that of the most measured ones: a returning host adds
    blocks to a request that already ran its other blocks again.
    """
    row = _row_of(calibration.rows, cell)
    if row is None:
        return None
    return Expected(**row.model_dump(), **_facts(calibration, orders=calibration.orders))


def expected_when_asked(
    calibration: Calibration, cell: Cell, *, confidence: float, sure: bool, again: bool
) -> Expected | None:
    """The accuracy to expect of an answer in `cell` that might end at the chance `confidence`;
    `None` if that was not measured, or hardly came up.

    `sure`: whether it ended because it was; `again`: whether blocks ran again. That of answers
    that were sure does not depend on the number of their blocks, unless these ran again. That of
    others is of the most at once, up to those of `cell`, that were measured, and says so.
    """
    sureness = calibration.sureness
    stop = None if sureness is None else sureness.stop_at(confidence)
    if sureness is None or stop is None:
        return None
    row: Accuracy | None
    if not sure:
        row = unsure = _unsure_row(stop.unsure, cell)
        if unsure is not None:
            cell = unsure.cell  # what was measured, also where the answers were later than that
    elif again:
        row = next((row for row in stop.sure_again if row.kept == cell.kept), None)
    else:
        row = stop.sure
    if row is None:
        return None
    measured = row.model_dump(include=set(Accuracy.model_fields))
    return Expected(
        kept=cell.kept,
        passes=cell.passes,
        parallel=cell.parallel,
        confidence=stop.confidence,
        sure=sure,
        **measured,
        **_facts(calibration, orders=sureness.orders),
    )


def _row_of(rows: Sequence[CellAccuracy], cell: Cell) -> CellAccuracy | None:
    """The row of `cell`, or else of the most passes that it has and that were measured."""
    best: CellAccuracy | None = None
    for row in rows:
        fits = row.kept == cell.kept and row.parallel == cell.parallel
        if fits and row.passes <= cell.passes and (best is None or row.passes > best.passes):
            best = row
    return best


def _unsure_row(rows: Sequence[CellAccuracy], cell: Cell) -> CellAccuracy | None:
    """The row of answers that were never sure in `cell`, or with the next fewer in flight."""
    best: CellAccuracy | None = None
    for row in rows:
        fits = row.kept == cell.kept and row.passes == cell.passes
        if (
            fits
            and row.parallel <= cell.parallel
            and (best is None or row.parallel > best.parallel)
        ):
            best = row
    return best


def _facts(calibration: Calibration, *, orders: int) -> dict[str, Any]:
    facts = calibration.model_dump(include=set(CalibrationFacts.model_fields))
    return {**facts, "orders": orders}


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

    For each number of blocks it takes the fewest passes within half a point of the best number of
    passes, and with these the most blocks in flight that cost at most half a point. A late answer
    counts up to the age at which it is worse than none, and always up to the age that the number in
    flight causes.
    """
    if calibration is None:
        return QUEUE
    top1 = {row.cell: row.top1 for row in calibration.rows}
    depth = len(calibration.queue)
    cells: dict[int, Cell] = {}
    widest = 1
    for kept in range(1, depth + 1):
        cells[kept] = _best_cell(top1, kept)
        widest = max(widest, cells[kept].parallel)
    one_less = top1[Cell(depth - 1)] if depth > 1 else 0.0
    useful_age = 0
    for late in calibration.late:
        if late < one_less:
            break
        useful_age += 1
    return Rounds(cells, max_age=max(useful_age, widest - 1))


def _best_cell(top1: Mapping[Cell, float], kept: int) -> Cell:
    """How `kept` blocks run, by the accuracy of every cell."""
    queue: dict[int, float] = {}  # top-1 by the number of passes, blocks one after the other
    for cell, right in top1.items():
        if cell.kept == kept and cell.parallel == 1:
            queue[cell.passes] = right
    best = max(queue.values())
    passes = min(number for number, right in queue.items() if right >= best - _POINTS)
    widest = 1
    for cell, right in top1.items():
        if cell.kept == kept and cell.passes == passes and right >= queue[passes] - _POINTS:
            widest = max(widest, cell.parallel)
    return Cell(kept, passes, widest)


def expected_interval(expected: Sequence[Expected]) -> tuple[float, float, float]:
    """(top-1, low, high) in percent to expect of answers, at least one, with one image each.

    The interval covers the uncertainty of the calibration and the random choice of independent
    images, so it is wide for few answers.
    """
    shares: list[float] = []
    downward: list[float] = []
    upward: list[float] = []
    for row in expected:
        shares.append(row.top1)
        downward.append(row.top1 - row.low)
        upward.append(row.high - row.top1)
    top1 = mean(shares)
    chance = _SURE * math.sqrt(top1 * (100 - top1) / len(expected))
    # The calibration's error is the same for all answers, so it does not shrink with their number.
    low = max(0.0, top1 - math.hypot(mean(downward), chance))
    high = min(100.0, top1 + math.hypot(mean(upward), chance))
    return top1, low, high
