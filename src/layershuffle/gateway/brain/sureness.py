"""How sure answers are: temperatures by the number of blocks, and when a request may end.

A model is surer of its answers than it should be, and how much depends on how many blocks ran.
Dividing the logits by a temperature, measured on held-out images for every number of blocks, makes
the largest probability the chance of being right (Guo et al. 2017, arXiv 1706.04599).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from layershuffle.gateway.brain.policy import Cell, probabilities
from layershuffle.ground.rows import Count, Percent

Chance = Annotated[float, Field(gt=0, le=1)]

LOSS = 0.3
"""Points of top-1 that requests may lose by ending early, if they do not say how sure to be."""
STOPS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)
"""What is measured. A request that ends at another chance counts with the nearest of them."""
_CANDIDATES = tuple(thousandths / 1000 for thousandths in range(500, 1000))
_BINS = 15  # as Guo et al.
_TEMPERATURES = (0.02, 50.0)


class CalibrationPart(BaseModel):
    """A part of calibration.json."""

    # Strict: a number written as text is refused, not converted.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Accuracy(CalibrationPart):
    """Top-1 in percent of answers of a kind.

    `top1` is the mean over orders, `low` and `high` are its 95 % interval, `sd_orders` is its
    spread. Nine of ten orders, which keep different blocks, lie between `orders_low` and
    `orders_high`.
    """

    top1: Percent
    low: Percent
    high: Percent
    orders_low: Percent
    orders_high: Percent
    sd_orders: float | None = None

    def rounded(self) -> Accuracy:
        """The same in hundredths of a point, for files with many of them."""
        short: dict[str, float] = {}
        for name, value in self.model_dump(exclude_none=True).items():
            short[name] = round(value, 2)
        return Accuracy(**short)


class CellAccuracy(Accuracy):
    """The accuracy of a cell: `kept` blocks ran, each `passes` times, `parallel` at once.

    Blocks that keep their place run for every answer, and are not counted.
    """

    kept: Count
    passes: Count = 1
    parallel: Count = 1

    @property
    def cell(self) -> Cell:
        """The cell of this row."""
        return Cell(self.kept, self.passes, self.parallel)


class Stop(CalibrationPart):
    """Requests that may end at this chance of being right, once they are sure.

    `blocks`, `top1`: the mean number of blocks and the top-1 in percent of all of them, where no
    block is missing. Those that end early are easy and the others are hard, so each kind has an
    accuracy of its own. `sure`: answers that ended because they were sure, after as many blocks as
    that took. `sure_again`: those that were sure only while their blocks ran again, by the number
    of blocks. `unsure`: those that were never sure, by the number of blocks and passes. A kind that
    hardly came up is left out.
    """

    confidence: Chance
    blocks: Annotated[float, Field(ge=1)]
    top1: Percent
    sure: Accuracy | None
    sure_again: tuple[CellAccuracy, ...]
    unsure: tuple[CellAccuracy, ...]


class Sureness(CalibrationPart):
    """What makes the largest probability the chance of being right (`sureness`).

    `temperatures`: by the number of blocks, fitted on `images` images of `split` in `orders`
    orders. On test images in these orders: `raw_error` and `error`, the calibration errors in
    points without and with them, and `stops`, for requests that may end from `least` blocks on.
    `confidence`: the default of requests, chosen on `split`; `None`: they run all blocks.
    """

    split: str
    orders: Count
    images: Count
    temperatures: tuple[Annotated[float, Field(gt=0)], ...]
    raw_error: tuple[Percent, ...]
    error: tuple[Percent, ...]
    least: Count
    stops: Annotated[tuple[Stop, ...], Field(min_length=1)]
    confidence: Chance | None

    def stop_at(self, confidence: float) -> Stop | None:
        """The stop that was measured nearest to this chance; `None` below all of them."""
        if confidence < self.stops[0].confidence:
            return None
        return min(self.stops, key=lambda stop: abs(stop.confidence - confidence))


def temperature_of(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """The temperature with the least cross-entropy of logits `[n, classes]`, labels `[n]`."""
    from scipy.optimize import minimize_scalar

    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        chances = probabilities(logits, float(np.exp(log_temperature)))[rows, labels]
        return -float(np.log(np.maximum(chances, np.finfo(np.float64).tiny)).mean())

    low, high = np.log(_TEMPERATURES)
    best = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(best.x))


def calibration_error(chances: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """The expected calibration error in points: in bins of the chances `[n]`, the mean distance of
    the chance from the share of `right` `[n]`, weighted by the number of answers."""
    bins = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, weights=chances - right, minlength=_BINS)
    return 100.0 * float(np.abs(gaps).sum()) / len(chances)


def first_sure(
    confidence: float, chances: NDArray[np.float64], *, least: int = 1
) -> NDArray[np.int64]:
    """After how many steps requests are sure, `[orders, images]`; 0 for those that never are.

    `chances` `[orders, steps, images]`: after 1, 2 ... steps. None is sure before `least` steps.
    """
    sure = np.zeros_like(chances, dtype=bool)
    sure[:, least - 1 :] = chances[:, least - 1 :] >= confidence
    steps = np.arange(1, chances.shape[1] + 1)[None, :, None]
    first = np.where(sure, steps, np.inf).min(axis=1, initial=np.inf)
    return np.where(np.isinf(first), 0, first).astype(np.int64)


def ending_at(
    confidence: float,
    chances: NDArray[np.float64],
    *,
    right: NDArray[np.bool_],
    least: int = 1,
) -> tuple[float, float]:
    """(mean number of blocks, top-1 in percent) if requests end at that chance of being right.

    `chances` and `right` `[orders, depth, images]`: after 1, 2 ... blocks of every order. No
    request ends before `least` blocks.
    """
    ends = first_sure(confidence, chances, least=least)
    ends[ends == 0] = chances.shape[1]
    ended = np.take_along_axis(right, ends[:, None] - 1, axis=1)
    return float(ends.mean()), 100.0 * float(ended.mean())


def default_confidence(
    chances: NDArray[np.float64], right: NDArray[np.bool_], *, least: int = 1
) -> float | None:
    """The least confidence, from one half, that loses at most `LOSS`; `None` if all lose more.

    Chances, answers and `least` are as in `ending_at`.
    """
    enough = 100.0 * float(right[:, -1].mean()) - LOSS
    for confidence in _CANDIDATES:
        if ending_at(confidence, chances, right=right, least=least)[1] >= enough:
            return confidence
    return None


def chances_of(logits: NDArray[np.float32], temperatures: Sequence[float]) -> NDArray[np.float64]:
    """The chances `[orders, depth, images]` of logits `[orders, depth, images, classes]`."""
    chances: list[NDArray[np.float64]] = []
    for place, temperature in enumerate(temperatures):
        chances.append(probabilities(logits[:, place], temperature).max(axis=-1))
    return np.stack(chances, axis=1)
